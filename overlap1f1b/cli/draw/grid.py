"""Tracks as lines of text: time runs to the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import NamedTuple

from overlap1f1b.cli.draw.tracks import Cell, Track


class Piece(NamedTuple):
    """Characters of one line in one colour; an empty style means no colour."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Grid:
    """A drawing as text.

    >>> tracks = [Track("rank 0", [Cell("F0", 0, 1, "F"), Cell("B0", 3, 5, "B")])]
    >>> print(Grid.of(tracks, width=40).text)
    rank 0 F0-      B0----
    time   |0    |2    |4

    Args:
        lines: The tracks, then the axis of time.
        until: The time at which the drawing was cut off; None if it is whole.
    """

    lines: tuple[tuple[Piece, ...], ...]
    until: float | None

    @property
    def text(self) -> str:
        """The lines, without colours."""
        return "\n".join("".join(piece.text for piece in line).rstrip() for line in self.lines)

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
        lines = [(Piece(track.name.ljust(names)), *_pieces(track.cells, scale, columns)) for track in tracks]
        whole = round(end * scale) <= columns
        lines.append((Piece("time".ljust(names) + _axis(min(end, columns / scale), scale, columns), "axis"),))
        return cls(tuple(lines), None if whole else columns / scale)


def _scale(tracks: Sequence[Track], end: float, columns: int, shortens: bool) -> float:
    """Return the columns of a unit of time: enough for every text and a dash behind it.

    The dashes are left out if the drawing fits only without them and all texts begin with a letter, which tells cells
    apart. Cells shorter than an eighth of the longest do not count: their texts are shortened. The shortest of the
    others has a whole number of columns, so that equal cells look alike.
    """
    sizes = _sizes(tracks)
    if not sizes:
        return 1.0
    shortest = min(time for _, time in sizes)
    spacious, tight = (
        ceil(max((size + gap) / time for size, time in sizes) * shortest - 1e-9) / shortest for gap in (1, 0)
    )
    lettered = all(cell.text[:1].isalpha() for track in tracks for cell in track.cells)
    if end * spacious <= columns or not (shortens or (lettered and end * tight <= columns)):
        return spacious
    return max(1 / shortest, min(tight, columns / end)) if shortens else tight


def letters(tracks: Sequence[Track]) -> float:
    """Return how many letters a unit of time needs, so that the texts of all but short cells fit."""
    return max((size / time for size, time in _sizes(tracks)), default=1.0)


def _sizes(tracks: Sequence[Track]) -> set[tuple[int, float]]:
    """Return the letters and times of the cells that count for the scale."""
    cells = [cell for track in tracks for cell in track.cells if cell.end > cell.start]
    longest = max((cell.end - cell.start for cell in cells), default=1.0)
    return {(len(cell.text), cell.end - cell.start) for cell in cells if 8 * (cell.end - cell.start) >= longest}


def _pieces(cells: Iterable[Cell], scale: float, columns: int) -> list[Piece]:
    pieces: list[Piece] = []
    at = 0
    for cell in cells:
        first, last = round(cell.start * scale), min(round(cell.end * scale), columns)
        first = max(first, at)
        if first >= columns:
            break
        if last <= first:
            continue
        if first > at:
            pieces.append(Piece(" " * (first - at)))
        pieces.append(Piece(cell.text[: last - first].ljust(last - first, "-"), cell.style))
        at = last
    return pieces


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
