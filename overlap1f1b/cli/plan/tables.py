"""Tables of figures: of each rank, of several schedules, of a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

RANKS_SHOWN = 16

_PER_RANK = {
    "rank": "rank",
    "busy": "busy",
    "bubble": "bubble",
    "bubble_share": "share",
    "peak_activations": "peak activations",
    "peak_memory": "peak memory",
    "pairs": "pairs",
    "exposed": "exposed",
}

_PER_SCHEDULE = {
    "schedule": "schedule",
    "chunks": "chunks",
    "extra_warmup": "extra warm-up",
    "overlap": "overlap",
    "makespan": "makespan",
    "ratio": "of the first",
    "bubble_share": "bubble",
    "peak_activations": "peak activations",
    "parameter_copies": "parameters",
    "pairs": "pairs",
    "hidden_fraction": "hidden",
}


def per_rank(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row a rank: busy, bubble, peak activations, pairs. Of many ranks the middle ones are left out."""
    kept = [{"rank": rank, **row} for rank, row in enumerate(rows)]
    if len(kept) > RANKS_SHOWN:
        half = RANKS_SHOWN // 2
        gap = {"rank": f"… {len(kept) - 2 * half} more"}
        kept = [*kept[:half], gap, *kept[-half:]]
    return _table(_PER_RANK, kept)


def per_schedule(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row a schedule, its makespan also as a multiple of the first one's."""
    first = rows[0]["makespan"] if rows else 0.0
    return _table(_PER_SCHEDULE, [{**row, "ratio": row["makespan"] / first if first else 1.0} for row in rows])


def _table(headings: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    shown = [key for key in headings if any(row.get(key) is not None for row in rows)]
    for key in shown:
        table.add_column(headings[key], justify="left" if key in ("schedule", "overlap") else "right")
    for row in rows:
        table.add_row(*_texts(shown, row))
    return table


def _texts(keys: Iterable[str], row: Mapping[str, Any]) -> list[str]:
    return [escape(_text(key, row.get(key))) for key in keys]


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in ("bubble_share", "hidden_fraction"):
        return f"{value:.1%}"
    if key == "ratio":
        return f"{value:.3f}"
    if key == "parameter_copies":
        return f"{value}×"
    return value if isinstance(value, str) else f"{value:.6g}"
