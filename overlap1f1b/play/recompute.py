"""Parts of a block's forward whose activations are dropped, and computed again before or in their backward.

A part keeps its arguments and what its exchanges have brought. Everything else that autograd saves is dropped. A second
forward of the part brings it back: exchanges are answered with what they brought, and only the tensors that autograd
saves are kept. The graph stays that of the first forward, so the engine cuts, orders and walks it as without.

With ``recompute=`` such parts have nodes of their own: the experts, from the rows that they received, and everything
else, from the block's input and the sums of the rows that came back from its experts. A block that exchanges rows by
itself is one part. What a block runs in a checkpoint of torch's (not a reentrant one) or of Megatron-Core's is a part,
too, and the experts inside it another: the first use in a backward computes them.

The second forward gets the same random numbers, buffers, state of the thread (such as autocast) and scale of auxiliary
losses as the first: in a loop of combined steps these belong to the call that runs the forward, not to the call that
runs the backward. What it does to buffers and to places that the engine carries is taken back: running means and
counters count a microbatch once.

Nothing here refers to the run of the block: its graph holds the parts, and would keep both alive together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from overlap1f1b.cut.bits import storage_of
from overlap1f1b.cut.buffers import version_of
from overlap1f1b.cut.contents import copies_of
from overlap1f1b.cut.replacement import Replacement, replaced
from overlap1f1b.plan import Op
from overlap1f1b.play.crossing import CrossingMode, eager
from overlap1f1b.play.install import Installation
from overlap1f1b.play.offload import BlockOffload, Kept
from overlap1f1b.play.random import RandomStream
from overlap1f1b.play.segment import Entry
from overlap1f1b.play.values import PlaceValues
from overlap1f1b.transport.suspension import Exchanged, Forward, Handlers, Stack, ThreadState

_NOTHING = nullcontext()
Keep = Callable[[Tensor], "Kept | Tensor"]
"""Keeps a tensor, which may be away until it is needed."""


class Saved:
    """A tensor that autograd has saved, and that is there from the second forward on until its node is gone."""

    def __init__(self, tensor: Tensor) -> None:
        self.kind = tensor.shape, tensor.dtype
        self.is_there = False
        self.value: Any = None
        """The tensor, or what the model's own hooks make of it."""
        self.version = 0


class Point:
    """What a second forward begins or goes on with, at a place where the first has just begun or gone on.

    ``values`` are the part's arguments, or what an exchange has brought; ``keep`` keeps those that are tensors.
    """

    def __init__(self, recomputation: Recomputation, forward: Forward, values: Sequence[Any], keep: Keep) -> None:
        stage = recomputation.installed.stage
        self._values = [keep(value) if isinstance(value, Tensor) else value for value in values]
        self.mode = forward.with_mode  # whether the forward's function mode is in force behind this place
        self.buffers = stage.inside[recomputation.block].buffers.copies()
        self._requires_grad = [isinstance(value, Tensor) and value.requires_grad for value in values]
        self._random = RandomStream.here(stage.draws.generators)

    @property
    def is_changed(self) -> bool:
        """Whether values were changed in place since."""
        return any(isinstance(value, Kept) and value.is_changed for value in self._values)

    def enter(self, inside: ExitStack, of: Recomputation) -> tuple[Any, ...]:
        """Return the values; random numbers and buffers are as they were at this place until ``inside`` ends."""
        inside.enter_context(self._random)
        inside.enter_context(replaced(self.buffers))
        values = [value.given_back(of.name) if isinstance(value, Kept) else value for value in self._values]
        pairs = zip(values, self._requires_grad, strict=True)  # no leaves: they may be changed in place
        anchor = of.installed.anchor
        return tuple([Entry(value).enter(value, anchor) if required else value for value, required in pairs])


