"""The bars of a step for every kind of picture, on one clock: measured, and simulated for the measured times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from overlap1f1b.plan import MOVES, RECOMPUTES, CostKey, Node, NodeCosts, Op, Resource, cost_key, play_ranks
from overlap1f1b.plan.clock import destination
from overlap1f1b.plan.intervals import union
from overlap1f1b.profiling.figures import aligned, sharing
from overlap1f1b.profiling.recording import Recording, Spans, StepRecord, What, lane_of
from overlap1f1b.schedule import Kind, Placement
from overlap1f1b.simulation import Timeline
from overlap1f1b.simulation.drawing import LANES, staged, style_of, text_of
from overlap1f1b.simulation.trace import Event

MEASURED, PREDICTED = "measured", "predicted"
FINEST = 2000  # a gap between kernels without a range is drawn if it is longer than the step divided by this


class Bar(NamedTuple):
    """A node of a rank, or kernels of a stream; times in milliseconds from the start of the step."""

    process: str  # the rank, followed by ``predicted`` if it was simulated
    lane: str
    what: What
    text: str
    style: str  # names a colour
    start: float
    end: float
    group: tuple[object, ...] = ()  # ranks of bars with one group send to each other

    @property
    def event(self) -> Event:
        """The bar as an event of a Chrome trace."""
        return Event(self.process, self.lane, str(self.what), self.start, self.end)


def bars_of(ranks: Sequence[Recording], number: int) -> list[Bar]:
    """Return the bars of one step of all ranks that have it, on one clock.

    A node's kernels make one bar, from the first to the last.
    """
    bars = []
    for recording, step, by in aligned(ranks, number):
        process, group = f"rank {recording.rank}", (MEASURED, *sharing("pp", recording))
        several = staged(what for what in recording.names if isinstance(what, Node))
        for spans, computes in ((step.compute, True), (step.flights, False)):
            for what, start, end in _drawn(recording, spans):
                if isinstance(what, Node):
                    lane, text, style = LANES[lane_of(what)], text_of(what, staged=several), style_of(what)
                else:
                    lane, text, style = what.name, "", "other" if computes else "exchange"
                lane = "compute" if computes else lane
                bars.append(Bar(process, lane, what, text, style, (start + by) / 1e6, (end + by) / 1e6, group))
    return bars


def predicted_bars(ranks: Sequence[Recording], timelines: Mapping[int, Timeline]) -> list[Bar]:
    """Return the bars of simulated ranks."""
    bars = []
    for recording in ranks:
        timeline, process = timelines[recording.rank or 0], f"rank {recording.rank} {PREDICTED}"
        several, group = staged(span.node for span in timeline.spans), (PREDICTED, *sharing("pp", recording))
        for node, start, end in timeline.spans:
            if end > start:
                text, style = text_of(node, staged=several), style_of(node)
                bars.append(Bar(process, LANES[node.resource], node, text, style, start, end, group))
    return bars


def arrows(bars: Iterable[Bar]) -> list[tuple[Bar, Bar]]:
    """Return (transfer, consumer) of three kinds.

    An exchange and the next bar of its chain; a send and its receive on another rank; a copy from host memory and the
    backward that needs it.
    """
    chains: dict[object, list[Bar]] = {}
    received: dict[object, Bar] = {}
    sends: list[tuple[object, Bar]] = []
    fetched, brought = dict[object, Bar](), list[tuple[Bar, Bar]]()  # copies from host memory, and what needs them
    for bar in sorted(bars, key=lambda bar: (bar.start, bar.end)):
        node = bar.what
        if not isinstance(node, Node) or node.op is Op.REDUCE or node.kind is Kind.W:
            continue
        if node.op is Op.FETCH:
            fetched[bar.process, node.stay] = bar
        elif node.kind is Kind.I and bar.lane == "compute" and (copy := fetched.pop((bar.process, node.stay), None)):
            brought.append((copy, bar))
        if node.op in RECOMPUTES or node.op in MOVES:
            continue
        if node.op is Op.SEND:
            sends.append(((bar.group, destination(node)), bar))
            continue
        chains.setdefault((bar.process, node.chain), []).append(bar)
        if node.op is Op.RECEIVE:
            received[bar.group, node.chain] = bar
    travelled = [pair for chain in chains.values() for pair in pairwise(chain) if pair[0].lane != "compute"]
    return travelled + brought + [(send, received[key]) for key, send in sends if key in received]


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


def predict(ranks: Sequence[Recording], number: int) -> dict[int, Timeline]:
    """Return the simulated timelines of one step, by rank, in milliseconds.

    Every rank's nodes are played in the order in which they were issued. A compute node takes its mean over the
    microbatches. A transfer takes the shortest of its times, since longer ones may include waiting. For both, the
    slowest rank counts. Ranks that share experts play the same plan, so one of them is played for each pipeline rank.
    """
    steps = [(recording, _step(recording, number)) for recording in ranks]
    played: dict[int, tuple[Node, ...]] = {}
    size = 1
    for recording, step in steps:
        at, of = recording.mesh.get("pp", (0, 1))
        size = max(size, of)
        played.setdefault(at, tuple(recording.begun(step)))
    if len(played) < size:
        absent = ", ".join(str(at) for at in range(size) if at not in played)
        raise ValueError(f"no file of pipeline rank {absent}, so nothing can be predicted; allowed: all pipeline ranks")
    orders = [played[at] for at in range(size)]
    costs = _costs(steps)
    try:
        held = {(node.pipe, node.stage): rank for rank, order in enumerate(orders) for node in order}
        pipes, stages = max(pipe for pipe, _ in held) + 1, max(stage for _, stage in held) + 1
        placement = Placement(tuple(tuple(held[pipe, stage] for stage in range(stages)) for pipe in range(pipes)))
        spans = play_ranks(orders, placement, costs, counts_block=ranks[0].device)
    except (LookupError, AssertionError, ValueError) as error:
        raise ValueError(
            f"the nodes of step {number} are not a whole step of all stages ({error}), so nothing can be predicted"
        ) from None
    timelines = [Timeline(tuple(rank)) for rank in spans]
    return {recording.rank or 0: timelines[recording.mesh.get("pp", (0, 1))[0]] for recording, _ in steps}


def _step(recording: Recording, number: int) -> StepRecord:
    for step in recording.steps:
        if step.number == number and len(step.issued):
            return step
    raise ValueError(f"{recording.path} has no ranges of step {number}, so nothing can be predicted")


def _costs(steps: Sequence[tuple[Recording, StepRecord]]) -> NodeCosts:
    """Return the milliseconds for which each node occupied its resource."""
    merged: dict[CostKey, float] = {}
    for recording, step in steps:
        took: dict[CostKey, list[float]] = {}
        for spans, computes in ((step.compute, True), (step.flights, False)):
            for what, start, end in spans.whole:
                node = recording.names[what]
                if not isinstance(node, Node) or node.op is Op.RECEIVE:
                    continue
                if computes is (node.resource is Resource.COMPUTE):  # not kernels that pack rows of an exchange
                    took.setdefault(cost_key(node), []).append((end - start) / 1e6)
        for key, times in took.items():
            time = fmean(times) if Node(*key[:2], 0, 0).resource is Resource.COMPUTE else min(times)
            merged[key] = max(merged.get(key, 0.0), time)
    return NodeCosts(by_node=merged)
