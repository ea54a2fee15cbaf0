"""Run weight gradients while the thread would wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from overlap1f1b.plan import Node, Resource
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.lanes import Flight


class Filler:
    """While a CPU thread waits, run pending weight gradients in plan order; sums stay bit-equal.

    A plan places weight gradients in the gaps that it expects. Where ranks drift apart, other gaps open; a weight
    gradient needs no other rank, and can run as soon as its backward has left it.

    Args:
        nodes: A rank's nodes in plan order.
        ready: Return whether the backward of a weight-gradient node has run.
        play: Play the node at a position.
    """

    def __init__(self, nodes: Sequence[Node], ready: Callable[[Node], bool], play: Callable[[int], None]) -> None:
        self._nodes, self._ready, self._play = nodes, ready, play
        self._coming = deque(
            at for at, node in enumerate(nodes) if node.kind is Kind.W and node.resource is Resource.COMPUTE
        )
        self.taken: set[int] = set()
        """Positions of the nodes that were played before their turn."""

    def fill(self, flights: Iterable[Flight[Any]], now: int) -> None:
        """Play weight gradients behind position ``now`` until the flights have arrived or none is ready."""
        coming = self._coming
        for flight in flights:
            while not flight.arrived:
                while coming and coming[0] <= now:
                    coming.popleft()
                if not coming or not self._ready(self._nodes[coming[0]]):
                    return
                position = coming.popleft()
                self.taken.add(position)
                self._play(position)
