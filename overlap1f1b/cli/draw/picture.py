"""Tracks as a PNG or SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from overlap1f1b.cli.draw.grid import letters
from overlap1f1b.cli.draw.tracks import STYLES, Track
from overlap1f1b.terminal.output import writing

LETTER = 0.085
"""Inches for a letter."""
MOST_TEXTS = 2000
"""Largest number of cells that get texts: nobody could read more."""


def paint(
    tracks: Sequence[Track], path: Path, *, title: str, option: str, unit: str = "time, in the unit of the costs"
) -> None:
    """Draw tracks into a file of the format that its option names, ``png`` or ``svg``; ``unit`` labels the time axis.

    Raises:
        ValueError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"--{option} needs matplotlib; pip install 'overlap1f1b[plot]'") from None
    end = max((cell.end for track in tracks for cell in track.cells), default=1.0)
    width = min(40.0, max(8.0, LETTER * letters(tracks) * end))
    figure = Figure(figsize=(width + 1, min(60.0, 1.4 + 0.38 * len(tracks))), layout="constrained")
    axes = figure.add_subplot()
    count = sum(len(track.cells) for track in tracks)
    letter = end * LETTER / width * 0.9 if count <= MOST_TEXTS else float("inf")  # time that a letter takes
    for height, (_, cells) in enumerate(tracks):
        spans = [(cell.start, cell.end - cell.start) for cell in cells]
        colours = [STYLES[cell.style].colour for cell in cells]
        axes.broken_barh(spans, (height - 0.42, 0.84), facecolors=colours, edgecolors="white", linewidth=0.5)
        for cell in cells:
            if cell.end - cell.start >= letter * len(cell.text):
                middle = (cell.start + cell.end) / 2
                axes.text(middle, height, cell.text, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(tracks)), [track.name for track in tracks])
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.set_xlabel(unit)
    figure.suptitle(title, fontsize=10)
    used = {cell.style for track in tracks for cell in track.cells}
    handles = [axes.barh(0, 0, color=s.colour, label=s.label) for name, s in STYLES.items() if name in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), fontsize=8, frameon=False)
    with writing(option, path), mpl.rc_context({"svg.hashsalt": "overlap1f1b", "svg.fonttype": "none"}):
        figure.savefig(path, format=option, dpi=120, metadata={"Date": None} if option == "svg" else None)
