"""The lanes of ranks' steps: how much of the exchange was hidden, why not, the longest exposed; one clock for ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import nlargest
from itertools import chain
from math import floor
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from overlap1f1b.plan import OF_PARAMETERS, RECOMPUTES, Node, Op, Resource, Span
from overlap1f1b.plan.clock import destination
from overlap1f1b.plan.intervals import Interval, Intervals, clipped, difference, intersection, length, union
from overlap1f1b.profiling.recording import EXCHANGES, Column, Recording, Spans, StepRecord
from overlap1f1b.schedule import Kind
from overlap1f1b.simulation import CAUSES, Causes, Flown, OverlapFigures

PHASES = ("warm_up", "steady", "cool_down")
_COMPUTE, _EXCHANGE = Node(Op.DENSE, Kind.W, 0, 0), Node(Op.REDUCE, Kind.W, 0, 0)
"""What kernels outside all ranges are to a cause: nothing that another node awaits."""


@dataclass(frozen=True)
class Figures:
    """Sums over the steps of one rank or of several, in nanoseconds.

    Args:
        steps: Number of steps.
        time: Time of all steps.
        compute: Time with compute.
        overlap: The exchange.
        by_sub_op: The exchange by sub-op.
        by_phase: The exchange by phase; empty without ranges.
        idle: Time without compute, by cause; empty if no file has ranges.
        open_actions: Largest number of actions under way at once on a rank; 0 without ranges.
        device: Whether compute means the kernels of a device.
        by_cause: What of it is exposed.
        measured: Whether every file shows what was exchanged.
    """

    steps: int
    time: float
    compute: float
    overlap: OverlapFigures
    by_sub_op: Mapping[str, OverlapFigures]
    by_phase: Mapping[str, OverlapFigures]
    idle: Mapping[str, float]
    open_actions: int
    device: bool
    by_cause: Mapping[str, float]
    measured: bool = True

    @classmethod
    def sum(cls, parts: Iterable[Figures]) -> Figures:
        """Return the sums over one part or more."""
        parts = list(parts)
        sums = ("steps", "time", "compute")
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in sums},
            overlap=OverlapFigures.sum(part.overlap for part in parts),
            by_sub_op=dict(sorted(_sums([part.by_sub_op for part in parts]).items())),
            by_phase=_sums([part.by_phase for part in parts]),
            idle=_added([part.idle for part in parts]),
            open_actions=max(part.open_actions for part in parts),
            device=any(part.device for part in parts),
            by_cause=_added([part.by_cause for part in parts]),
            measured=all(part.measured for part in parts),
        )

    def per_step_ms(self, time: float) -> float:
        """Return a sum as the mean over steps, in milliseconds."""
        return time / self.steps / 1e6

    def share(self, time: float) -> float:
        """Return a sum as a share of the steps."""
        return time / self.time if self.time else 0.0


def _sums(parts: Sequence[Mapping[str, OverlapFigures]]) -> dict[str, OverlapFigures]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: OverlapFigures.sum(part[name] for part in parts if name in part) for name in names}


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {cause: sum(part.get(cause, 0.0) for part in parts) for cause in CAUSES if any(parts)}


Others = Mapping[StepRecord, Sequence[Mapping[Node, Flown]]]
"""What the other ranks that share experts saw of a step's exchanges."""


def figures_of(recording: Recording, others: Others = MappingProxyType({})) -> Figures:
    """Return the figures of a rank over its steps."""
    steps = [Lanes(recording, step, others.get(step, ())).figures for step in recording.steps]
    return replace(Figures.sum(steps), measured=recording.measured)


