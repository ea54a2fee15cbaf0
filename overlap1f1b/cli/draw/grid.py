"""A timeline as lines of text: rows are ranks, time runs to the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import NamedTuple


class Cell(NamedTuple):
    """What a row does from ``start`` to ``end``; ``style`` names its colour."""

    text: str
    start: float
    end: float
    style: str


class Row(NamedTuple):
    """One lane of one rank, its cells in order of time."""

    name: str
    cells: Sequence[Cell]


class Piece(NamedTuple):
    """Characters of one line in one colour; no style is no colour."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Grid:
    """A drawn timeline.

    >>> rows = [Row("rank 0", [Cell("F0", 0, 1, "F"), Cell("B0", 3, 5, "B")])]
    >>> print(Grid.of(rows, width=40).text)
    rank 0 F0-      B0----
    time   |0    |2    |4

    Args:
        lines: The rows, then the axis of time.
        until: The time at which the picture was cut; None where all of it is there.
    """

    lines: tuple[tuple[Piece, ...], ...]
    until: float | None

    @property
    def text(self) -> str:
        """The lines without colours."""
        return "\n".join("".join(piece.text for piece in line).rstrip() for line in self.lines)

    @classmethod
    def of(cls, rows: Sequence[Row], *, width: int, shortens: bool = False) -> Grid:
        """The picture of some rows.

        Columns are proportional to time, as many as the texts of the cells need. What does not fit is cut off.

        Args:
            rows: What is drawn.
            width: Columns that there are.
            shortens: Whether texts may lose all but their first letter before anything is cut off.
        """
        names = max((len(row.name) for row in rows), default=0) + 1
        columns = max(width - names, 1)
        end = max((cell.end for row in rows for cell in row.cells), default=0.0)
        scale = _scale(rows, end, columns, shortens)
        lines = [(Piece(row.name.ljust(names)), *_pieces(row.cells, scale, columns)) for row in rows]
        whole = round(end * scale) <= columns
        lines.append((Piece("time".ljust(names) + _axis(min(end, columns / scale), scale, columns), "axis"),))
        return cls(tuple(lines), None if whole else columns / scale)


def _scale(rows: Sequence[Row], end: float, columns: int, shortens: bool) -> float:
    """Columns of a unit of time: enough for every text and a dash behind it; without the dash if all fits then and
    texts begin with a letter, so that one can be told from the next.

    Cells under an eighth of the longest do not count, their texts are shortened. The shortest of the others has a
    whole number of columns, so that equal cells look alike.
    """
    sizes = _sizes(rows)
    if not sizes:
        return 1.0
    shortest = min(time for _, time in sizes)
    spacious, tight = (
        ceil(max((size + gap) / time for size, time in sizes) * shortest - 1e-9) / shortest for gap in (1, 0)
    )
    lettered = all(cell.text[:1].isalpha() for row in rows for cell in row.cells)
    if end * spacious <= columns or not (shortens or (lettered and end * tight <= columns)):
        return spacious
    return max(1 / shortest, min(tight, columns / end)) if shortens else tight


def letters(rows: Sequence[Row]) -> float:
    """Letters of a unit of time, so that the texts of all but short cells fit."""
    return max((size / time for size, time in _sizes(rows)), default=1.0)


def _sizes(rows: Sequence[Row]) -> set[tuple[int, float]]:
    """Letters and times of the cells that count."""
    cells = [cell for row in rows for cell in row.cells if cell.end > cell.start]
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
    """Marks at round times, so far apart that their numbers fit."""
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
