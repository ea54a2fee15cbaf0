"""The bars of a step for every kind of picture, with the clocks of all ranks aligned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from overlap1f1b.plan import RECOMPUTES, Node, Op, Resource
from overlap1f1b.plan.clock import destination
from overlap1f1b.plan.intervals import union
from overlap1f1b.profiling.figures import Lanes
from overlap1f1b.profiling.recording import EXCHANGES, Recording, Spans, StepRecord, What, lane_of
from overlap1f1b.schedule import Kind
from overlap1f1b.simulation import Timeline
from overlap1f1b.simulation.drawing import LANES, staged, style_of, text_of
from overlap1f1b.simulation.trace import Event

MEASURED, PREDICTED = "measured", "predicted"
FINEST = 2000
"""A gap between kernels without a range is drawn if it is longer than the step divided by this."""


class Bar(NamedTuple):
    """A node of a rank, or kernels of a stream; times in milliseconds from the start of the step.

    ``process`` is the rank, followed by ``predicted`` if it was simulated; ``style`` names a colour; ranks of bars with
    one ``group`` send to each other.
    """

    process: str
    lane: str
    what: What
    text: str
    style: str
    start: float
    end: float
    group: tuple[object, ...] = ()

    @property
    def event(self) -> Event:
        """The bar as an event of a Chrome trace."""
        return Event(self.process, self.lane, str(self.what), self.start, self.end)


def bars_of(ranks: Sequence[Recording], number: int) -> list[Bar]:
    """Return the bars of one step of all ranks that have it, on one clock.

    A node's kernels make one bar, from the first to the last.
    """
    steps = [(recording, step) for recording in ranks for step in recording.steps if step.number == number]
    bars = []
    for (recording, step), by in zip(steps, offsets(steps) if steps else (), strict=True):
        process, group = f"rank {recording.rank}", (MEASURED, *_sharing("pp", recording))
        several = staged(what for what in recording.names if isinstance(what, Node))
        for spans, computes in ((step.compute, True), (step.flights, False)):
            for what, start, end in _drawn(recording, spans):
                lane = "compute" if computes else LANES[lane_of(what)] if isinstance(what, Node) else what.name
                text, style = _look(what, lane, several=several)
                bars.append(Bar(process, lane, what, text, style, (start + by) / 1e6, (end + by) / 1e6, group))
    return bars


def predicted_bars(ranks: Sequence[Recording], timelines: Mapping[int, Timeline]) -> list[Bar]:
    """Return the bars of simulated ranks."""
    bars = []
    for recording in ranks:
        timeline = timelines[recording.rank or 0]
        several, group = staged(span.node for span in timeline.spans), (PREDICTED, *_sharing("pp", recording))
        for node, start, end in timeline.spans:
            if end > start:
                lane = LANES[node.resource]
                text, style = _look(node, lane, several=several)
                bars.append(Bar(f"rank {recording.rank} {PREDICTED}", lane, node, text, style, start, end, group))
    return bars


def arrows(bars: Iterable[Bar]) -> list[tuple[Bar, Bar]]:
    """Return (transfer, consumer): the next bar of its chain, or the receive on another rank."""
    chains: dict[object, list[Bar]] = {}
    received: dict[object, Bar] = {}
    sends: list[tuple[object, Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start, bar.end)):
        node = bar.what
        if not isinstance(node, Node) or node.op is Op.REDUCE or node.op in RECOMPUTES or node.kind is Kind.W:
            continue
        if node.op is Op.SEND:
            sends.append(((bar.group, destination(node)), bar))
            continue
        chains.setdefault((bar.process, node.chain), []).append(bar)
        if node.op is Op.RECEIVE:
            received[bar.group, node.chain] = bar
    travelled = [pair for chain in chains.values() for pair in pairwise(chain) if pair[0].lane != "compute"]
    return travelled + [(send, received[key]) for key, send in sends if key in received]


def _sharing(dimension: str, recording: Recording) -> tuple[object, ...]:
    """Return the mesh position in all other dimensions; the ranks that share it send to each other along this one."""
    return tuple(sorted((name, at) for name, (at, _) in recording.mesh.items() if name != dimension))


def _look(what: What, lane: str, *, several: bool) -> tuple[str, str]:
    """Return text and style."""
    if isinstance(what, Node):
        return text_of(what, staged=several), style_of(what)
    return "", "other" if lane == "compute" else "exchange"


def _drawn(recording: Recording, spans: Spans) -> Iterator[tuple[What, float, float]]:
    """Yield nodes from first to last kernel, and other kernels of a stream, joined over short gaps."""
    if not len(spans):
        return
    finest = int(spans.end.max() - spans.start.min()) // FINEST
    for index, start, end in spans.whole:
        what = recording.names[index]
        if isinstance(what, Node):
            if end > start:
                yield what, start, end
        else:
            these = ((begun, ended + finest) for _, begun, ended in spans[spans.what == index])
            yield from ((what, first, last - finest) for first, last in union(these))


Arrivals = Mapping[object, int]


def offsets(steps: Sequence[tuple[Recording, StepRecord]]) -> list[float]:
    """Return the nanoseconds to add to the times of each rank, so that the first rank's step starts at 0.

    Ranks that share experts receive the rows of an exchange at about the same time, and a transfer ends on its sender
    and on its receiver at about the same time. The difference of two clocks is the median over these events. A rank
    that has none in common with another rank is assumed to begin with the first.
    """
    arrivals = [_arrivals(recording, step) for recording, step in steps]
    starts = [Lanes(recording, step).window[0] for recording, step in steps]
    found: dict[int, float] = {0: -starts[0]}
    while len(found) < len(steps):
        pairs = ((known, new) for known in found for new in range(len(steps)) if new not in found)
        linked = next(((k, n, gap) for k, n in pairs if (gap := _gap(arrivals[k], arrivals[n])) is not None), None)
        if linked is None:
            new = next(new for new in range(len(steps)) if new not in found)
            found[new] = -starts[new]
        else:
            known, new, gap = linked
            found[new] = found[known] + gap
    return [found[place] for place in range(len(steps))]


def _arrivals(recording: Recording, step: StepRecord) -> Arrivals:
    """Return the arrival time of each transfer that other ranks have too."""
    arrived: dict[object, int] = {}
    over_experts, over_stages = _sharing("ep", recording), _sharing("pp", recording)
    for what, _, end in step.flights.whole:
        node = recording.names[what]
        if not isinstance(node, Node) or node.op is Op.REDUCE:
            continue
        if node.resource in EXCHANGES:
            arrived[node, over_experts] = end
        elif node.resource is Resource.PEER:
            key = destination(node) if node.op is Op.SEND else node.chain
            arrived[key, over_stages] = end
    return arrived


def _gap(known: Arrivals, new: Arrivals) -> int | None:
    """Return how far the first clock is ahead of the second; None if nothing is in common."""
    gaps = [known[key] - new[key] for key in known.keys() & new.keys()]
    return int(np.floor(median(gaps))) if gaps else None
