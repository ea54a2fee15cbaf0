"""Compiled orders of one rank and of small pipelines against the best that a constraint solver finds, simulated.

    python benchmarks/optimum.py                  # at most 20 s of the solver a row
    python benchmarks/optimum.py --seconds 120    # more rows are proven

Experts : attention 4 : 3, input and weight gradients as long as the forward each, both exchanges alike; ``ratio`` is
exchange over compute, ``live`` the limit of live microbatches on a rank. ``gap`` is the compiled time over the best
known one, ``bound`` what the solver proves: no order is faster. Needs ortools, of the extra ``test``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from overlap1f1b.plan import BlockShape, NodeCosts, fastest
from overlap1f1b.schedule import build_schedule
from tests.plan.optimum import optimum

ONE_RANK = [
    (1, layers, microbatches, ratio, live)
    for layers in (1, 2, 4)
    for microbatches in (1, 2, 3, 4, 8)
    for ratio, live in ((0.5, 3), (1.0, 2), (1.0, 3), (2.0, 3))
]
PIPELINES = [
    (ranks, 1, microbatches, ratio, 2 * ranks) for ranks in (2, 4) for microbatches in (2, 4) for ratio in (0.5, 1.0)
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    for rows in (ONE_RANK, PIPELINES):
        print("ranks  layers  microbatches  ratio  live   compiled     solver      bound     gap")
        gaps = [measure(*row, given.seconds, given.workers) for row in rows]
        print(f"gap: median {median(gaps):.2%}, largest {max(gaps):.2%}\n", flush=True)


def measure(ranks: int, layers: int, microbatches: int, ratio: float, live: int, seconds: float, workers: int) -> float:
    """Print one row; return the gap."""
    costs, shape = NodeCosts.uniform(attention=3, experts=4, dispatch=5.25 * ratio), (BlockShape(1),) * layers
    extra = {"extra_warmup": live - 2} if ranks == 1 else {}
    program = build_schedule("combined_1f1b", ranks=ranks, microbatches=microbatches, **extra)
    compiled = min(plan.predicted for plan in fastest(program, shape, costs, 3))
    limits = program.peak_activations
    best = optimum(program.placement, microbatches, shape, costs, live=limits, seconds=seconds, workers=workers)
    known = min(compiled, best.time)
    print(
        f"{ranks:5} {layers:7} {microbatches:13} {ratio:6} {live:5} {compiled:10g} {best.time:10g} {best.bound:10.6g}"
        f"{'=' if best.proven else ' '} {compiled / known - 1:7.2%}",
        flush=True,
    )
    return compiled / known - 1


if __name__ == "__main__":
    main()
