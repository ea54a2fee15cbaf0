"""Timelines drawn as text and as PNG or SVG files: a simulated one, or the bars of a measured step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, floor, log10
from statistics import quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from overlap1f1b.plan import RECOMPUTES, Op, Span
from overlap1f1b.schedule import Kind, Pair, Slot, actions_of
from overlap1f1b.simulation import PlanTimeline, ProgramTimeline
from overlap1f1b.simulation.drawing import LANES, LETTERS, stacked, staged, style_of, text_of
from overlap1f1b.terminal.output import writing

if TYPE_CHECKING:
    from overlap1f1b.profiling import Bar

LETTER = 0.7 / 72  # inches for a letter, for each point of its size
POINTS = (5.0, 9.0)
"""Smallest and largest size of a cell's letters; a cell that is too narrow for the smallest has none."""
GREY = "#767676"
"""Colour of what stands outside the cells: it is read on white and on black, since files have no background."""
MOST_TEXTS = 2000  # largest number of cells that get texts: nobody could read more


class Style(NamedTuple):
    """A colour of files, one of the terminal, and their meaning."""

    colour: str
    terminal: str
    label: str


STYLES = {
    "F": Style("#6189f3", "white on blue", "forward"),
    "B": Style("#11a25e", "black on green", "backward"),
    "I": Style("#87f89a", "black on bright_green", "input gradient"),
    "W": Style("#79981b", "black on yellow", "weight gradient"),
    "pair": Style("#d1baff", "white on magenta", "fused pair"),
    "exchange": Style("#ffd024", "black on bright_red", "exchange"),
    "peer": Style("#7f8d98", "black on bright_black", "transfer between ranks, or to host memory"),
    "other": Style("#dfdfdf", "", "outside all ranges"),
}
"""All styles of cells, in the order of a legend.

Any two lie 30 or more apart in CIELAB, with normal sight, protanopia or deuteranopia (Machado's matrices of 2009); dark
text on each has a contrast of 4.6 or more.
"""


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
    chunked = _chunked(timeline)

    def cell(slot: Slot, start: float, end: float) -> Cell:
        """Its text is ``F5`` or ``B0‖F5``, with the stage in front if a rank holds several: ``4F5``, ``6B0‖0F4``."""
        text = "‖".join(str(a) if chunked else f"{a.kind.value}{a.microbatch}" for a in actions_of(slot))
        return Cell(text, start, end, "pair" if isinstance(slot, Pair) else slot.kind.value)

    return [Track(f"rank {rank}", [cell(*span) for span in spans]) for rank, spans in enumerate(timeline.ranks)]


def _chunked(timeline: ProgramTimeline) -> bool:
    """Return whether a rank has several stages, so that actions are drawn with theirs."""
    program = timeline.program
    return any(len(program.placement.places(rank)) > 1 for rank in range(len(program.ranks)))


def legend(timeline: ProgramTimeline | PlanTimeline) -> str:
    """Return what the letters of a drawing mean, of those that it has.

    >>> from overlap1f1b.schedule import build_schedule
    >>> from overlap1f1b.simulation import Costs, simulate
    >>> legend(simulate(build_schedule("1f1b", ranks=2, microbatches=1), Costs()))
    'F forward, B backward; the number behind is the microbatch'
    """
    place, stage = "the number behind is the microbatch", ", the one in front the stage"
    if isinstance(timeline, PlanTimeline):
        nodes = [span.node for rank in timeline.ranks for span in rank.spans]
        ops = {node.op for node in nodes}
        letters = [f"{LETTERS[op]} {op.value}" for op in Op if op in ops and op not in RECOMPUTES]
        kinds = {node.kind for node in nodes}
        letters += ["a small letter backward"] * (kinds != {Kind.F}) + ["w weight gradient"] * (Kind.W in kinds)
        letters += ["r recomputed"] * bool(ops & RECOMPUTES)
        several = any(staged(span.node for span in rank.spans) for rank in timeline.ranks)
        return f"{', '.join(letters)}; {place}{stage * several}"
    slots = [slot for rank in timeline.program.ranks for slot in rank]
    kinds = {action.kind for slot in slots for action in actions_of(slot)}
    letters = [f"{kind.value} {STYLES[kind.value].label}" for kind in Kind if kind in kinds]
    letters += ["‖ fused pair"] * any(isinstance(slot, Pair) for slot in slots)
    return f"{', '.join(letters)}; {place}{stage * _chunked(timeline)}"


