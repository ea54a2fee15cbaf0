"""The rows of a timeline, for the grid in the terminal and for pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from overlap1f1b.cli.draw.grid import Cell, Track
from overlap1f1b.plan import Resource
from overlap1f1b.profiling import Bar
from overlap1f1b.schedule import Pair, Program, Step, actions_of
from overlap1f1b.simulation import PlanTimeline, ProgramTimeline
from overlap1f1b.simulation.drawing import stacked, staged
from overlap1f1b.simulation.drawing import text_of as text_of_node

_LANES = {
    Resource.COMPUTE: "compute",
    Resource.EXCHANGE: "exchange",
    Resource.CONTROL: "counts",
    Resource.PEER: "peers",
}
_STYLES = {Resource.EXCHANGE: "exchange", Resource.CONTROL: "exchange", Resource.PEER: "peer"}


def tracks_of(timeline: ProgramTimeline | PlanTimeline) -> list[Track]:
    """One row a rank, one cell a step; of sub-op nodes one row for each lane of a rank, one cell a node.

    >>> from overlap1f1b.schedule import build_schedule
    >>> from overlap1f1b.simulation import Costs, simulate
    >>> rows = tracks_of(simulate(build_schedule("1f1b", ranks=2, microbatches=1), Costs()))
    >>> [cell.text for cell in rows[1].cells]
    ['F0', 'B0']
    """
    if isinstance(timeline, PlanTimeline):
        return [row for rank in range(len(timeline.ranks)) for row in _lanes(timeline, rank)]
    chunked = _chunked(timeline.program)
    return [
        Track(
            f"rank {rank}",
            [Cell(text_of(span.step, chunked), span.start, span.end, style_of(span.step)) for span in spans],
        )
        for rank, spans in enumerate(timeline.ranks)
    ]


def _lanes(timeline: PlanTimeline, rank: int) -> list[Track]:
    rows = []
    spans = timeline.ranks[rank].spans
    several = staged(spans)
    for lane, name in _LANES.items():
        stack = stacked(s for s in spans if s.node.resource is lane and s.end > s.start)
        for row in stack or [[]] if lane in (Resource.COMPUTE, Resource.EXCHANGE) else stack:
            cells = [
                Cell(text_of_node(s.node, staged=several), s.start, s.end, _STYLES.get(lane, s.node.kind.value))
                for s in row
            ]
            rows.append(Track(f"rank {rank} {name}", cells))
    return rows


def text_of(step: Step, chunked: bool) -> str:
    """``F5``, ``B0‖F5``; with the stage in front where a rank holds several: ``4F5``, ``6B0‖0F4``."""
    return "‖".join(str(a) if chunked else f"{a.kind.value}{a.microbatch}" for a in actions_of(step))


def style_of(step: Step) -> str:
    """The kind of an action; ``pair`` for two."""
    return "pair" if isinstance(step, Pair) else step.kind.value


def _chunked(program: Program) -> bool:
    """Whether some rank holds several stages."""
    return any(len(program.placement.places(rank)) > 1 for rank in range(len(program.ranks)))


_ORDER = ("compute", "exchange", "counts", "peers")


def stacks_of(bars: Iterable[Bar]) -> list[tuple[str, list[Bar]]]:
    """The bars of every lane in as few rows as they need, under their names; ranks in order, predictions below them."""
    lanes: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars:
        lanes.setdefault((bar.process, bar.lane), []).append(bar)
    found = []
    for process, lane in sorted(lanes, key=_place):
        for number, row in enumerate(stacked(lanes[process, lane]), 1):
            found.append((f"{process} {lane}" + (f" ({number})" if number > 1 else ""), row))
    return found


def tracks_of_bars(bars: Sequence[Bar]) -> list[Track]:
    """As the PNG and SVG files of ``plan`` are drawn."""
    return [
        Track(name, [Cell(bar.text, bar.start, bar.end, bar.style) for bar in row]) for name, row in stacks_of(bars)
    ]


def _place(of: tuple[str, str]) -> tuple[int, bool, int, str]:
    process, lane = of
    _, rank, *predicted = process.split()
    return int(rank), bool(predicted), _ORDER.index(lane) if lane in _ORDER else len(_ORDER), lane