class Lanes:
    """The intervals in which the resources of a rank work in one step; ``others`` is of the ranks beside it."""

    def __init__(self, recording: Recording, step: StepRecord, others: Sequence[Mapping[Node, Flown]] = ()) -> None:
        self.recording, self.step, self.others = recording, step, others

    @cached_property
    def compute(self) -> Intervals:
        """Intervals with compute."""
        return self.step.compute.covered

    @cached_property
    def exchange(self) -> Intervals:
        """Intervals with exchanges in flight, counts and reductions included."""
        return self.recording.exchanges(self.step.flights).covered

    @cached_property
    def exposed(self) -> Intervals:
        """Intervals with exchanges in flight and no compute."""
        return difference(self.exchange, self.compute)

    @cached_property
    def window(self) -> Interval:
        """Start and end of the step, with all of its compute and exchange."""
        there = [edges for edges in ([(self.step.start, self.step.end)], self.compute, self.exchange) if edges]
        return min(edges[0][0] for edges in there), max(edges[-1][1] for edges in there)

    @cached_property
    def gaps(self) -> Intervals:
        """Intervals of the step without compute."""
        return difference([self.window], self.compute)

    @cached_property
    def phases(self) -> Mapping[str, Interval]:
        """Windows of warm-up (until the first backward), steady and cool-down (after the last forward).

        Empty without ranges; the whole step is steady if it has no forwards or no backwards. Recomputation belongs to
        no phase.
        """
        if self.recording.by != "range":
            return {}
        names = self.recording.names
        kind = [n.kind.value if isinstance(n, Node) and n.op not in RECOMPUTES else "" for n in names]
        kinds = np.array(kind, "U1")[self.step.compute.what]
        forward, backward = self.step.compute[kinds == "F"], self.step.compute[(kinds == "I") | (kinds == "W")]
        start, end = first, last = self.window
        if len(forward) and len(backward):
            first = int(backward.start.min())
            last = max(first, int(forward.end.max()))
        return dict(zip(PHASES, ((start, first), (first, last), (last, end)), strict=True))

    @property
    def by_phase(self) -> dict[str, OverlapFigures]:
        """Exchange of each phase; the phases add up to the step."""
        return {
            name: OverlapFigures.of(clipped(self.exchange, *edges), clipped(self.compute, *edges))
            for name, edges in self.phases.items()
        }

    @property
    def by_sub_op(self) -> dict[str, OverlapFigures]:
        """Exchange of each sub-op; if two sub-ops are in flight at once, the time counts for both."""
        flights = self.recording.exchanges(self.step.flights)
        sub_ops, number = np.unique([what.name for what in self.recording.names], return_inverse=True)
        found = {}
        for place, sub_op in enumerate(sub_ops.tolist()):
            if covered := flights[number[flights.what] == place].covered:
                found[sub_op] = OverlapFigures.of(covered, self.compute)
        return found

    @property
    def open_actions(self) -> int:
        """Largest number of forwards and backwards under way at once."""
        names, issued = self.recording.names, self.step.issued
        begun: dict[object, tuple[int, int]] = {}
        for what, start, end in issued:
            node = names[what]
            if not isinstance(node, Node) or node.resource in (Resource.PEER, Resource.HOST):
                continue
            if node.kind is not Kind.W and node.op is not Op.REDUCE and node.op not in RECOMPUTES:
                begun[node.chain] = (begun.get(node.chain, (start,))[0], end)
        edges = sorted([(start, 1) for start, _ in begun.values()] + [(end, -1) for _, end in begun.values()])
        return max(np.cumsum([step for _, step in edges]).tolist(), default=0)

    @cached_property
    def causes(self) -> Causes:
        """Why nothing is computed when it is not; times from the start of the window."""
        recording, begin = self.recording, self.window[0]
        spans = []
        for columns, other in ((self.step.compute, _COMPUTE), (self.step.flights, _EXCHANGE)):
            computes = other is _COMPUTE  # as do kernels that pack rows of an exchange
            nodes = [
                what if isinstance(what, Node) and (what.resource is Resource.COMPUTE) is computes else other
                for what in recording.names
            ]
            spans += [Span(nodes[what], start - begin, end - begin) for what, start, end in columns]
        launched = {}
        if recording.device:
            times = self.step.compute.launched.tolist()
            launched = {span[:2]: time - begin for span, time in zip(spans, times, strict=False)}
        sent = recording.about.bytes.get(str(self.step.number), {})
        bytes = {node: (float(sent.get(str(node), 0)), 0.0) for node in {span.node for span in spans}}
        return Causes(spans, bytes, recording.costs, self.others, launched)

    @cached_property
    def idle(self) -> dict[str, Intervals]:
        """The times without compute of each cause, by the file's clock; empty without ranges.

        Behind all that is awaited it is the host.
        """
        if self.recording.by != "range":
            return {}
        times: dict[str, Intervals] = {cause: [] for cause in CAUSES}
        for start, end, cause in self.causes.idle:
            times[cause].append((start + self.window[0], end + self.window[0]))
        times["host"] += difference(self.gaps, union(chain.from_iterable(times.values())))
        return {cause: union(of) for cause, of in times.items()}

    @property
    def figures(self) -> Figures:
        """The figures of the step."""
        return Figures(
            steps=1,
            time=self.window[1] - self.window[0],
            compute=length(self.compute),
            overlap=OverlapFigures.of(self.exchange, self.compute),
            by_sub_op=self.by_sub_op,
            by_phase=self.by_phase,
            idle={cause: length(times) for cause, times in self.idle.items()},
            open_actions=self.open_actions,
            device=self.recording.device,
            by_cause={cause: length(intersection(times, self.exposed)) for cause, times in self.idle.items()},
        )


class Exposed(NamedTuple):
    """A time with exchange and without compute, as in a report's JSON."""

    rank: int
    step: int
    phase: str
    start_ms: float  # from the start of the step
    exposed_ms: float
    in_flight: tuple[str, ...]  # transfers under way, longest first
    waited_for: str  # the transfer that the rank waited for
    next: str  # the node computed afterwards