def _resources(timeline: PlanTimeline, rank: int) -> list[Track]:
    of = timeline.ranks[rank]
    lanes: dict[str, Iterable[Span]] = {"host": of.host}
    lanes |= {name: [span for span in of.spans if span.node.resource is lane] for lane, name in LANES.items()}
    several = staged(span.node for span in of.spans)
    tracks = []
    for name, spans in lanes.items():
        rows = stacked(span for span in spans if span.end > span.start)
        for row in rows or [[]] * (name in ("compute", "exchange")):  # these two are always drawn
            styles = [s.node.kind.value if name == "host" else style_of(s.node) for s in row]
            texts = [text_of(s.node, staged=several) for s in row]
            cells = [Cell(text, s.start, s.end, style) for text, s, style in zip(texts, row, styles, strict=True)]
            tracks.append(Track(f"rank {rank} {name}", cells))
    return tracks


def tracks_of_bars(bars: Iterable[Bar]) -> list[Track]:
    """Return the bars of every lane in as few tracks as they need; ranks in order, predictions below them."""
    lanes: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars:
        lanes.setdefault((bar.process, bar.lane), []).append(bar)
    found, order = [], list(LANES.values())

    def place(of: tuple[str, str]) -> tuple[int, bool, int, str]:
        (_, rank, *predicted), lane = of[0].split(), of[1]
        return int(rank), bool(predicted), order.index(lane) if lane in order else len(order), lane

    for process, lane in sorted(lanes, key=place):
        for number, row in enumerate(stacked(lanes[process, lane]), 1):
            cells = [Cell(bar.text, bar.start, bar.end, bar.style, str(bar.what)) for bar in row]
            found.append(Track(f"{process} {lane}" + (f" ({number})" if number > 1 else ""), cells))
    return found


class Grid(NamedTuple):
    """A drawing as text.

    rank 0 F0-      B0----
    time   |0    |2    |4
    """

    lines: list[list[tuple[str, str]]]  # tracks, then the axis, in pieces: a text, and a key of STYLES, axis or nothing
    until: float | None  # the time at which the drawing was cut off; None if it is whole

    @classmethod
    def of(cls, tracks: Sequence[Track], *, width: int, shortens: bool = False) -> Grid:
        """Draw tracks as text.

        Columns are proportional to time. A unit of time has as many columns as the texts of the cells need, and time
        that does not fit into ``width`` is cut off.

        If it ``shortens``, texts may lose all but their first letter before time is cut off.
        """
        names = max((len(track.name) for track in tracks), default=0) + 1
        columns = max(width - names, 1)
        end = max((cell.end for track in tracks for cell in track.cells), default=0.0)
        scale = _scale(tracks, end, columns, shortens)
        lines = [[(track.name.ljust(names), ""), *_pieces(track.cells, scale, columns)] for track in tracks]
        lines.append([("time".ljust(names) + _axis(min(end, columns / scale), scale, columns), "axis")])
        return cls(lines, None if round(end * scale) <= columns else columns / scale)


def _scale(tracks: Sequence[Track], end: float, columns: int, shortens: bool) -> float:
    """Return the columns of a unit of time: enough for every text and a dash behind it, unless it ``shortens``.

    The shortest cell has a whole number of columns, so that equal cells look alike. Cells shorter than an eighth of the
    longest do not count: their texts are shortened.
    """
    cells = [(len(cell.text), cell.end - cell.start) for track in tracks for cell in track.cells]
    longest = max((time for _, time in cells), default=0.0)
    sizes = {(size, time) for size, time in cells if time > 0 and 8 * time >= longest}
    if not sizes:
        return 1.0
    shortest = min(time for _, time in sizes)
    spacious, tight = (
        ceil(max((size + gap) / time for size, time in sizes) * shortest - 1e-9) / shortest for gap in (1, 0)
    )
    return max(1 / shortest, min(tight, columns / end)) if shortens and end * spacious > columns else spacious


