"""Parts of a block's forward whose activations are dropped, and computed again before or in their backward.

A part keeps its arguments and what its exchanges have brought. Everything else that autograd saves is dropped. A second
forward of the part brings it back: exchanges are answered with what they brought, and only the tensors that autograd
saves are kept. The graph stays that of the first forward, so the engine cuts, orders and walks it as without.

:class:`RecomputedRun` has such parts for ``recompute=``, in nodes of their own: the experts, from the rows that they
received, and everything else, from the block's input and the sums of the rows that came back from its experts. A block
that exchanges rows by itself is one part. What a block runs in a checkpoint of torch's (not a reentrant one) or of
Megatron-Core's is a part, too, and the experts inside it another: the first use in a backward computes them.

The second forward gets the same random numbers, buffers, state of the thread (such as autocast) and scale of auxiliary
losses as the first: in a loop of combined steps these belong to the call that runs the forward, not to the call that
runs the backward. What it does to buffers is dropped, so that running means count a microbatch once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from overlap1f1b.cut.buffers import version_of
from overlap1f1b.cut.crossing import CrossingMode, eager
from overlap1f1b.cut.random import RandomStream
from overlap1f1b.cut.replacement import replaced
from overlap1f1b.cut.segment import Entry, storage_of
from overlap1f1b.plan import Op
from overlap1f1b.play.block import BlockRun
from overlap1f1b.play.microbatch import Tensors
from overlap1f1b.transport.suspension import Exchanged, Forward, Stack, ThreadState

_NOTHING = nullcontext()


class Saved:
    """A tensor that autograd has saved, and that is there from the second forward on until its node is gone."""

    def __init__(self, tensor: Tensor) -> None:
        self.kind = tensor.shape, tensor.dtype
        self.is_there = False
        self.value: Any = None
        """The tensor, or what the model's own hooks make of it."""
        self.version = 0


class Kept:
    """What a second forward begins or goes on with, at a place where the first has just begun or gone on.

    ``values`` are the part's arguments, or what an exchange has brought.
    """

    def __init__(self, run: BlockRun, forward: Forward, values: Sequence[Any]) -> None:
        self.values = tuple([value.detach() if isinstance(value, Tensor) else value for value in values])
        self.mode = forward.with_mode  # whether the forward's function mode is in force behind this place
        self.buffers = run.stage.buffers[run.block].copies()
        self._requires_grad = [isinstance(value, Tensor) and value.requires_grad for value in values]
        self._versions = self._now()
        self._random = RandomStream.here(run.stage.generators)

    def _now(self) -> list[int]:
        return [version_of(value) for value in self.values if isinstance(value, Tensor)]

    @property
    def is_changed(self) -> bool:
        """Whether values were changed in place since."""
        return self._now() != self._versions

    def enter(self, inside: ExitStack, anchor: Tensor) -> tuple[Any, ...]:
        """Return the values; random numbers and buffers are as they were at this place until ``inside`` ends."""
        inside.enter_context(self._random)
        inside.enter_context(replaced(self.buffers))
        pairs = zip(self.values, self._requires_grad, strict=True)  # no leaves: they may be changed in place
        return tuple([Entry(value).enter(value, anchor) if required else value for value, required in pairs])