class DroppedPart:
    """A part ``function(*args)`` of the forward that runs, without its activations.

    Args:
        inside: Context of the first forward, such as a policy that saves some results.
        around: Context of the second one, such as random numbers and counters that torch does not know.
        keep: Keeps what it is computed again from.
    """

    def __init__(
        self,
        recomputation: Recomputation,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        inside: AbstractContextManager[Any] = _NOTHING,
        around: AbstractContextManager[Any] = _NOTHING,
        keep: Keep = Kept,
    ) -> None:
        forward = Forward.running()
        assert forward is not None
        self._of, self._function, self._inside, self._around = recomputation, function, inside, around
        state = ThreadState.capture(recomputation.installed.stage.device)
        modes = tuple([mode for mode in state.function_modes if not isinstance(mode, CrossingMode)])
        self._state = state._replace(function_modes=modes, hooks=())
        self._hooks = next(iter(reversed(users_hooks(state))), None)
        self._saved: list[weakref.ref[Saved]] = []
        self._keep = keep
        self._points = [Point(recomputation, forward, args, keep)]
        self._scales = recomputation.begin(self._points[0])
        self._first = True  # whether the first forward runs

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run the part for the first time in the body."""
        forward, recomputation = Forward.running(), self._of
        assert forward is not None
        outer = forward.handlers

        def bring(exchange: Exchanged, *, own: bool = False) -> tuple[Any, ...]:
            with self._without_policy():
                kept = values = outer.bring(exchange, own=own)
                if own:
                    kept = tuple([value.detach().clone().requires_grad_(value.requires_grad) for value in values])
                self._points.append(Point(recomputation, forward, kept, self._keep))
            return values

        part = outer.part or recomputation.run_part
        forward.handle(outer._replace(bring=bring, checkpoint=_part_of_another, part=part))
        try:
            with saved_tensors_hooks(self._drop, self._unpack), self._inside:
                yield
        finally:
            forward.handle(outer)
            self._first = False

    def _without_policy(self) -> AbstractContextManager[None]:
        """Return a context without the part's dispatch modes: they count calls, of which a second has fewer."""
        device = self._of.installed.stage.device
        now = ThreadState.capture(device)
        if now.dispatch_modes == self._state.dispatch_modes:
            return _NOTHING
        return now._replace(dispatch_modes=self._state.dispatch_modes).applied(self._of.name, device)

    def _drop(self, tensor: Tensor) -> Saved | Tensor:
        if self._is_there(tensor):
            return tensor
        saved = Saved(tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def _is_there(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a weight, which is there anyway, with attributes that backwards look at."""
        return self._hooks is None and storage_of(tensor) in self._of.weights

    def _unpack(self, saved: Saved | Tensor) -> Tensor:
        """Return what autograd has saved, computed again if it was dropped."""
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
                f"{self._of.name} changes in place a tensor of {list(value.shape)} that its backward needs; "
                "allowed: a copy"
            )
        return value

    def compute(self, stacks: list[Stack]) -> None:
        """Run the part a second time, on one of these stacks, and keep what autograd saves."""
        recomputation, repeats, left = self._of, True, iter(self._saved)
        name, stage = recomputation.name, recomputation.installed.stage
        shape = recomputation.installed.cut.shape[recomputation.block]

        def save(tensor: Tensor) -> Tensor | None:  # its graph is not walked
            """Keep a saved tensor of the second forward in the place of the first one's."""
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

        if any(point.is_changed for point in self._points):
            what = (
                f"the input of {name} was changed in place"
                if self._points[0].is_changed
                else f"{name} changes in place what an exchange has brought"
            )
            mode = shape.recompute
            where = "in a part that is computed again" if mode == "none" else f"with recompute={mode!r}"
            raise ValueError(f"{what}, {where}; allowed: a copy")
        handlers = Handlers(checkpoint=_part_of_another, bring=_answered, hides=recomputation.hides, parts=shape.parts)
        second = Forward(function, name, stage.device, stacks, CrossingMode(), handlers)
        answers, self._points = iter(self._points), []
        go: Callable[..., Any] = partial(second.start, grad=self._state.grad)
        with ExitStack() as inside:
            inside.enter_context(recomputation.without_trace())
            inside.callback(second.stop)
            inside.enter_context(self._state.applied(name, stage.device))
            inside.enter_context(replaced(self._scales))
            for point in answers:
                values = point.enter(inside, recomputation)
                with eager(point.mode):
                    reached = go(values, self._state, mode=point.mode)
                go = second.resume
                if reached is not second:  # its end
                    break
        if reached is second or next(answers, None) is not None:
            raise ValueError(
                f"{name} exchanges other rows when it is recomputed; allowed: a forward that repeats its calls"
            )
        if not repeats or next(left, None) is not None:
            raise ValueError(
                f"{name} computes something else when a part of it is computed again; "
                "allowed: a forward that repeats itself"
            )
        self._saved = []


def _part_of_another(function: Any, args: Any, inside: AbstractContextManager[Any], around: Any) -> Any:
    """Return the context of a part inside another, which computes it again."""
    return inside


def users_hooks(state: ThreadState) -> tuple[tuple[Any, Any], ...]:
    """Return the model's own hooks of saved tensors, outermost first."""
    return tuple([hooks for hooks in state.hooks if not isinstance(_owner(hooks), DroppedPart | BlockOffload)])


def _owner(hooks: tuple[Any, Any]) -> object:
    return getattr(hooks[0], "__self__", None)


def _answered(_: Exchanged, *, own: bool = False) -> Any:
    """Let whoever runs a second forward answer an exchange."""
    forward = Forward.running()
    assert forward is not None
    return forward.suspend(forward)


class Recomputation:
    """The parts of one forward of a block that are computed again.

    Args:
        installed: The stage in its step.
        block: Number of the block.
        seed: Of the microbatch's random numbers.
        hides: Returns whether an exchange of the model's own suspends the forward.
        keep: Keeps what parts with nodes of their own are computed again from.

    Attributes:
        own: The block without its experts, if it is dropped.
        experts: Experts that are dropped, in the order of their segments.
    """

    def __init__(
        self, installed: Installation, block: int, seed: int, hides: Callable[..., bool], keep: Keep = Kept
    ) -> None:
        self.installed, self.block, self.hides, self._seed, self._keep = installed, block, hides, seed, keep
        self.own: DroppedPart | None = None
        self.experts: list[DroppedPart] = []
        self._buffers: list[Replacement] | None = None  # copies before the first part
        self._contents = installed.stage.inside[block].places.contents()

    @property
    def name(self) -> str:
        """Name of the block."""
        return self.installed.stage.names[self.block]

    @cached_property
    def weights(self) -> set[int]:
        """Storages of the block's parameters."""
        return {storage_of(parameter) for parameter in self.installed.stage.blocks[self.block].parameters()}

    def begin(self, point: Point) -> list[Replacement]:
        """Note where a part begins; return the scales of auxiliary losses for its second forward."""
        if self._buffers is None:
            self._buffers = point.buffers
        return [(vars(one), "aux_scale", one.aux_scale) for one in self.installed.stage.inside[self.block].carriers]

    def end(self) -> None:
        """Note that the first forward has ended."""
        self.installed.stage.inside[self.block].places.learn_in_place(self._contents)
        self._contents = {}
        if self._buffers is not None:
            self.installed.stage.inside[self.block].buffers.ended(self._buffers)
            self._buffers = None

    def function(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the block's forward, and drop the activations that it keeps outside of its experts."""

        def dropped(*x: Tensor) -> Any:
            self.own = DroppedPart(self, plain, x, keep=self._keep)
            with self.own.first():
                return plain(*x)

        return dropped

    def run_part(self, function: Callable[..., Any], args: tuple[Any, ...], *, later: bool = False) -> Any:
        """Run experts as a part of their own, which its first use in a backward computes, or a node ``later``."""
        part = DroppedPart(self, function, args, keep=self._keep if later else Kept)
        if later:
            self.experts.append(part)
        with part.first():
            return function(*args)

    def run_kept(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run experts that keep their activations, inside a block that drops its own."""
        device = self.installed.stage.device
        state = ThreadState.capture(device)
        outer = tuple([hooks for hooks in state.hooks if not isinstance(_owner(hooks), DroppedPart)])
        with state._replace(hooks=outer).applied(self.name, device):
            return function(*args)

    def compute(self, op: Op, stacks: list[Stack]) -> None:
        """Compute a part again, on one of these stacks: the experts of the last segment, or everything else."""
        if op is Op.RECOMPUTE_EXPERTS:
            part = self.experts.pop()
        else:
            assert self.own is not None
            part, self.own = self.own, None
        part.compute(stacks)

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Run a second forward in the body, and take back what it sets in places that are carried."""
        known = self.installed.stage.inside[self.block].places
        carried = PlaceValues(known) if known.changing or known.own is not None else None
        with replaced(copies_of((table, name) for (_, name), table in known.in_place.items())):
            if carried is not None:
                carried.begin(self._seed)
            try:
                yield
            finally:
                if carried is not None:
                    carried.undo()