def longest(ranks: Iterable[Recording], count: int = 10) -> list[Exposed]:
    """Return the longest exposed exchanges over all steps of all ranks."""
    every = (Lanes(recording, step) for recording in ranks for step in recording.steps)
    found = ((lanes, start, end) for lanes in every for start, end in lanes.exposed)
    return [_described(*one) for one in nlargest(count, found, key=lambda one: one[2] - one[1])]


def _described(lanes: Lanes, start: float, end: float) -> Exposed:
    """Return what was in flight, what was waited for and what came next while an exchange was exposed."""
    recording, step = lanes.recording, lanes.step
    names = recording.names
    flights = recording.exchanges(step.flights)
    flights = flights[_within(flights, start, end) > 0]
    beside = _within(flights, start, end)
    order = np.argsort(-beside, kind="stable")
    waits = step.waits[_within(step.waits, start, end) > 0]
    if len(waits):
        waited = waits.what[np.argmax(_within(waits, start, end))]
    else:  # the transfer whose arrival ended the exposed time
        waited = flights.what[np.argmin(np.abs(flights.end - end))]
    later = step.compute[step.compute.start >= end]
    phase = next((name for name, (first, last) in lanes.phases.items() if first <= start < last), "")
    return Exposed(
        rank=recording.rank or 0,
        step=step.number,
        phase=phase,
        start_ms=(start - lanes.window[0]) / 1e6,
        exposed_ms=(end - start) / 1e6,
        in_flight=tuple(dict.fromkeys(str(names[what]) for what in flights.what[order].tolist())),
        waited_for=str(names[int(waited)]),
        next=str(names[int(later.what[np.argmin(later.start)])]) if len(later) else "",
    )


def _within(spans: Spans, start: float, end: float) -> Column:
    """Return how much of each span lies between two times; negative if nothing does."""
    return np.minimum(spans.end, end) - np.maximum(spans.start, start)


def aligned(ranks: Sequence[Recording], number: int) -> list[tuple[Recording, StepRecord, float]]:
    """Return one step of all ranks that have it, and the nanoseconds to add to its times for one clock of all ranks."""
    steps = [(recording, step) for recording in ranks for step in recording.steps if step.number == number]
    return [(*step, by) for step, by in zip(steps, offsets(steps), strict=True)]


def seen_by_others(ranks: Sequence[Recording]) -> dict[StepRecord, list[Mapping[Node, Flown]]]:
    """Return for each step what the other ranks that share its experts saw of its exchanges, as far as files show."""
    together: dict[object, list[Lanes]] = {}
    for recording in ranks if len(ranks) > 1 else ():
        for step in recording.steps if recording.by == "range" else ():
            together.setdefault((step.number, sharing("ep", recording)), []).append(Lanes(recording, step))
    return {
        one.step: [other.causes.flown for other in lanes if other is not one]
        for lanes in together.values()
        for one in lanes
    }


def sharing(dimension: str, recording: Recording) -> tuple[object, ...]:
    """Return the mesh position in all other dimensions; the ranks that share it send to each other along this one."""
    return tuple(sorted((name, at) for name, (at, _) in recording.mesh.items() if name != dimension))


def offsets(steps: Sequence[tuple[Recording, StepRecord]]) -> list[float]:
    """Return the nanoseconds to add to the times of each rank, so that the first rank's step starts at 0.

    Ranks that share experts receive the rows of an exchange at about the same time, and a transfer ends on its sender
    and on its receiver at about the same time. The difference of two clocks is the median over these events. A rank
    that has none in common with another rank is assumed to begin with the first.
    """
    arrivals = [_arrivals(recording, step) for recording, step in steps]
    starts = [Lanes(recording, step).window[0] for recording, step in steps]
    found: dict[int, float] = {}
    for first in range(len(steps)):
        linked = [] if first in found else [first]
        found.setdefault(first, -starts[first])
        for known in linked:
            for new in range(len(steps)):
                if new not in found and (common := arrivals[known].keys() & arrivals[new].keys()):
                    gaps = (arrivals[known][key] - arrivals[new][key] for key in common)
                    found[new] = found[known] + floor(median(gaps))
                    linked.append(new)
    return [found[place] for place in range(len(steps))]


def _arrivals(recording: Recording, step: StepRecord) -> dict[object, int]:
    """Return the arrival time of each transfer that other ranks have too."""
    arrived: dict[object, int] = {}
    over_experts, over_stages = sharing("ep", recording), sharing("pp", recording)
    for what, _, end in step.flights.whole:
        node = recording.names[what]
        if not isinstance(node, Node) or node.op in OF_PARAMETERS:
            continue
        if node.resource in EXCHANGES:
            arrived[node, over_experts] = end
        elif node.resource is Resource.PEER:
            key = destination(node) if node.op is Op.SEND else node.chain
            arrived[key, over_stages] = end
    return arrived
