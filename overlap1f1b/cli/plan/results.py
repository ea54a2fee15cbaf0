"""The results of a plan as JSON and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

from rich.markup import escape
from rich.table import Table

from overlap1f1b.schedule import OPTIONS, Pair, Program
from overlap1f1b.simulation import PlanTimeline, ProgramTimeline
from overlap1f1b.simulation.search import Candidate, Outcome, Played, Ranking
from overlap1f1b.terminal.output import middle_left_out, plain_table


def content_of(program: Program, timeline: Played) -> dict[str, Any]:
    """Return the JSON of one program; times have the unit of the costs."""
    limits: dict[str, Any] = {}  # what no order can be faster than, and what less memory costs
    if isinstance(timeline, PlanTimeline):
        front = [{"makespan": plan.predicted, "held": plan.peak_held} for plan in timeline.front]
        limits = {"bound": timeline.bound, "front": front}
    return {
        "schedule": program.name,
        "ranks": len(program.ranks),
        "chunks": chunks_of(program),
        "microbatches": program.microbatches,
        **figures(Outcome.of(program, timeline)),
        **_overlap(timeline),
        **limits,
        "per_rank": [_rank(program, timeline, rank) for rank in range(len(program.ranks))],
        "actions": [[str(step) for step in steps] for steps in program.ranks],
    }


def row_of(program: Program, timeline: Played, candidate: Candidate | None = None) -> dict[str, Any]:
    row = {"schedule": program.name} if candidate is None else _asked(candidate)
    pairs = sum(pairs_of(program, rank) for rank in range(len(program.ranks)))
    row |= {"chunks": chunks_of(program), **figures(Outcome.of(program, timeline)), "pairs": pairs}
    return row | _overlap(timeline)


def _overlap(timeline: Played) -> dict[str, Any]:
    if isinstance(timeline, ProgramTimeline):
        return {}
    plan, hidden = timeline.plan, timeline.hidden_fraction
    return {"overlap": str(plan.overlap), "order": plan.order, "hidden_fraction": None if isnan(hidden) else hidden}


def found(ranking: Ranking) -> dict[str, Any]:
    """Return the JSON of a search."""

    def named(candidate: Candidate, **more: object) -> dict[str, Any]:
        return {**_asked(candidate), "overlap": candidate.overlap, **more}

    return {
        "rows": [named(candidate, **figures(outcome)) for candidate, outcome in ranking.found],
        "over_memory": [named(candidate, peak_activations=peak) for candidate, peak in ranking.over],
        "pruned": [named(candidate, bound=bound) for candidate, bound in ranking.pruned],
        "refused": [named(candidate, reason=reason) for candidate, reason in ranking.refused],
    }


def _asked(candidate: Candidate) -> dict[str, Any]:
    return {"schedule": candidate.schedule, **dict.fromkeys(OPTIONS), **candidate.options}


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON of an outcome."""
    return {
        "makespan": outcome.makespan,
        "bubble_share": outcome.bubble_share,
        "peak_activations": outcome.peak_activations,
        "parameter_copies": outcome.copies,
    }


def chunks_of(program: Program) -> int:
    """Return the number of stages of a rank on each pipe."""
    return program.placement.stages // len(program.ranks)


def pairs_of(program: Program, rank: int) -> int:
    return sum(isinstance(step, Pair) for step in program.ranks[rank])


def _rank(program: Program, timeline: Played, rank: int) -> dict[str, Any]:
    busy, bubble = timeline.busy(rank), timeline.bubble(rank)
    row: dict[str, Any] = {"busy": busy, "bubble": bubble}
    row["bubble_share"] = bubble / (busy + bubble) if busy + bubble else 0.0
    row["peak_activations"] = timeline.peak_activations(rank)
    if isinstance(timeline, PlanTimeline):
        of = timeline.ranks[rank]
        row["exposed"] = of.exposed
        if of.host:
            row["host_late"] = of.late
    return row | {"pairs": pairs_of(program, rank)}


_COLUMNS = {
    "rank": "rank",
    "schedule": "schedule",
    "chunks": "chunks",
    "extra_warmup": "extra warm-up",
    "overlap": "overlap",
    "makespan": "makespan",
    "ratio": "of the first",
    "busy": "busy",
    "bubble": "bubble",
    "bubble_share": "bubble",
    "peak_activations": "peak activations",
    "parameter_copies": "parameters",
    "pairs": "pairs",
    "exposed": "exposed",
    "host_late": "host late",
    "hidden_fraction": "hidden",
}
"""Columns of both tables by the keys of rows, in order."""


def per_rank(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each rank; of many ranks the middle ones are left out."""
    kept: list[Mapping[str, Any]] = [{"rank": rank, **row} for rank, row in enumerate(rows)]
    return _table(middle_left_out(kept, lambda gap: {"rank": gap}))


def distinct(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of a search, fastest first, without those that say nothing new.

    One before such a row takes as long, with as many chunks and copies of the parameters. It is of the same schedule,
    or needs less memory.
    """
    kept: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        alike = kept.setdefault(tuple(_text(key, row[key]) for key in ("makespan", "chunks", "parameter_copies")), [])
        name, peak = row["schedule"], row["peak_activations"]
        if not any(other["schedule"] == name or other["peak_activations"] < peak for other in alike):
            alike.append(row)
    return [row for alike in kept.values() for row in alike]


def per_schedule(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each schedule, its makespan also as a multiple of the first one's."""
    first = rows[0]["makespan"] if rows else 0.0
    return _table([{**row, "ratio": row["makespan"] / first if first else 1.0} for row in rows])


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = [key for key in _COLUMNS if any(row.get(key) is not None for row in rows)]
    headings = _COLUMNS | ({"bubble_share": "share"} if "bubble" in shown else {})  # of the column before
    table = plain_table((headings[key] for key in shown), ("schedule", "overlap"))
    for row in rows:
        table.add_row(*(escape(_text(key, row.get(key))) for key in shown))
    return table


def _text(key: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    forms = {"bubble_share": "{:.1%}", "hidden_fraction": "{:.1%}", "ratio": "{:.3f}", "parameter_copies": "{}×"}
    return forms.get(key, "{:.6g}").format(value)
