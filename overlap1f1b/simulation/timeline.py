"""Timelines of nodes, simulated or measured: spans on resources, and how much of the exchange is hidden."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import nan
from pathlib import Path
from typing import NamedTuple, Self

from overlap1f1b.plan import Node, NodeCosts, Plan, Resource, Span, pipeline_bound, play_clocks
from overlap1f1b.plan.intervals import Intervals, difference, intersection, length, union
from overlap1f1b.schedule.values import checked
from overlap1f1b.simulation.causes import CAUSES, Causes, Flown
from overlap1f1b.simulation.trace import Event, write_trace


class OverlapFigures(NamedTuple):
    """Time with an exchange in flight, and the part of it without compute; of one unit.

    >>> OverlapFigures(exchange=8, exposed=2).hidden_fraction
    0.75
    """

    exchange: float = 0.0
    exposed: float = 0.0

    @classmethod
    def of(cls, exchange: Intervals, compute: Intervals) -> Self:
        """Return the figures of the times with an exchange in flight, and of those with compute."""
        in_flight = length(exchange)
        return cls(in_flight, in_flight - length(intersection(exchange, compute)))

    @classmethod
    def sum(cls, parts: Iterable[Self]) -> Self:
        """Return the sums over steps or ranks."""
        return cls(*map(sum, zip(*parts, strict=True)))

    @property
    def hidden(self) -> float:
        """Exchange with compute beside it."""
        return self.exchange - self.exposed

    @property
    def hidden_fraction(self) -> float:
        """Share of the exchange with compute beside it; NaN where nothing is exchanged."""
        return 1.0 - self.exposed / self.exchange if self.exchange else nan


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

    ``host`` has the times in which the host launches the nodes, if launches cost time. ``standing`` has a line about
    each exchange that is no node, but part of one that computes: what is exchanged and exposed is then not measured.
    For :attr:`by_cause`, ``bytes`` has those that left the rank in each exchange, and those that came; ``costs`` are
    the plan's, and ``others`` what the other ranks that share experts saw.
    """

    spans: tuple[Span, ...]
    host: tuple[Span, ...] = ()
    standing: tuple[str, ...] = ()
    bytes: Mapping[Node, tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)
    costs: NodeCosts | None = field(default=None, compare=False, repr=False)
    others: Sequence[Mapping[Node, Flown]] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        """Return the figures, in the unit of the spans: a step has thousands of them."""
        spans = f"{len(self.spans)} spans in {self.makespan:.6g}"
        if self.standing:
            return f"{spans}: exchange not measured: {'; '.join(self.standing)}"
        return f"{spans}: exchange {self.exchange:.6g}, exposed {self.exposed:.6g}, hidden {self.hidden_fraction:.0%}"

    @property
    def makespan(self) -> float:
        """End of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def busy(self, *resources: Resource) -> Intervals:
        """Return the disjoint intervals in which one of the resources works."""
        return union((span.start, span.end) for span in self.spans if span.node.resource in resources)

    @cached_property
    def figures(self) -> OverlapFigures:
        """The exchange: time in which one or more, counts and reductions included, are in flight; NaN if unknown."""
        if self.standing:
            return OverlapFigures(nan, nan)
        return OverlapFigures.of(self.busy(Resource.EXCHANGE, Resource.CONTROL), self.busy(Resource.COMPUTE))

    def pooled(self, costs: NodeCosts | None, others: Sequence[Mapping[Node, Flown]]) -> Self:
        """Return the same with the costs of its plan, and what the other ranks that share experts saw."""
        found = replace(self, costs=costs, others=others)
        vars(found)["causes"] = self.causes.pooled(costs, others)
        return found

    @cached_property
    def causes(self) -> Causes:
        """Why the rank computes nothing when it does not."""
        return Causes(self.spans, self.bytes, self.costs, self.others)

    @property
    def by_cause(self) -> dict[str, float]:
        """What is exposed, by cause; the sum is :attr:`exposed`. See :mod:`overlap1f1b.simulation.causes`.

        >>> from overlap1f1b.plan import Node, Op
        >>> from overlap1f1b.schedule import Kind
        >>> dispatch, experts = Node(Op.DISPATCH, Kind.I, 0, 0), Node(Op.EXPERTS, Kind.F, 0, 0)
        >>> timeline = Timeline((Span(dispatch, 0.0, 3.0), Span(experts, 1.0, 2.0)))
        >>> {cause: time for cause, time in timeline.by_cause.items() if time}
        {'order': 1.0, 'host': 1.0}
        """
        exposed = difference(self.busy(Resource.EXCHANGE, Resource.CONTROL), self.busy(Resource.COMPUTE))
        idle = self.causes.idle
        return {
            cause: length(intersection(exposed, union((one.start, one.end) for one in idle if one.cause == cause)))
            for cause in CAUSES
        }

    def by_exchange(self) -> dict[str, OverlapFigures]:
        """Return the figures of each sub-op and direction that is an exchange, by its name, as ``dispatch.f``."""
        exchanges = [span for span in self.spans if span.node.resource in (Resource.EXCHANGE, Resource.CONTROL)]
        compute = self.busy(Resource.COMPUTE)
        return {
            name: OverlapFigures.of(union((s.start, s.end) for s in exchanges if s.node.name == name), compute)
            for name in dict.fromkeys(span.node.name for span in exchanges)
        }

    @property
    def exchange(self) -> float:
        """Time in which at least one exchange, counts included, is in flight."""
        return self.figures.exchange

    @property
    def exposed(self) -> float:
        """Time in which an exchange is in flight and nothing is computed."""
        return self.figures.exposed

    @property
    def hidden_fraction(self) -> float:
        """Share of the step's exchange time with compute beside it; NaN where nothing is exchanged."""
        return self.figures.hidden_fraction

    @property
    def late(self) -> float:
        """Time without compute in which the host has not launched the next compute node."""
        launched = {span.node: span.end for span in self.host}
        compute = (span for span in self.spans if span.node.resource is Resource.COMPUTE)
        computed = sorted((span.start, span.end, launched.get(span.node, 0.0)) for span in compute)
        late = before = 0.0
        for start, end, ready in computed:
            late += max(0.0, min(start, ready) - before)
            before = max(before, end)
        return late

    @checked
    def to_chrome_trace(self, path: str | Path, *, rank: int = 0, unit_us: float = 1000.0) -> None:
        """Write a trace for Perfetto or chrome://tracing: a track for each resource, and for the host's launches.

        Args:
            path: The JSON file.
            rank: The rank that the process is named after.
            unit_us: Microseconds in the trace for one unit of time; 1000 if times are milliseconds.
        """
        write_trace(self.events(rank), path, unit_us=unit_us)

    def events(self, rank: int) -> list[Event]:
        """Return the spans, the host's first, as events of a trace."""
        tracks = [("host", span) for span in self.host] + [(span.node.resource.value, span) for span in self.spans]
        return [Event(f"rank {rank}", track, str(s.node), s.start, s.end) for track, s in tracks]


