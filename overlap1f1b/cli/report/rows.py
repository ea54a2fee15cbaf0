"""The rows of a picture: lanes of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from overlap1f1b.cli.plan.grid import Cell, Row
from overlap1f1b.profiling import Bar
from overlap1f1b.simulation.drawing import stacked

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


def rows_of(bars: Sequence[Bar]) -> list[Row]:
    """As the PNG and SVG files of ``plan`` are drawn."""
    return [Row(name, [Cell(bar.text, bar.start, bar.end, bar.style) for bar in row]) for name, row in stacks_of(bars)]


def _place(of: tuple[str, str]) -> tuple[int, bool, int, str]:
    process, lane = of
    _, rank, *predicted = process.split()
    return int(rank), bool(predicted), _ORDER.index(lane) if lane in _ORDER else len(_ORDER), lane
