"""Tracks of a drawing: a simulated timeline or the bars of a measured step, for text and pictures alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from overlap1f1b.plan import Span
from overlap1f1b.schedule import Pair, Slot, actions_of
from overlap1f1b.simulation import PlanTimeline, ProgramTimeline
from overlap1f1b.simulation.drawing import LANES, stacked, staged, style_of, text_of

if TYPE_CHECKING:
    from overlap1f1b.profiling import Bar


class Style(NamedTuple):
    """A colour of files, one of the terminal, and their meaning."""

    colour: str
    terminal: str
    label: str


STYLES = {
    "F": Style("#4c8bf5", "white on blue", "forward"),
    "B": Style("#34a853", "black on green", "backward"),
    "I": Style("#7cc576", "black on bright_green", "input gradient"),
    "W": Style("#f4b400", "black on yellow", "weight gradient"),
    "pair": Style("#9c6ade", "white on magenta", "fused pair"),
    "exchange": Style("#e8710a", "black on bright_red", "exchange"),
    "peer": Style("#8d8d8d", "black on bright_black", "transfer between ranks"),
    "other": Style("#b8b8b8", "", "outside all ranges"),
}
"""All styles of cells, in the order of a legend."""


class Cell(NamedTuple):
    """A text that is drawn from ``start`` to ``end``; ``style`` is a key of ``STYLES``, ``what`` the thing in full."""

    text: str
    start: float
    end: float
    style: str
    what: str = ""


class Track(NamedTuple):
    """A row of a drawing: cells in order of time that do not overlap."""

    name: str
    cells: Sequence[Cell]


def tracks_of(timeline: ProgramTimeline | PlanTimeline) -> list[Track]:
    """Return a track for each rank, or for each resource of each rank if the timeline has sub-ops.

    >>> from overlap1f1b.schedule import build_schedule
    >>> from overlap1f1b.simulation import Costs, simulate
    >>> tracks = tracks_of(simulate(build_schedule("1f1b", ranks=2, microbatches=1), Costs()))
    >>> [cell.text for cell in tracks[1].cells]
    ['F0', 'B0']
    """
    if isinstance(timeline, PlanTimeline):
        return [track for rank in range(len(timeline.ranks)) for track in _resources(timeline, rank)]
    program = timeline.program
    chunked = any(len(program.placement.places(rank)) > 1 for rank in range(len(program.ranks)))
    return [
        Track(
            f"rank {rank}",
            [Cell(_text(span.slot, chunked), span.start, span.end, _style(span.slot)) for span in spans],
        )
        for rank, spans in enumerate(timeline.ranks)
    ]


def _resources(timeline: PlanTimeline, rank: int) -> list[Track]:
    of = timeline.ranks[rank]
    lanes: dict[str, Iterable[Span]] = {"host": of.host}
    lanes |= {name: [span for span in of.spans if span.node.resource is lane] for lane, name in LANES.items()}
    several = staged(span.node for span in of.spans)
    tracks = []
    for name, spans in lanes.items():
        host = name == "host"
        rows = stacked(span for span in spans if span.end > span.start)
        for row in rows or [[]] * (name in ("compute", "exchange")):  # these two are always drawn
            cells = [
                Cell(text_of(s.node, staged=several), s.start, s.end, s.node.kind.value if host else style_of(s.node))
                for s in row
            ]
            tracks.append(Track(f"rank {rank} {name}", cells))
    return tracks


def _text(slot: Slot, chunked: bool) -> str:
    """Return ``F5`` or ``B0‖F5``, with the stage in front if a rank holds several: ``4F5``, ``6B0‖0F4``."""
    return "‖".join(str(a) if chunked else f"{a.kind.value}{a.microbatch}" for a in actions_of(slot))


def _style(slot: Slot) -> str:
    return "pair" if isinstance(slot, Pair) else slot.kind.value


def tracks_of_bars(bars: Iterable[Bar]) -> list[Track]:
    """Return the bars of every lane in as few tracks as they need; ranks in order, predictions below them."""
    lanes: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars:
        lanes.setdefault((bar.process, bar.lane), []).append(bar)
    found = []
    for process, lane in sorted(lanes, key=_place):
        for number, row in enumerate(stacked(lanes[process, lane]), 1):
            cells = [Cell(bar.text, bar.start, bar.end, bar.style, str(bar.what)) for bar in row]
            found.append(Track(f"{process} {lane}" + (f" ({number})" if number > 1 else ""), cells))
    return found


def _place(of: tuple[str, str]) -> tuple[int, bool, int, str]:
    process, lane = of
    _, rank, *predicted = process.split()
    order = list(LANES.values())
    return int(rank), bool(predicted), order.index(lane) if lane in order else len(order), lane
