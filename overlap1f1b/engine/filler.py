"""Weight gradients that are taken early, while something has to be waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from overlap1f1b.engine.lanes import Flight
from overlap1f1b.plan import Lane, Node
from overlap1f1b.schedule import Kind


class Filler:
    """The weight-gradient nodes of a list that are still to come.

    A plan has them where it expects a gap. Ranks that drift apart make gaps elsewhere, and these nodes wait for nobody:
    any may be played once its backward has left it something to compute. They keep their order among themselves, so
    that every gradient is summed in the same order, to the bit.

    Args:
        nodes: What is played, in order.
        ready: Whether a weight gradient can be computed.
        play: Plays the node at a position.
    """

    def __init__(self, nodes: Sequence[Node], ready: Callable[[Node], bool], play: Callable[[int], None]) -> None:
        self._nodes, self._ready, self._play = nodes, ready, play
        self._coming = deque(at for at, node in enumerate(nodes) if node.kind is Kind.W and node.lane is Lane.COMPUTE)
        self._taken: set[int] = set()

    def reached(self, position: int) -> bool:
        """Whether the node there is still to be played, now that it is its turn."""
        if self._coming and self._coming[0] == position:
            self._coming.popleft()
        return position not in self._taken

    def fill(self, flight: Flight[Any]) -> None:
        """Plays what can be played until the flight has arrived."""
        while not flight.arrived and self._coming and self._ready(self._nodes[self._coming[0]]):
            position = self._coming.popleft()
            self._taken.add(position)
            self._play(position)
