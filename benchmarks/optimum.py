"""Compiled orders of one rank and of small pipelines against the best that a constraint solver finds, simulated.

    python benchmarks/optimum.py                  # at most 5 s of the solver a row
    python benchmarks/optimum.py --seconds 120    # more rows are proven

Experts : attention 4 : 3, input and weight gradients as long as the forward each, both exchanges alike; ``ratio`` is
exchange over compute, ``live`` the limit of live microbatches on a rank. The solver starts from the compiled order.
``gap`` is the compiled time over the best known one, ``bound`` what is proven: no order is faster. Needs ortools, of
the extra ``test``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from overlap1f1b.plan import BlockShape, NodeCosts, compile, pipeline_bound
from overlap1f1b.schedule import build_schedule
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
    given = parser.parse_args()
    for name, rows in GROUPS.items():
        print(f"{name}\nranks layers          microbatches ratio live   compiled       best      bound     gap")
        gaps = [measure(row, given.seconds, given.workers) for row in rows]
        print(f"gap: median {median(gaps):.2%}, largest {max(gaps):.2%}; {_over(gaps)} of {len(gaps)} over 1 %\n")


def _over(gaps: Sequence[float]) -> int:
    return sum(gap > 0.01 for gap in gaps)


def measure(row: Row, seconds: float, workers: int) -> float:
    """Print one row; return the gap."""
    ranks, what, blocks, microbatches, ratio, live = row
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5.25 * ratio, dense=7).in_parts(blocks[0].parts)
    extra = {} if ranks > 1 else {"extra_warmup": max(0, (live or microbatches) - 2)}
    program = build_schedule("combined_1f1b", ranks=ranks, microbatches=microbatches, **extra)
    plan = compile(program, blocks, costs, 3)
    best, least = plan.predicted, pipeline_bound(program.placement, microbatches, blocks, costs)
    if best > least:
        limits = {"live": program.peak_activations, "known": plan.ranks}
        found = optimum(program.placement, microbatches, blocks, costs, seconds=seconds, workers=workers, **limits)
        best, least = min(best, found.time), max(least, found.bound)
    print(
        f"{ranks:5} {what:15} {microbatches:12} {ratio:5} {live or '-':>4} {plan.predicted:10g} {best:10g} "
        f"{least:10.6g}{'=' if best == least else ' '} {plan.predicted / best - 1:7.2%}",
        flush=True,
    )
    return plan.predicted / best - 1


if __name__ == "__main__":
    main()
