"""Plays the nodes of a plan, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

from overlap1f1b.engine.cut import BlockRun
from overlap1f1b.engine.lanes import Flight, Lane
from overlap1f1b.engine.microbatch import Microbatch
from overlap1f1b.engine.reducer import Reducer
from overlap1f1b.engine.weights import accumulate
from overlap1f1b.plan import Lane as LaneName
from overlap1f1b.plan import Node, Op, Span
from overlap1f1b.schedule import Kind

Pace = Callable[[Node], float]


class Player:
    """A machine that walks a list of nodes. It decides nothing.

    Args:
        timeout: Limit of every wait for another rank.
        background: Whether exchanges are started and awaited by threads of the lanes.
        pace: Seconds that a compute node must last at least; a stand-in for a slower processor.

    ``before_launch`` is called before every exchange; while nodes are measured it lets the ranks meet, so that the time
    of a transfer does not contain one rank's wait for another.
    """

    def __init__(self, timeout: timedelta, pace: Pace | None = None, *, background: bool = False) -> None:
        def lane(name: str) -> Lane:
            return Lane(name, timeout, background=background)

        back = lane("rows")
        self.lanes = {
            # A few bytes: sending them takes less time than handing them to a thread. The dispatch waits for them.
            (Op.COUNTS, Kind.F): Lane("counts", timeout, background=False),
            # A dispatch that waits for its counts must not hold up the others; tags keep them apart on the wire.
            (Op.DISPATCH, Kind.F): lane("dispatch"),
            (Op.COMBINE, Kind.F): back,
            (Op.COMBINE, Kind.I): back,
            (Op.DISPATCH, Kind.I): back,
            (Op.REDUCE, Kind.W): lane("reduce"),
        }
        self.pace = pace
        self.before_launch: Callable[[], None] | None = None
        self.peak_activations = self.peak_held = 0
        self._spans: list[Span] = []
        self._flights: list[Flight] = []
        self._begun = 0.0

    def play(
        self, nodes: Iterable[Node], microbatches: Mapping[int, Microbatch], reducer: Reducer | None = None
    ) -> None:
        """Plays the nodes; ``reducer`` carries out the ``reduce`` nodes.

        On an error every suspended forward is unwound and every exchange in flight is awaited, a second at most.
        """
        self._spans, self._flights, self._begun = [], [], time.perf_counter()
        self.peak_activations = self.peak_held = 0
        live: set[int] = set()
        held: set[int] = set()
        try:
            for node in nodes:
                if node.op is Op.REDUCE:
                    assert reducer is not None
                    self._flights.append(reducer.launch(node))
                    continue
                microbatch = microbatches[node.microbatch]
                if node.kind is Kind.F:
                    live.add(node.microbatch)
                    held.add(node.microbatch)
                self.peak_activations = max(self.peak_activations, len(live))
                self.peak_held = max(self.peak_held, len(held))
                self._node(node, microbatch)
                if microbatch.ended:
                    live.discard(node.microbatch)
                    if not microbatch.queues:
                        held.discard(node.microbatch)
        except BaseException:
            for microbatch in microbatches.values():
                microbatch.stop()
            for flight in self._flights:
                flight.drain(seconds=1.0)
            raise

    def _node(self, node: Node, microbatch: Microbatch) -> None:
        run = microbatch.runs.get(node.block)
        if run is None and node.kind is not Kind.W:
            run = microbatch.runs[node.block] = BlockRun(microbatch, node.block)
        step = getattr(run, f"{node.op.value}_{'f' if node.kind is Kind.F else 'b'}", None)
        if node.lane is not LaneName.COMPUTE:
            assert step is not None
            if self.before_launch is not None:
                self.before_launch()
            flight = self.lanes[node.op, node.kind].launch(node, step())
            microbatch.flights[node.kind] = flight
            self._flights.append(flight)
            return
        received = microbatch.flights.pop(node.kind).wait() if node.kind in microbatch.flights else None
        start = time.perf_counter()
        if node.kind is Kind.W:
            accumulate(microbatch.queues.pop((node.op, node.block, node.seam)).compute())
        else:
            assert step is not None
            step(received)
        if self.pace is not None:
            time.sleep(max(0.0, start + self.pace(node) - time.perf_counter()))
        self._spans.append(Span(node, start - self._begun, time.perf_counter() - self._begun))

    def spans(self) -> tuple[Span, ...]:
        """What the last :meth:`play` did, in seconds from its start; on CUDA only what the thread saw."""
        landed = [flight for flight in self._flights if flight.landed]
        flights = [Span(f.node, f.departed - self._begun, f.landed - self._begun) for f in landed]
        return (*self._spans, *flights)
