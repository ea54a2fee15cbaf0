"""Run weight gradients while the thread would wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
        self._taken: set[int] = set()

    def reached(self, position: int) -> bool:
        """Return whether the node at this position, whose turn it is, has still to be played."""
        if self._coming and self._coming[0] == position:
            self._coming.popleft()
        return position not in self._taken

    def fill(self, flight: Flight[Any]) -> None:
        """Play weight gradients until the flight has arrived or none is ready."""
        while not flight.arrived and self._coming and self._ready(self._nodes[self._coming[0]]):
            position = self._coming.popleft()
            self._taken.add(position)
            self._play(position)
