"""Plays the nodes of a plan, one after another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch

from overlap1f1b.engine.boundary import Boundary
from overlap1f1b.engine.failures import Failures
from overlap1f1b.engine.lanes import Flight, Lane
from overlap1f1b.engine.microbatch import Microbatch
from overlap1f1b.engine.recompute import run_of
from overlap1f1b.engine.reduction import Reduction
from overlap1f1b.engine.weights import accumulate
from overlap1f1b.plan import RECOMPUTES, Node, Op, Span
from overlap1f1b.plan import Lane as LaneName
from overlap1f1b.schedule import Kind

Pace = Callable[[Node], float]
Place = tuple[int, int]
"""Stage and microbatch."""


_METHOD = {(op, kind): f"{op.value}_{'f' if kind is Kind.F else 'b'}" for op in Op for kind in (Kind.F, Kind.I)}
_NO_CONTEXT = nullcontext()


def _step(node: Node, microbatch: Microbatch) -> Callable[[Any], Any]:
    """The method that is the node, of the block's run."""
    run = microbatch.runs.get(node.block)
    if run is None:
        run = microbatch.runs[node.block] = run_of(microbatch, node.block)
    return getattr(run, _METHOD[node.op, node.kind])


def _dtypes(node: Node, microbatch: Microbatch) -> AbstractContextManager[object]:
    """Autocast around a step is for its forwards: a backward has the dtypes of its forward already."""
    device = microbatch.stage.device.type
    if node.kind is Kind.F or node.op in RECOMPUTES or not torch.is_autocast_enabled(device):
        return _NO_CONTEXT
    return torch.autocast(device, enabled=False)


class Player:
    """A machine that walks a list of nodes. It decides nothing.

    Args:
        timeout: Limit of every wait for another rank.
        failures: Where other ranks say that they failed.
        background: Whether exchanges are started and awaited by threads of the lanes.
        boundary: Carries out the ``send`` and ``receive`` nodes.
        reductions: Carry out the ``reduce`` nodes.
        pace: Seconds that a compute node must last at least; a stand-in for a slower processor.

    ``before_launch`` is called before every exchange; while nodes are measured it lets the ranks meet, so that the time
    of a transfer does not contain one rank's wait for another. ``around`` gives the context of every compute node.
    """

    def __init__(
        self,
        timeout: timedelta,
        failures: Failures,
        *,
        background: bool = False,
        boundary: Boundary | None = None,
        reductions: Sequence[Reduction] = (),
        pace: Pace | None = None,
    ) -> None:
        def lane(name: str, *, background: bool = background) -> Lane:
            return Lane(name, timeout, failures, background=background)

        back = lane("combine")
        self.lanes = {
            # A few bytes: sending them takes less time than handing them to a thread. The dispatch waits for them.
            (Op.COUNTS, Kind.F): lane("counts", background=False),
            # A dispatch that waits for its counts must not hold up the others; tags keep them apart on the wire.
            (Op.DISPATCH, Kind.F): lane("dispatch"),
            (Op.COMBINE, Kind.F): back,
            (Op.COMBINE, Kind.I): back,
            (Op.DISPATCH, Kind.I): back,
        }
        self.boundary, self.reductions, self.pace = boundary, reductions, pace
        self.before_launch: Callable[[], None] | None = None
        self.around: Callable[[Node], AbstractContextManager[object]] | None = None
        self.position = 0
        """Of the node that is played, in the list."""
        self.peak_activations = self.peak_held = 0
        self._spans: list[Span] = []
        self._flights: list[Flight[Any]] = []
        self._sends: deque[Flight[None]] = deque()
        self._begun = 0.0
        self._live: set[Place] = set()
        self._held: set[Place] = set()

    def play(self, nodes: Sequence[Node], microbatches: Mapping[Place, Microbatch]) -> None:
        """Plays the nodes.

        On an error every suspended forward is unwound and every exchange in flight is awaited, a second at most.
        """
        self._spans, self._flights, self._sends, self._begun = [], [], deque(), time.perf_counter()
        self._live, self._held = set(), set()
        self.peak_activations = self.peak_held = 0
        try:
            for self.position, node in enumerate(nodes):
                lane = node.lane
                if lane is LaneName.COMPUTE:
                    self._compute(node, microbatches[node.stage, node.microbatch])
                elif node.op is Op.REDUCE:
                    for reduction in self.reductions:
                        self._flights += reduction.launch(node)
                elif lane is LaneName.PEER:
                    self._pass(node, microbatches[node.stage, node.microbatch])
                else:
                    self._launch(node, microbatches[node.stage, node.microbatch])
            while self._sends:
                self._sends.popleft().wait()
        except BaseException:
            for microbatch in microbatches.values():
                microbatch.stop()
            for flight in self._flights:
                flight.drain(seconds=1.0)
            raise

    def _pass(self, node: Node, microbatch: Microbatch) -> None:
        """Sends to a neighbouring stage, or takes what it sends."""
        assert self.boundary is not None
        if node.op is Op.RECEIVE:
            arriving = microbatch.arriving[node.kind] = self.boundary.receive(node)
            self._flights.append(arriving)
            return
        while self._sends and self._sends[0].arrived:  # an earlier one's buffers are free
            self._sends.popleft().wait()
        send = self.boundary.send(node, *microbatch.take_passed(node.kind))
        self._sends.append(send)
        self._flights.append(send)

    def _launch(self, node: Node, microbatch: Microbatch) -> None:
        """Has an exchange started."""
        if self.before_launch is not None:
            self.before_launch()
        flight = self.lanes[node.op, node.kind].launch(node, _step(node, microbatch)(node))
        microbatch.flights[node.kind] = flight
        self._flights.append(flight)

    def _compute(self, node: Node, microbatch: Microbatch) -> None:
        place = (node.stage, node.microbatch)
        if node.kind is Kind.F:
            self._live.add(place)
            self._held.add(place)
            self.peak_activations = max(self.peak_activations, len(self._live))
            self.peak_held = max(self.peak_held, len(self._held))
        received = None if node.op in RECOMPUTES else microbatch.await_input(node.kind)
        start = time.perf_counter()
        with self.around(node) if self.around is not None else _NO_CONTEXT, _dtypes(node, microbatch):
            if node.kind is Kind.W:
                accumulate(microbatch.queues.pop((node.op, node.block, node.seam)).compute())
            else:
                _step(node, microbatch)(received)
        if self.pace is not None:
            time.sleep(max(0.0, start + self.pace(node) - time.perf_counter()))
        self._spans.append(Span(node, start - self._begun, time.perf_counter() - self._begun))
        if microbatch.ended:
            self._live.discard(place)
            if not microbatch.queues:
                self._held.discard(place)
                microbatch.finish()

    def spans(self) -> tuple[Span, ...]:
        """What the last :meth:`play` did, in seconds from its start; on CUDA only what the thread saw."""
        landed = [flight for flight in self._flights if flight.landed]
        flights = [Span(f.node, f.departed - self._begun, f.landed - self._begun) for f in landed]
        return (*self._spans, *flights)
