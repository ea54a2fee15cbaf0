"""Compiled orders of one rank and of small pipelines against the best that a constraint solver finds, simulated.

    python benchmarks/optimum.py                  # at most 5 s of the solver a row
    python benchmarks/optimum.py --seconds 120    # more rows are proven
    python benchmarks/optimum.py --bytes          # the fewest bytes of orders that are as fast within 0.5 %
    python benchmarks/optimum.py --only pipelines --rows 8 12    # some of them

Experts : attention 4 : 3, input and weight gradients as long as the forward each, both exchanges alike; ``ratio`` is
exchange over compute, ``live`` the limit of live microbatches on a rank. The solver starts from the compiled order.
``gap`` is the compiled time over the best known one, ``bound`` what is proven: no order is faster. Needs ortools, of
the extra ``test``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from overlap1f1b.plan import BlockShape, NodeCosts, compile, fastest, pipeline_bound
from overlap1f1b.plan.compiler import NO_SLOWER
from overlap1f1b.schedule import Program, build_schedule
from tests.plan.cases import table_bytes
from tests.plan.optimum import optimum

MOE, DENSE = BlockShape(1), BlockShape(0)
LIMITS = ((0.25, 3), (0.5, 3), (1.0, 2), (1.0, 3), (1.0, None), (2.0, 3))
"""Ratios and limits; with None every forward may come first."""


class Row(NamedTuple):
    """A step: its ranks, the blocks of each, microbatches, ratio and limit; ``what`` the blocks are, in words."""

    ranks: int
    what: str
    blocks: tuple[BlockShape, ...]
    microbatches: int
    ratio: float
    live: int | None


def layers(count: int, block: BlockShape = MOE, what: str = "") -> tuple[str, tuple[BlockShape, ...]]:
    """Return so many equal blocks, with their name."""
    return f"{count} {what}".strip(), (block,) * count


OTHERS = (
    layers(2, MOE._replace(parts=2), "2 parts"),
    layers(1, MOE._replace(parts=4), "4 parts"),
    layers(2, MOE.dropping("block"), "dropped"),
    ("2 dense between", (MOE, DENSE, MOE)),
)
GROUPS = {
    "one rank": [
        Row(1, *layers(count), microbatches, *limit)
        for count in (1, 2, 4)
        for microbatches in (1, 2, 3, 4, 6, 8)
        for limit in LIMITS
    ],
    "one rank, other blocks": [
        Row(1, *blocks, microbatches, ratio, 3)
        for blocks in OTHERS
        for microbatches in (1, 2, 3, 4, 8)
        for ratio in (0.5, 1.0)
    ],
    "pipelines": [
        Row(ranks, *layers(1), microbatches, ratio, None)
        for ranks in (2, 4)
        for microbatches in (2, 4, 8)
        for ratio in (0.5, 1.0)
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--only", choices=GROUPS)
    parser.add_argument("--rows", type=int, nargs=2, default=(0, None), metavar=("FIRST", "END"))
    given = parser.parse_args()
    measured = measure_bytes if given.bytes else measure
    for name, rows in GROUPS.items():
        if given.only not in (None, name) or (given.bytes and name == "one rank, other blocks"):
            continue
        print(f"{name}\nranks layers          microbatches ratio live   compiled       best      bound     gap")
        gaps = [measured(row, given.seconds, given.workers) for row in rows[slice(*given.rows)]]
        print(f"gap: median {median(gaps):.2%}, largest {max(gaps):.2%}; {_over(gaps)} of {len(gaps)} over 1 %\n")


def _over(gaps: Sequence[float]) -> int:
    return sum(gap > 0.01 for gap in gaps)


def measure(row: Row, seconds: float, workers: int) -> float:
    """Print the times of one row; return the gap."""
    program, costs = _step(row)
    plan = compile(program, row.blocks, costs, 3)
    best, least = plan.predicted, pipeline_bound(program.placement, row.microbatches, row.blocks, costs)
    if best > least:
        limits = {"live": program.peak_activations, "known": plan.ranks}
        found = optimum(
            program.placement, row.microbatches, row.blocks, costs, seconds=seconds, workers=workers, **limits
        )
        best, least = min(best, found.value), max(least, found.bound)
    return _told(row, plan.predicted, best, least)


def measure_bytes(row: Row, seconds: float, workers: int) -> float:
    """Print the bytes of one row; return the gap."""
    program, costs = _step(row)
    costs = replace(costs, bytes=table_bytes(row.ranks, len(row.blocks)))
    plan, *others = fastest(program, row.blocks, costs, 3)
    limits = {"live": program.peak_activations, "known": plan.ranks}
    limits["within"] = NO_SLOWER * min(one.predicted for one in (plan, *others))
    found = optimum(program.placement, row.microbatches, row.blocks, costs, seconds=seconds, workers=workers, **limits)
    return _told(row, plan.memory(), min(plan.memory(), found.value), found.bound)


def _step(row: Row) -> tuple[Program, NodeCosts]:
    parts, exchange = row.blocks[0].parts, 5.25 * row.ratio
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=exchange, dense=7).in_parts(parts)
    extra = {} if row.ranks > 1 else {"extra_warmup": max(0, (row.live or row.microbatches) - 2)}
    return build_schedule("combined_1f1b", ranks=row.ranks, microbatches=row.microbatches, **extra), costs


def _told(row: Row, compiled: float, best: float, least: float) -> float:
    ranks, what, _, microbatches, ratio, live = row
    print(
        f"{ranks:5} {what:15} {microbatches:12} {ratio:5} {live or '-':>4} {compiled:10g} {best:10g} "
        f"{least:10.6g}{'=' if best == least else ' '} {compiled / best - 1:7.2%}",
        flush=True,
    )
    return compiled / best - 1


if __name__ == "__main__":
    main()
