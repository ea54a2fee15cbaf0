"""A block that drops activations after its forward and computes them again before its backward.

The block's input and what exchanges have brought are kept: the rows that the experts received, and the sum of those
that came back. Everything else is computed from these without another exchange:

- the experts, from the rows that they received: the parts that the forward runs by ``run_part``;
- everything else, from the block's input and the sum. A block that exchanges rows by itself has no such parts: all of
  it is computed again, from the rows that came back.

The first forward runs with gradients enabled, so that it takes the same kernels and shows which outputs require a
gradient, but everything that autograd saves is dropped at once. The second forward is not suspended. It gets the same
random numbers, the same buffers, the same state of the thread (such as autocast), and the same scale of auxiliary
losses as the first: in a loop of combined steps these belong to the call that runs the forward, not to the call that
runs the backward. What it does to buffers is dropped, so that running means count a microbatch once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from overlap1f1b.engine.graph.edges import edge_of
from overlap1f1b.engine.graph.segment import Segment, Sent
from overlap1f1b.engine.run.block import BlockRun, Reached, Results
from overlap1f1b.engine.run.buffers import version_of
from overlap1f1b.engine.run.microbatch import Microbatch, Tensors
from overlap1f1b.engine.run.random import RandomStream
from overlap1f1b.engine.run.replaced import Replacement, replaced
from overlap1f1b.moe.auxiliary import AuxiliaryCarrier
from overlap1f1b.plan import Op
from overlap1f1b.transport.suspend import ThreadState


def _forget(_: Tensor) -> None:
    """Save nothing."""


def _forgotten(_: None) -> Tensor:
    raise ValueError(
        "a block calls torch.autograd.grad for activations that it drops and computes again; allowed: recompute='none'"
    )


CHECKPOINT = "torch.utils.checkpoint"
"""Module of the hooks that a checkpoint without a backward of its own sets; they count what is saved a second time."""

_FORGETTING = (_forget, _forgotten)


def _versions(results: Results) -> list[int]:
    """Return how often each tensor that exchanges have brought was changed in place."""
    return [version_of(tensor) for _, tensors in results for tensor in tensors]


class Dropped(NamedTuple):
    """A part of a forward whose activations are dropped, and that can be run again by itself.

    Args:
        rows: Its argument.
        state: Of the thread, when it ran first.
        random: Its random numbers.
        buffers: Of its block, when it ran first.
    """

    function: Callable[[Tensor], Tensor]
    rows: Tensor
    state: ThreadState
    random: RandomStream
    buffers: list[Replacement]


class RecomputedRun(BlockRun):
    """The nodes of one block for one microbatch, with parts that are dropped and computed again."""

    def __init__(self, microbatch: Microbatch, block: int) -> None:
        super().__init__(microbatch, block)
        shape = self.stage.shape[block]
        self.drops_own, self.drops_experts = shape.drops(shape.own), shape.drops(Op.EXPERTS)
        self.x: list[tuple[Tensor, int]] = []
        """Inputs, and their versions."""
        self.streams: list[RandomStream] = []
        """Random numbers of each segment."""
        self.buffers: list[list[Replacement]] = []
        """Buffers at the start of each segment."""
        self.part_random: RandomStream | None = None
        """Random numbers of the part that runs."""
        self.dropped: dict[int, Dropped] = {}
        """Parts that were dropped, by the number of their segment."""
        self.results: list[tuple[Results, list[int]] | None] = []
        """Rows brought to each segment but the first, and their versions; None if no second forward needs them."""
        self.sums: list[Tensor] = []
        """Copies of values that the second forward takes from the first."""
        self.state: ThreadState | None = None
        """At the start of the forward."""
        self.aux_scales: list[tuple[AuxiliaryCarrier, float]] = []
        """Scales of auxiliary losses."""
        self.again = False
        """Whether the second forward runs."""

    # ---------------------------------------------------------------------------------------------- dropping

    def _inputs(self) -> Tensors:
        x = super()._inputs()
        self.state = ThreadState.capture(self.stage.device)
        self.aux_scales = [(carrier, carrier.aux_scale) for carrier in self.stage.carriers[self.block]]
        if self.drops_own:
            self.x = [(t, version_of(t)) for t in x]
        return x

    def _start(self, x: Tensors, random: RandomStream) -> Reached:
        if self.again or not self.drops_own:
            return super()._start(x, random)
        self.buffers.append(self.stage.buffers[self.block].copies())
        self.streams.append(random.again())
        with saved_tensors_hooks(*_FORGETTING):
            return super()._start(x, random)

    def _resume(self, results: Results, random: RandomStream) -> Reached:
        call, forward = results[0][0].call, self.forward
        assert forward is not None
        if any(getattr(pack, "__module__", "") == CHECKPOINT for pack, _ in forward.inside.hooks):
            raise ValueError(
                f"{self.name} exchanges rows inside torch.utils.checkpoint, with "
                f"recompute={self.stage.shape[self.block].recompute!r}; allowed: recompute='none', or a checkpoint of "
                "other parts"
            )
        forward.part, forward.once = self._run_part, self._compute_once
        self.part_random = random.again() if call.feeds_part and not self.again else None
        if self.again or not self.drops_own:
            return super()._resume(results, random)
        self.buffers.append(self.stage.buffers[self.block].copies())
        self.streams.append(random.again())
        self.results.append(None if call.feeds_part else (results, _versions(results)))
        with saved_tensors_hooks(*_FORGETTING):
            return super()._resume(results, random)

    def _thread(self) -> ThreadState:
        return ThreadState.capture(self.stage.device)  # hooks and other states are set around its parts

    def _run_part(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        if self.again:  # its own node computes it
            return rows.detach()
        device, state = self.stage.device, ThreadState.capture(self.stage.device)
        kept = tuple(hook for hook in state.hooks if hook != _FORGETTING)
        if self.drops_experts:
            assert self.part_random is not None
            state, buffers = state._replace(hooks=kept), self.stage.buffers[self.block].copies()
            self.dropped[len(self.segments) - 1] = Dropped(function, rows.detach(), state, self.part_random, buffers)
            kept = (*kept, _FORGETTING)
        with state._replace(hooks=kept).applied(self.name, device):
            return function(rows)

    def _compute_once(self, function: Callable[[Tensor | None], Tensor]) -> Tensor:
        if not self.drops_own:
            return function(None)
        if self.again:
            return function(self.sums.pop(0))
        value = function(None)
        self.sums.append(value.detach().clone())  # the block may change its own in place
        self.results[-1] = None  # the sum of these rows is kept instead
        return value

    def _keep(self, outs: Tensors) -> None:
        starts = self.buffers or [part.buffers for part in self.dropped.values()]
        if starts and not self.again:
            self.stage.buffers[self.block].ended(starts[0])
        if self.again or not self.drops_own:
            super()._keep(outs)
        else:
            self._close(self.segments[-1])
            for number, segment in enumerate(self.segments):
                if not self._is_part(number):
                    _drop_graph(segment)
                    segment.crossed, segment.parameters = {}, {}
        if self.drops_experts and not self.again:
            for number in self.dropped:
                _drop_graph(self.segments[number])

    def _is_part(self, number: int) -> bool:
        """Return whether a segment is a part that is run by itself."""
        (op, _, _), _ = self.stage.segments[self.block][number]
        return bool(number) and op is Op.EXPERTS and not self.foreign

    # ---------------------------------------------------------------------------------------------- computing again

    def recompute_experts(self) -> None:
        """Compute the experts again from the rows that they received."""
        part, segment = self.dropped.pop(len(self.segments) - 1), self.segments[-1]
        (entry,) = segment.received
        self.stage.queue = segment.queue
        with part.random, part.state.applied(self.name, self.stage.device), replaced(part.buffers):
            made = part.function(part.rows if entry is None else entry.enter(part.rows, self.stage.anchor))
            (sent,) = segment.sent
            sent.edges = [edge_of(made) if made.requires_grad else None]

    def recompute_attention(self) -> None:
        """Compute everything outside the experts again, from the block's input."""
        stage, state = self.stage, self.state
        assert state is not None
        self.again, self.seen, self.noting = True, None, False
        with (
            state.applied(self.name, stage.device),
            replaced((vars(carrier), "aux_scale", scale) for carrier, scale in self.aux_scales),
            ExitStack() as buffers,
        ):
            self._run_again(buffers)

    def _run_again(self, buffers: ExitStack) -> None:
        """Run the whole forward a second time, answer its exchanges with what they brought, and keep its graph."""
        if any(version_of(t) != version for t, version in self.x):
            raise self._in_place(f"the input of {self.name} was changed in place")
        first, self.segments = self.segments, []
        buffers.enter_context(replaced(self.buffers[0]))
        reached = self._start(tuple([t for t, _ in self.x]), self.streams[0])
        for number, old in enumerate(first):
            before, calls = [sent.call for sent in old.sent], reached if isinstance(reached, list) else []
            if [call.back for call in calls] != [call.back for call in before]:
                raise ValueError(
                    f"{self.name} exchanges other rows when it is recomputed; allowed: a forward that repeats its calls"
                )
            if not calls:
                break
            if self._is_part(number):  # its graph is kept, or is made by its own node
                self._close(self.segments[-1])
                old.start, old.end = self.segments[-1].start, self.segments[-1].end  # its place among the others
                self.segments[-1] = old
                for call in calls:
                    call.tensors.clear()
            else:
                self._send([old._replace(tensors=new.tensors) for old, new in zip(before, calls, strict=True)])
            buffers.enter_context(replaced(self.buffers[number + 1]))
            reached = self._resume(self._answer(number, first[number + 1]), self.streams[number + 1])
        assert isinstance(reached, tuple)
        self.forward, self.x, self.results, self.streams, self.buffers = None, [], [], [], []
        self._keep(reached)

    def _answer(self, number: int, old: Segment) -> Results:
        """Return what exchanges have brought a segment, or tensors of its shape whose values nobody reads."""
        kept = self.results[number]
        if kept is not None:
            results, versions = kept
            if _versions(results) != versions:
                raise self._in_place(f"{self.name} changes in place what an exchange has brought")
            return results
        return [(sent, _unread(sent)) for sent, _ in old.taken]

    def _in_place(self, what: str) -> ValueError:
        return ValueError(f"{what}, with recompute={self.stage.shape[self.block].recompute!r}; allowed: a copy")


def _unread(sent: Sent) -> list[Tensor]:
    return [kind.zeros(1).expand(sent.count, *kind.shape) for kind in sent.layout.rows]


def _drop_graph(segment: Segment) -> None:
    for sent in segment.sent:
        sent.edges = [None] * len(sent.edges)