def _pieces(cells: Iterable[Cell], scale: float, columns: int) -> Iterator[tuple[str, str]]:
    at = 0
    for cell in cells:
        first, last = max(round(cell.start * scale), at), min(round(cell.end * scale), columns)
        if first < last:
            yield " " * (first - at), ""
            yield cell.text[: last - first].ljust(last - first, "-"), cell.style
            at = last


def _axis(end: float, scale: float, columns: int) -> str:
    """Return marks at round times, so far apart that their numbers fit."""
    widest = len(f"{end:g}") + 3
    power = floor(log10(widest / scale))
    step = next(f * 10.0**p for p in (power - 1, power, power + 1) for f in (1, 2, 5) if f * 10.0**p * scale >= widest)
    line, count = "", 0
    while count * step <= end * (1 + 1e-9):
        mark = f"|{count * step:g}"
        at = round(count * step * scale)
        if at + len(mark) > columns:
            break
        line = line.ljust(at) + mark
        count += 1
    return line


def paint(tracks: Sequence[Track], output: Any, screen: Console, *, title: str, unit: str) -> None:
    """Draw tracks into the files ``png`` and ``svg`` of the output that have a name; ``unit`` labels the time axis."""
    wanted = {option: path for option in ("png", "svg") if (path := getattr(output, option)) is not None}
    if not wanted:
        return
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"--{next(iter(wanted))} needs matplotlib; pip install matplotlib") from None
    end = max((cell.end for track in tracks for cell in track.cells), default=1.0)
    letters = [len(cell.text) / (cell.end - cell.start) for track in tracks for cell in track.cells if cell.text]
    # So wide that three of four texts have the largest letters, which stay large in a page.
    width = min(40.0, max(7.0, LETTER * POINTS[1] * end * (quantiles(letters)[2] if len(letters) > 1 else 1.0)))
    figure = Figure(figsize=(width + 1, min(60.0, 1.4 + 0.38 * len(tracks))), layout="constrained")
    axes = figure.add_subplot()
    count = sum(len(track.cells) for track in tracks)
    letter = end * LETTER / width if count <= MOST_TEXTS else float("inf")  # time that a letter of one point takes
    for height, (_, cells) in enumerate(tracks):
        spans = [(cell.start, cell.end - cell.start) for cell in cells]
        colours = [STYLES[cell.style].colour for cell in cells]
        axes.broken_barh(spans, (height - 0.42, 0.84), facecolors=colours, edgecolors="white", linewidth=0.5)
        for cell in cells:
            points = min(POINTS[1], (cell.end - cell.start) / (letter * max(1, len(cell.text))))
            if points >= POINTS[0]:
                middle = (cell.start + cell.end) / 2
                axes.text(middle, height, cell.text, ha="center", va="center", fontsize=points, clip_on=True)
    axes.set_yticks(range(len(tracks)), [track.name for track in tracks])
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.set_xlabel(unit, color=GREY)
    axes.tick_params(colors=GREY)
    axes.spines[:].set_color(GREY)
    axes.patch.set_alpha(0.0)
    figure.suptitle(title, fontsize=min(10.0, (width + 1) * 120 / max(1, len(title))), color=GREY)
    used = {cell.style for track in tracks for cell in track.cells}
    handles = [axes.barh(0, 0, color=s.colour, label=s.label) for name, s in STYLES.items() if name in used]
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": max(1, len(handles))}
    figure.legend(handles=handles, fontsize=8, frameon=False, labelcolor=GREY, **place)
    for option, path in wanted.items():
        settings = mpl.rc_context({"svg.hashsalt": "overlap1f1b", "svg.fonttype": "none"})
        undated = {"metadata": {"Date": None}} if option == "svg" else {}
        with writing(option, path, screen) as file, settings:
            figure.savefig(file, format=option, dpi=120, transparent=True, **undated)