@dataclass(frozen=True)
class PlanTimeline:
    """The timelines of all ranks; times in the unit of the costs, from the start of the step.

    >>> from overlap1f1b.plan import BlockShape, compile
    >>> from overlap1f1b.schedule import build_schedule
    >>> costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5)
    >>> plan = compile(build_schedule("1f1b", ranks=2, microbatches=4), (BlockShape(expert_calls=1),), costs, "serial")
    >>> timeline = play_nodes(plan, costs)
    >>> timeline.makespan, timeline.bubble(0), timeline.peak_activations(0)
    (205.0, 121.0, 2.0)
    """

    plan: Plan
    ranks: tuple[Timeline, ...]
    costs: NodeCosts
    front: tuple[Plan, ...] = ()
    """Plans that were compared of which none is both faster and lighter, fastest first."""

    @cached_property
    def bound(self) -> float | None:
        """What no order of the same microbatches over the same ranks can be faster than; None if it is not known."""
        program = self.plan.program
        if len(program.placement.pipes) > 1 or program.forward_only:
            return None
        return pipeline_bound(program.placement, program.microbatches, self.plan.shapes, self.costs)

    @cached_property
    def makespan(self) -> float:
        """End of the last node."""
        return max((rank.makespan for rank in self.ranks), default=0.0)

    def busy(self, rank: int) -> float:
        """Return the time in which a rank computes."""
        return length(self.ranks[rank].busy(Resource.COMPUTE))

    def bubble(self, rank: int) -> float:
        """Return the part of the makespan in which a rank computes nothing."""
        return self.makespan - self.busy(rank)

    @property
    def hidden_fraction(self) -> float:
        """Share of all ranks' exchange time with compute beside it; NaN where nothing is exchanged."""
        return OverlapFigures.sum(rank.figures for rank in self.ranks).hidden_fraction

    def peak_activations(self, rank: int) -> float:
        """Return the peak of live activations; the unit is a rank's whole share for one microbatch."""
        return self.plan.live(rank) * self.plan.program.placement.share

    @checked
    def to_chrome_trace(self, path: str | Path, *, unit_us: float = 1000.0) -> None:
        """Write a trace for Perfetto or chrome://tracing: a process a rank, a track a resource.

        Args:
            path: The JSON file.
            unit_us: Microseconds in the trace for one unit of the costs.
        """
        events = [event for number, rank in enumerate(self.ranks) for event in rank.events(number)]
        write_trace(events, path, unit_us=unit_us)


def play_nodes(plan: Plan, costs: NodeCosts, *, counts_block: bool = False) -> PlanTimeline:
    """Return the timelines of a plan's nodes: compute, exchange, counts and transfers run side by side."""
    played = play_clocks(plan.ranks, plan.program.placement, costs, counts_block=counts_block)
    plan = replace(plan, peak_bytes=costs.peak_bytes(plan.ranks))
    return PlanTimeline(plan, tuple(Timeline(tuple(spans), tuple(host)) for spans, host in played), costs)


def front_of(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """Return the plans of which none other is at least as fast and holds less, fastest first."""
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.predicted, plan.memory())):
        if not front or plan.memory() < front[-1].memory():
            front.append(plan)
    return tuple(front)
