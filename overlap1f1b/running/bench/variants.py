"""The rows of the ablation table, and the times of one row."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from overlap1f1b.plan import Overlap
from overlap1f1b.running.options import BenchOptions
from overlap1f1b.schedule import AUTO, DEFAULT_EXTRA_WARMUP, Program, build_schedule


class Variant(NamedTuple):
    """A program under an overlap; ``default`` marks the one that the options ask for."""

    program: Program
    overlap: Overlap
    default: bool = False

    @property
    def name(self) -> str:
        """Name of the program, with the number of chunks if a rank has several."""
        chunks = len(self.program.placement.places(0))
        return self.program.name + f", {chunks} chunks" * (chunks > 1)

    @property
    def key(self) -> str:
        return f"{self.name} · {self.overlap}"


def asked_for(options: BenchOptions) -> Variant:
    """Return the variant of ``--schedule`` and ``--overlap``."""
    return Variant(options.program(), options.overlap, default=True)


def variants_of(options: BenchOptions) -> dict[str, Variant]:
    """Return the rows for these options by their keys, the serial baseline first if there is one."""
    default = asked_for(options)
    rows = _pipelines(options, default) if options.pp > 1 else _ablation(options, default)
    return {row.key: row for row in rows} | {default.key: default}


def _ablation(options: BenchOptions, default: Variant) -> list[Variant]:
    """Return rows from the serial baseline through Megatron's pattern to three open actions, one change a row."""
    count = options.microbatches
    sequential = build_schedule("sequential", microbatches=count)
    merged = build_schedule("combined_1f1b", microbatches=count, extra_warmup=0)
    warmed = build_schedule("combined_1f1b", microbatches=count, extra_warmup=DEFAULT_EXTRA_WARMUP)
    return [
        Variant(sequential, "serial"),
        Variant(sequential, 1),
        Variant(merged, "pairs"),
        Variant(merged, 2),
        Variant(warmed, 2),
        Variant(warmed, default.overlap),
    ]


def _pipelines(options: BenchOptions, default: Variant) -> list[Variant]:
    """Return the best schedules, or the one of ``--schedule``, with Megatron's pattern and with ``--overlap``.

    Orders that are found for the costs are shown beside the best schedules: one of a stage a rank, and the one that the
    options ask for.
    """
    if options.schedule not in (None, AUTO):
        return [Variant(default.program, kind) for kind in ("serial", "pairs", default.overlap)]
    programs = []
    for name, chunks in (("combined_1f1b", 1), ("combined_1f1b", 2), ("zb_v", 2), ("dualpipev", 2)):
        with suppress(ValueError):  # too few microbatches for it
            programs.append(build_schedule(name, ranks=options.pp, microbatches=options.microbatches, chunks=chunks))
    rows = [Variant(program, kind) for program in programs for kind in ("pairs", default.overlap)]
    if options.schedule == AUTO:
        rows.append(Variant(replace(options, chunks=None).program(), default.overlap))
    return rows


class Samples:
    """Times of one row in seconds, and its overlap, in every round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.exposed: list[float] = []
        self.hidden: list[float] = []

    def summary(self) -> dict[str, Any]:
        """Return the measured part of the row's JSON."""
        ms = {name: 1e3 * of(self.seconds) for name, of in (("min", min), ("median", median), ("max", max))}
        return {
            "step_ms": ms,
            "exposed_ms": 1e3 * median(self.exposed) if self.exposed else None,
            "hidden_fraction": median(self.hidden) if self.hidden else None,
        }
