"""The times of a step by a GPU's own clock, and the multiprocessors that exchanges take from compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from overlap1f1b.plan import Node, Span
from overlap1f1b.transport.devices import Watch
from overlap1f1b.transport.lanes import Flight


class StepTimes:
    """Marks around the compute nodes of a step."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.origin = watch, watch.stamp()
        self._computed: list[tuple[Node, Any, Any]] = []
        self.launches: list[Span] = []
        """Times in which the thread launched each node, without waits for counts; seconds of ``perf_counter``."""

    def first_pending(self) -> Node | None:
        """Return the first node that the device has not computed; None if it has computed all."""
        return next((node for node, _, ended in self._computed if not ended.event.query()), None)

    def computed(self, node: Node, begun: Any) -> None:
        """Note that a node has been queued since the mark ``begun``."""
        self._computed.append((node, begun, self.watch.stamp()))

    def spans(self, flights: Iterable[Flight[Any]]) -> tuple[Span, ...]:
        """Return the spans of the nodes and of these exchanges, in seconds from the start; waits for the device."""
        self.watch.settle()
        stamped = [(f.node, f.begun, f.ended) for f in flights if f.begun is not None and f.ended is not None]
        since = self.watch.between
        return tuple(
            Span(node, since(self.origin, begun), since(self.origin, ended))
            for node, begun, ended in (*self._computed, *stamped)
        )


@contextmanager
def carved_out(blocks: int) -> Iterator[None]:
    """Let torch's products leave multiprocessors alone that ``blocks`` of transfers may hold, where this torch can.

    A grouped product launches one block for each multiprocessor, in clusters of two. Beside a single block of a
    transfer it runs in two waves, 1.7 times as long; if two are left alone for each such block, 1.07 times (measured
    on an H200, with 8). Its sums, and those of other products, have the same bits.
    """
    put = getattr(torch._C, "_set_sm_carveout_experimental", None) if blocks else None
    if put is None:
        yield
        return
    before = torch._C._get_sm_carveout_experimental()
    put(2 * blocks)
    try:
        yield
    finally:
        put(before)
