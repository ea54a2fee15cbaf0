"""The rows of the ablation table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

from overlap1f1b.cli.options import BenchOptions
from overlap1f1b.engine import Engine
from overlap1f1b.plan import NodeCosts, Overlap
from overlap1f1b.schedule import DEFAULT_EXTRA_WARMUP, Program, build_schedule
from overlap1f1b.simulation import simulate


class Row(NamedTuple):
    """A program under an overlap."""

    program: Program
    overlap: Overlap
    default: bool = False

    @property
    def chunks(self) -> int:
        """Stages of a rank."""
        return len(self.program.placement.places(0))

    @property
    def key(self) -> str:
        """Its name in tables."""
        return f"{self.program.name} · {self.overlap}" + f" · {self.chunks} chunks" * (self.chunks > 1)


def ablation(microbatches: int, overlap: Overlap, chosen: Program) -> list[Row]:
    """From the serial baseline through Megatron's pattern to three open actions, one change a row.

    ``chosen`` under ``overlap`` is marked as the default.
    """
    sequential = build_schedule("sequential", microbatches=microbatches)
    merged = build_schedule("combined_1f1b", microbatches=microbatches, extra_warmup=0)
    warmed = build_schedule("combined_1f1b", microbatches=microbatches, extra_warmup=DEFAULT_EXTRA_WARMUP)
    rows = [
        Row(sequential, "serial"),
        Row(sequential, 1),
        Row(merged, "pairs"),
        Row(merged, 2),
        Row(warmed, 2),
        Row(warmed, overlap),
    ]
    default = Row(chosen, overlap)
    table = {row.key: row for row in (*rows, default)}
    table[default.key] = default._replace(default=True)
    return list(table.values())


def pipeline_rows(options: BenchOptions, overlap: Overlap) -> list[Row]:
    """Schedules over several pipeline ranks, each with Megatron's pattern and with ``overlap``.

    With ``--schedule`` that one alone, serial too; else those that hide most.
    """
    chosen = options.program()
    programs = {"serial": chosen}
    if options.schedule is None:
        sizes = {"ranks": options.pp, "microbatches": options.microbatches}
        wanted = (("combined_1f1b", 1), ("combined_1f1b", 2), ("zb_v", 2), ("dualpipev", 2))
        programs = {}
        for name, chunks in wanted:
            with suppress(ValueError):  # too few microbatches for it
                programs[f"{name} {chunks}"] = build_schedule(name, chunks=chunks, **sizes)  # type: ignore[arg-type]
    rows = [Row(program, kind) for program in programs.values() for kind in ("pairs", overlap)]
    if options.schedule is not None:
        rows.insert(0, Row(chosen, "serial"))
    table = {row.key: row for row in (*rows, Row(chosen, overlap))}
    key = Row(chosen, overlap).key
    table[key] = table[key]._replace(default=True)
    return list(table.values())


class Samples:
    """Times of one row over the rounds, in seconds, and what was seen beside them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.exposed: list[float] = []
        self.hidden: list[float] = []

    def summary(self) -> dict[str, Any]:
        """The row's measured part of the JSON."""
        return {
            "step_ms": {
                "min": 1e3 * min(self.seconds),
                "median": 1e3 * median(self.seconds),
                "max": 1e3 * max(self.seconds),
            },
            "exposed_ms": 1e3 * median(self.exposed) if self.exposed else None,
            "hidden_fraction": median(self.hidden) if self.hidden else None,
        }


def table_of(
    rows: Sequence[Row],
    samples: Mapping[str, Samples],
    engines: Mapping[str, Engine],
    costs: NodeCosts,
    bounds: Mapping[str, float],
    tokens: int,
) -> list[dict[str, Any]]:
    """The rows of the JSON, all but their gradients.

    Args:
        rows: The first is what the others are faster than.
        samples: By the row's key.
        engines: By the row's key.
        costs: Of their nodes, for the prediction.
        bounds: ``"bound"`` and ``"contended"``, in seconds.
        tokens: Of a step, on all ranks.
    """
    steps = {row.key: median(samples[row.key].seconds) for row in rows}
    return [
        {"program": row.program.name, "overlap": str(row.overlap), "default": row.default}
        | samples[row.key].summary()
        | {
            "order": engines[row.key].plan.order,
            "tokens_per_s": tokens / step,
            "over_bound": step / bounds["bound"],
            "over_contended": step / bounds["contended"],
            "predicted_ms": 1e3 * simulate(engines[row.key].plan, costs).makespan,
            "speedup": steps[rows[0].key] / step,
        }
        for row, step in zip(rows, steps.values(), strict=True)
    ]
