"""A rank's row under construction."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from overlap1f1b.schedule.action import Action, Kind, Pair, Step
from overlap1f1b.schedule.peaks import peaks_of
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program

Place = tuple[int, int]
"""(pipe, stage)."""


class Row:
    """Steps of one rank; microbatches of a place are counted, and weight gradients wait first in, first out.

    >>> row = Row()
    >>> row.forward((0, 3)); row.forward((0, 3)); row.input((0, 3)); row.weight()
    >>> print(*row.steps)
    3F0 3F1 3I0 3W0

    Args:
        first: The first microbatch of each pipe.
    """

    def __init__(self, first: Sequence[int] = (0,)) -> None:
        self.steps: list[Step] = []
        self.first = first
        self.count: Counter[tuple[Place, bool]] = Counter()
        self.waiting: deque[Action] = deque()

    def _next(self, place: Place, kind: Kind) -> Action:
        key = (place, kind is Kind.F)
        microbatch = self.first[place[0]] + self.count[key]
        self.count[key] += 1
        return Action(kind, place[1], microbatch, place[0])

    def forward(self, place: Place) -> None:
        """The next forward of a place."""
        self.steps.append(self._next(place, Kind.F))

    def backward(self, place: Place) -> None:
        """The next whole backward of a place."""
        self.steps.append(self._next(place, Kind.B))

    def input(self, place: Place) -> None:
        """The next input gradient of a place; its weight gradient waits."""
        action = self._next(place, Kind.I)
        self.steps.append(action)
        self.waiting.append(action)

    def weight(self, place: Place | None = None) -> None:
        """The oldest weight gradient that waits, of one place or of any; none waiting is no error."""
        for action in self.waiting:
            if place is None or (action.pipe, action.stage) == place:
                self.waiting.remove(action)
                self.steps.append(action._replace(kind=Kind.W))
                return

    def pair(self, forward: Place, backward: Place) -> None:
        """The next forward of one place and the next backward of another, fused."""
        self.steps.append(Pair(self._next(forward, Kind.F), self._next(backward, Kind.B)))


def assemble(name: str, microbatches: int, placement: Placement, rows: Iterable[Iterable[Step]]) -> Program:
    """The Program of finished rows, which declares what they keep alive."""
    ranks = tuple(map(tuple, rows))
    alive, pending = zip(*map(peaks_of, ranks), strict=True)
    return Program(name, microbatches, ranks, alive, placement, pending)
