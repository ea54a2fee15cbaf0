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
    return {
        "schedule": program.name,
        "ranks": len(program.ranks),
        "chunks": chunks_of(program),
        "microbatches": program.microbatches,
        **figures(Outcome.of(program, timeline)),
        **_overlap(timeline),
        "per_rank": [_rank(program, timeline, rank) for rank in range(len(program.ranks))],
        "actions": [[str(step) for step in steps] for steps in program.ranks],
    }


def row_of(program: Program, timeline: Played, candidate: Candidate | None = None) -> dict[str, Any]:
    """Return one row of a comparison."""
    row = {"schedule": program.name, "chunks": chunks_of(program)}
    if candidate is not None:
        row = _asked(candidate) | {"chunks": chunks_of(program)}
    pairs = sum(pairs_of(program, rank) for rank in range(len(program.ranks)))
    return {**row, **figures(Outcome.of(program, timeline)), "pairs": pairs, **_overlap(timeline)}


def _overlap(timeline: Played) -> dict[str, Any]:
    """Return the keys of a plan of sub-ops: the overlap, its fastest order, and the hidden share of the exchange."""
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
    """Return the schedule and its options, None where the default holds."""
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
    """Return the number of fused pairs of a rank."""
    return sum(isinstance(step, Pair) for step in program.ranks[rank])


def _rank(program: Program, timeline: Played, rank: int) -> dict[str, Any]:
    busy, bubble = timeline.busy(rank), timeline.bubble(rank)
    further: dict[str, float] = {}
    if isinstance(timeline, PlanTimeline):
        of = timeline.ranks[rank]
        further["exposed"] = of.exposed
        if of.host:
            further["host_late"] = of.late
    elif (timeline.costs.activation, timeline.costs.held) != (1, 1):
        further["peak_memory"] = timeline.peak_memory(rank)
    return {
        "busy": busy,
        "bubble": bubble,
        "bubble_share": bubble / (busy + bubble) if busy + bubble else 0.0,
        "peak_activations": timeline.peak_activations(rank),
        **further,
        "pairs": pairs_of(program, rank),
    }


_PER_RANK = {
    "rank": "rank",
    "busy": "busy",
    "bubble": "bubble",
    "bubble_share": "share",
    "peak_activations": "peak activations",
    "peak_memory": "peak memory",
    "pairs": "pairs",
    "exposed": "exposed",
    "host_late": "host late",
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
    """Return a table with a row for each rank; of many ranks the middle ones are left out."""
    kept: list[Mapping[str, Any]] = [{"rank": rank, **row} for rank, row in enumerate(rows)]
    return _table(_PER_RANK, middle_left_out(kept, lambda gap: {"rank": gap}))


def per_schedule(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each schedule, its makespan also as a multiple of the first one's."""
    first = rows[0]["makespan"] if rows else 0.0
    return _table(_PER_SCHEDULE, [{**row, "ratio": row["makespan"] / first if first else 1.0} for row in rows])


def _table(headings: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = [key for key in headings if any(row.get(key) is not None for row in rows)]
    table = plain_table(map(headings.__getitem__, shown), ("schedule", "overlap"))
    for row in rows:
        table.add_row(*(escape(_text(key, row.get(key))) for key in shown))
    return table


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
