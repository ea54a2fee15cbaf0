"""The timeline as a PNG or SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overlap1f1b.cli.plan.grid import Cell, Row, letters

COLOURS = {
    "F": "#4c8bf5",
    "B": "#34a853",
    "I": "#7cc576",
    "W": "#f4b400",
    "pair": "#9c6ade",
    "exchange": "#e8710a",
    "peer": "#8d8d8d",
    "other": "#b8b8b8",
}
LABELS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "pair": "fused pair",
    "exchange": "exchange",
    "peer": "transfer between ranks",
    "other": "outside all ranges",
}
LETTER = 0.085
"""Inches of a letter."""
MOST_TEXTS = 2000
"""Cells beyond which none is labelled: nobody could read them."""


def paint(
    rows: Sequence[Row], path: Path, *, title: str, option: str, unit: str = "time, in the unit of the costs"
) -> None:
    """Draws the rows into a file of the format that its option names, ``png`` or ``svg``; ``unit`` is that of time.

    Raises:
        ValueError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"--{option} needs matplotlib; pip install 'overlap1f1b[plot]'") from None
    end = max((cell.end for row in rows for cell in row.cells), default=1.0)
    width = min(40.0, max(8.0, LETTER * letters(rows) * end))
    figure = Figure(figsize=(width + 1, min(60.0, 1.4 + 0.38 * len(rows))), layout="constrained")
    axes = figure.add_subplot()
    count = sum(len(row.cells) for row in rows)
    for height, row in enumerate(rows):
        _paint_row(axes, height, row, end * LETTER / width * 0.9 if count <= MOST_TEXTS else float("inf"))
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.set_xlabel(unit)
    figure.suptitle(title, fontsize=10)
    used = {cell.style for row in rows for cell in row.cells}
    handles = [axes.barh(0, 0, color=COLOURS[style], label=LABELS[style]) for style in COLOURS if style in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), fontsize=8, frameon=False)
    try:
        with mpl.rc_context({"svg.hashsalt": "overlap1f1b", "svg.fonttype": "none"}):
            figure.savefig(path, format=option, dpi=120, metadata={"Date": None} if option == "svg" else None)
    except OSError as error:
        raise ValueError(f"--{option} {path}: {error.strerror}; allowed: a file that can be written") from error


def _paint_row(axes: Any, height: int, row: Row, letter: float) -> None:
    """Bars of one row; a text where it has ``letter`` units of time for each of its letters."""
    styles: dict[str, list[Cell]] = {}
    for cell in row.cells:
        styles.setdefault(cell.style, []).append(cell)
    for style, cells in styles.items():
        spans = [(cell.start, cell.end - cell.start) for cell in cells]
        axes.broken_barh(spans, (height - 0.42, 0.84), facecolors=COLOURS[style], edgecolors="white", linewidth=0.5)
    for cell in row.cells:
        if cell.end - cell.start >= letter * len(cell.text):
            axes.text(
                (cell.start + cell.end) / 2, height, cell.text, ha="center", va="center", fontsize=7, clip_on=True
            )