class Again:
    """A part ``function(*args)`` of the forward that runs.

    Args:
        inside: Context of the first forward, such as a policy that saves some results.
        around: Context of the second one, such as random numbers and counters that torch does not know.
    """

    def __init__(
        self,
        run: BlockRun,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        inside: AbstractContextManager[Any] = _NOTHING,
        around: AbstractContextManager[Any] = _NOTHING,
    ) -> None:
        forward = Forward.running()
        assert forward is not None
        self._run, self._function, self._inside, self._around = run, function, inside, around
        state = ThreadState.capture(run.stage.device)
        modes = tuple([mode for mode in state.function_modes if not isinstance(mode, CrossingMode)])
        self._state = state._replace(function_modes=modes, hooks=())
        self._hooks = next(iter(reversed(users_hooks(state))), None)
        self._saved: list[weakref.ref[Saved]] = []
        self._kept = [Kept(run, forward, args)]
        if run.buffers is None:
            run.buffers = self._kept[0].buffers
        self._scales = [(vars(one), "aux_scale", one.aux_scale) for one in run.stage.carriers[run.block]]
        self._first = True  # whether the first forward runs

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run the part for the first time in the body."""
        forward, run = Forward.running(), self._run
        assert forward is not None
        outer, again, part = forward.bring, forward.again, forward.part

        def bring(exchange: Exchanged, *, own: bool = False) -> tuple[Any, ...]:
            with self._without_policy():
                kept = values = outer(exchange, own=own)
                if own:
                    kept = tuple([value.detach().clone().requires_grad_(value.requires_grad) for value in values])
                self._kept.append(Kept(run, forward, kept))
            return values

        forward.bring, forward.again = bring, _part_of_another
        if part is None:
            forward.part = partial(run_again, run)
        try:
            with saved_tensors_hooks(self._drop, self._again), self._inside:
                yield
        finally:
            forward.bring, forward.again, forward.part, self._first = outer, again, part, False

    def _without_policy(self) -> AbstractContextManager[None]:
        """Return a context without the part's dispatch modes: they count calls, of which a second has fewer."""
        run, now = self._run, ThreadState.capture(self._run.stage.device)
        if now.dispatch_modes == self._state.dispatch_modes:
            return _NOTHING
        return now._replace(dispatch_modes=self._state.dispatch_modes).applied(run.name, run.stage.device)

    def _drop(self, tensor: Tensor) -> Saved | Tensor:
        if self._is_there(tensor):
            return tensor
        saved = Saved(tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def _is_there(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a weight, which is there anyway, with attributes that backwards look at."""
        return self._hooks is None and storage_of(tensor) in self._run.weights

    def _again(self, saved: Saved | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not saved.is_there:
            if self._first:
                raise ValueError(
                    "a block calls torch.autograd.grad for activations that it drops and computes again; allowed: "
                    "recompute='none'"
                )
            stacks: list[Stack] = []  # each is used from one depth of C calls
            try:
                self.compute(stacks)
            finally:
                for stack in stacks:
                    stack.end()
        value: Tensor = saved.value if self._hooks is None else self._hooks[1](saved.value)
        if self._hooks is None and version_of(value) != saved.version:
            raise RuntimeError(
                f"{self._run.name} changes in place a tensor of {list(value.shape)} that its backward needs; "
                "allowed: a copy"
            )
        return value

    def compute(self, stacks: list[Stack]) -> None:
        """Run the part a second time, on one of these stacks, and keep what autograd saves."""
        run, stage, repeats, left = self._run, self._run.stage, True, iter(self._saved)

        def save(tensor: Tensor) -> Tensor | None:  # its graph is not walked
            nonlocal repeats
            if self._is_there(tensor):
                return tensor
            place = next(left, None)
            saved = None if place is None else place()
            if saved is not None:
                saved.value = tensor.detach() if self._hooks is None else self._hooks[0](tensor)
                saved.is_there, saved.version = True, version_of(tensor)
            repeats &= place is not None and (saved is None or saved.kind == (tensor.shape, tensor.dtype))
            return None

        def function(*args: Any) -> None:
            with saved_tensors_hooks(save, lambda saved: saved), self._around:
                self._function(*args)

        if any(kept.is_changed for kept in self._kept):
            what = (
                f"the input of {run.name} was changed in place"
                if self._kept[0].is_changed
                else f"{run.name} changes in place what an exchange has brought"
            )
            mode = run.installed.cut.shape[run.block].recompute
            where = "in a part that is computed again" if mode == "none" else f"with recompute={mode!r}"
            raise ValueError(f"{what}, {where}; allowed: a copy")
        second, carried = Forward(function, run.name, stage.device, stacks, CrossingMode()), stage.state_of(run.block)
        second.hides, second.again, second.bring = run.hides, _part_of_another, _answered
        run.seen = None
        answers, self._kept = iter(self._kept), []
        go: Callable[..., Any] = partial(second.start, grad=self._state.grad)
        if carried is not None:
            carried.begin(run.microbatch.random.seed)
        try:
            with self._state.applied(run.name, stage.device), replaced(self._scales), ExitStack() as inside:
                for kept in answers:
                    values = kept.enter(inside, run.installed.anchor)
                    with eager(kept.mode):
                        reached = go(values, self._state, mode=kept.mode)
                    go = second.resume
                    if reached is not second:  # its end
                        break
        finally:
            second.stop()
            if carried is not None:
                carried.leave(ended=True)
        if reached is second or next(answers, None) is not None:
            raise ValueError(
                f"{run.name} exchanges other rows when it is recomputed; allowed: a forward that repeats its calls"
            )
        if not repeats or next(left, None) is not None:
            raise ValueError(
                f"{run.name} computes something else when a part of it is computed again; "
                "allowed: a forward that repeats itself"
            )
        self._saved = []


def run_again(run: BlockRun, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a part of a block's forward that the backward computes again, see :class:`Again`."""
    with Again(run, function, args).first():
        return function(*args)


def _part_of_another(function: Any, args: Any, inside: AbstractContextManager[Any], around: Any) -> Any:
    """Return the context of a part inside another, which computes it again."""
    return inside


def users_hooks(state: ThreadState) -> tuple[tuple[Any, Any], ...]:
    """Return the model's own hooks of saved tensors, outermost first."""
    return tuple([hooks for hooks in state.hooks if not isinstance(getattr(hooks[0], "__self__", None), Again)])


def _answered(_: Exchanged, *, own: bool = False) -> Any:
    """Let whoever runs a second forward answer an exchange."""
    forward = Forward.running()
    assert forward is not None
    return forward.suspend(forward)


class RecomputedRun(BlockRun):
    """The nodes of one block for one microbatch, with parts that are dropped and computed again in their own nodes."""

    own: Again | None = None
    """The block without its experts, if it is dropped."""
    parts: dict[int, Again]
    """Experts that are dropped, by the number of their segment."""

    def begin(self, forward: Forward) -> None:
        self.parts = {}
        if self.microbatch.grad:
            forward.again = self._part
        if self.drops_own or self.drops_experts:
            forward.part = self._run_part
        if self.drops_own:
            forward.function = self._run_dropped

    def _run_dropped(self, *x: Tensor) -> Tensors:
        self.own = Again(self, self._run_module, x)
        with self.own.first():
            return self._run_module(*x)

    def _part(self, *given: Any) -> AbstractContextManager[None]:
        return Again(self, *given).first()

    def _run_part(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.drops_experts:
            part = self.parts[len(self.segments) - 1] = Again(self, function, args)
            with part.first():
                return function(*args)
        state = ThreadState.capture(self.stage.device)
        with state._replace(hooks=users_hooks(state)).applied(self.name, self.stage.device):
            return function(*args)

    def recompute(self, op: Op) -> None:
        """Compute a part again: the experts of the last segment, or everything else."""
        part = self.parts.pop(len(self.segments) - 1) if op is Op.RECOMPUTE_EXPERTS else self.own
        assert part is not None
        part.compute(self.installed.stacks)
