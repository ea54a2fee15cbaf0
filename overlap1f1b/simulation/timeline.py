"""Spans on lanes, and how much of the exchange they hide. One vocabulary for what is simulated and what is measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from overlap1f1b.plan import Resource, Span
from overlap1f1b.schedule.values import check_size
from overlap1f1b.simulation.drawing import draw
from overlap1f1b.simulation.trace import Event, write_trace

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint sorted intervals that cover the same points.

    >>> union([(3, 4), (0, 1), (1, 2)])
    [(0, 2), (3, 4)]
    """
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum((end - start for start, end in intervals), 0.0)


def intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What two lists of disjoint sorted intervals have in common.

    >>> intersection([(0, 2), (3, 6)], [(1, 4)])
    [(1, 2), (3, 4)]
    """
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


@dataclass(frozen=True)
class Timeline:
    """The spans of one rank's step; times in one unit, from the start of the step.

    >>> from overlap1f1b.plan import Node, Op
    >>> from overlap1f1b.schedule import Kind
    >>> experts = Node(Op.EXPERTS, Kind.F, microbatch=0, block=0)
    >>> combine = Node(Op.COMBINE, Kind.F, microbatch=1, block=0)
    >>> timeline = Timeline((Span(experts, 0.0, 3.0), Span(combine, 2.0, 4.0)))
    >>> timeline.makespan, timeline.exposed, timeline.hidden_fraction
    (4.0, 1.0, 0.5)
    """

    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """End of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def busy(self, *lanes: Resource) -> list[Interval]:
        """Disjoint intervals in which one of the lanes works."""
        return union((span.start, span.end) for span in self.spans if span.node.resource in lanes)

    @property
    def exchange(self) -> float:
        """Time in which at least one exchange, counts included, is in flight."""
        return length(self.busy(Resource.EXCHANGE, Resource.CONTROL))

    @property
    def exposed(self) -> float:
        """Time in which an exchange is in flight and the compute lane does nothing."""
        in_flight = self.busy(Resource.EXCHANGE, Resource.CONTROL)
        return length(in_flight) - length(intersection(in_flight, self.busy(Resource.COMPUTE)))

    @property
    def hidden_fraction(self) -> float:
        """Share of the exchange time, over the whole step, that has compute beside it; 1 where nothing is exchanged."""
        return 1.0 - self.exposed / self.exchange if self.exchange else 1.0

    def draw(self, width: int = 100) -> str:
        """The lanes as text; ``A2`` is the forward of microbatch 2 on attention, ``a2`` its backward.

        ::

            compute  A0-A1-E0--
            exchange    D0--D1----

        A attention, N counts, D dispatch, E experts, C combine, G aggregate, M a block without experts, R reduce, S
        send; ``w`` marks a weight gradient. The stage stands in front where there are several, as in ``3E2``. Counts
        and sends, on the lanes ``control`` and ``peer``, have lines where they take time.

        Raises:
            ValueError: A width that is no whole number, or less than 1.
        """
        check_size("width", width)
        return draw(self.spans, width)

    def to_chrome_trace(self, path: str | Path, *, rank: int = 0, unit_us: float = 1000.0) -> None:
        """Writes a trace for Perfetto or chrome://tracing: a track for each lane.

        Args:
            path: The JSON file.
            rank: The rank that the process is named after.
            unit_us: Microseconds that one unit of time is shown as; 1000 if times are milliseconds.
        """
        write_trace(self.events(rank), path, unit_us=unit_us)

    def events(self, rank: int) -> list[Event]:
        """The spans as they stand in a trace."""
        return [Event(f"rank {rank}", s.node.resource.value, str(s.node), s.start, s.end) for s in self.spans]
