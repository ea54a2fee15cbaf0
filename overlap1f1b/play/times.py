"""When the nodes of a step ran: on the host, and on a device that computes behind it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from overlap1f1b.plan import Node, Span
from overlap1f1b.transport.devices import Watch
from overlap1f1b.transport.lanes import Flight


class Times:
    """The nodes of a step, and their times as far as it has been played.

    Attributes:
        nodes: The nodes of this rank, in order.
        flights: All that was sent and received.
        launches: Times in which the thread launched nodes on a device, without waits for counts; seconds of
            ``time.perf_counter``. Empty on a CPU, where the thread computes.
        untimed: Number of nodes that have no times of their own: they are one call with one before them.
        begun: Start, by ``time.perf_counter``.
        since: When the thread had nothing to await any more for the present node, on a device.
    """

    def __init__(self, nodes: Sequence[Node], watch: Watch | None) -> None:
        self.nodes, self.watch = nodes, watch
        self.flights: list[Flight[Any]] = []
        self.launches: list[Span] = []
        self.untimed = 0
        self.begun = self.since = time.perf_counter()
        self.stamp: Callable[[], Any] = time.perf_counter if watch is None else watch.stamp
        self._origin = self.begun if watch is None else self.stamp()
        self._computed: list[Node] = []
        # Begin and end of each of these; of numbers Python collects no garbage.
        self._stamps: Any = array("d") if watch is None else []

    def computed(self, node: Node, begun: Any) -> None:
        """Note that a compute node has run since a stamp."""
        self._computed.append(node)
        self._stamps.extend((begun, self.stamp()))

    def launched(self, node: Node) -> None:
        """Note that a node has been launched on a device, since :attr:`since`."""
        self.launches.append(Span(node, self.since, time.perf_counter()))

    def first_pending(self) -> Node | None:
        """Return the first node that the device has not computed; None if it has computed all."""
        ends = () if self.watch is None else zip(self._computed, self._stamps[1::2], strict=True)
        return next((node for node, ended in ends if not ended.event.query()), None)

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of the nodes, in seconds from the start, once everything has arrived.

        On a device they are by its clock, and this waits for it.
        """
        watch, origin = self.watch, self._origin
        nodes = zip(self._computed, self._stamps[::2], self._stamps[1::2], strict=True)
        if watch is None:
            arrived = [(f.node, f.departed_at, f.arrived_at) for f in self.flights if f.arrived_at]
            return tuple(Span(node, start - origin, end - origin) for node, start, end in (*nodes, *arrived))
        watch.settle()
        since, stamped = partial(watch.between, origin), [(f.node, f.begun, f.ended) for f in self.flights]
        marked = ((node, start, end) for node, start, end in stamped if start is not None and end is not None)
        return tuple(Span(node, since(start), since(end)) for node, start, end in (*nodes, *marked))
