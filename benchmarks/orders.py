"""Compiled orders of random steps, simulated, against those of an earlier commit: time, bytes, seconds of planning.

    python benchmarks/orders.py                       # against benchmarks/results/orders.json, of commit 3b016d6d
    python benchmarks/orders.py --steps 50 60         # some of them
    git worktree add ../before COMMIT
    python benchmarks/orders.py --package ../before --write orders.json    # such a file of any commit

A step has 1 to 4 ranks, 1 to 8 microbatches, 1 to 3 blocks of random kinds, random costs, and bytes that nodes hold.
``time`` and ``bytes`` are those of the compiled plan over those before. Steps are ``equal`` that take as long within
0.5 %; ``least`` are those of them in which a rank held what one microbatch needs, so no order can hold less. ``front``
has the bytes of the lightest compiled order that takes no longer than the plan before. Every plan keeps all rules. The
last line has a hash of all plans: it is the same for every ``PYTHONHASHSEED``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median
from time import process_time
from typing import Any, NamedTuple

FIGURES = Path(__file__).parent / "results" / "orders.json"
EQUAL = 0.005
ROUNDING = 1e-9


class Row(NamedTuple):
    """A step beside the one before: ratios, whether no order holds less than that, and seconds of planning."""

    time: float
    bytes: float
    front: float
    least: bool
    seconds: float
    fingerprint: str

    @property
    def equal(self) -> bool:
        return abs(self.time - 1) <= EQUAL


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, nargs=2, default=(0, 300), metavar=("FIRST", "END"))
    parser.add_argument("--package", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    sys.path.insert(0, str(given.package))
    drawn = {step: one for step in range(*given.steps) if (one := draw(step)) is not None}
    if given.write:
        lines = (f'"{step}": {json.dumps(figures(*one))}' for step, one in drawn.items())
        given.write.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    before = json.loads(FIGURES.read_text())
    print(" step  ranks  microbatches  nodes    time   bytes   front  seconds")
    told([compared(step, *one, *before[str(step)]) for step, one in drawn.items()])


def draw(step: int) -> tuple[Any, ...] | None:
    """Return program, blocks, costs, overlap and whether the host waits for counts; None if that is impossible."""
    from overlap1f1b.plan import BlockShape, Held, NodeCosts, Op
    from overlap1f1b.schedule import Kind, build_schedule

    moe, dense, draw = BlockShape(1), BlockShape(0), Random(step)
    ranks, microbatches, chunks = draw.choice((1, 1, 1, 2, 2, 3, 4)), draw.randint(1, 8), draw.choice((1, 1, 1, 2))
    options = {"extra_warmup": draw.randint(0, 3)} if ranks == 1 or draw.random() < 0.5 else {}
    blocks = [draw.choice((moe, moe, moe, dense, moe.dropping("block"))) for _ in range(draw.randint(1, 3))]
    parts = draw.choice((1, 1, 2))
    shape = tuple(block._replace(parts=parts) if block.expert_calls else block for block in blocks)
    times = {name: draw.uniform(1, 4) for name in ("attention", "experts", "dispatch", "combine")}
    times |= {"counts": draw.choice((0, 0.2)), "aggregate": draw.choice((0, 0.5)), "dense": draw.uniform(2, 8)}
    times |= {"send": draw.choice((0, 0.5, 2)), "launch": draw.choice((0, 0, 0, 0.1))}
    try:
        program = build_schedule("combined_1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks, **options)
    except ValueError:
        return None
    held = {}
    for stage in range(program.placement.stages):
        for block in range(len(shape)):
            for op in (Op.ATTENTION, Op.EXPERTS, Op.DENSE, Op.AGGREGATE):
                kept, calls = 1.0 + len(op.value), parts if op is Op.EXPERTS else 1
                for part in range(calls):
                    held[op, Kind.F, stage, block, 0, part] = Held(kept=kept)
                    held[op, Kind.I, stage, block, 0, part] = Held(kept=-0.4 * kept, most=0.2 * kept)
                held[op, Kind.W, stage, block, 0, 0] = Held(kept=-0.6 * kept * calls)
    costs = replace(NodeCosts.uniform(**times).in_parts(parts), bytes=held)
    return program, shape, costs, draw.choice((3, 3, 3, 4)), bool(times["launch"])


def figures(program: Any, shape: Any, costs: Any, overlap: int, waits: bool) -> tuple[float, float]:
    """Return time and bytes of the plan."""
    from overlap1f1b.plan import compile

    plan = compile(program, shape, costs, overlap, counts_block=waits)
    return plan.predicted, max(plan.peak_bytes)


def compared(
    step: int, program: Any, shape: Any, costs: Any, overlap: int, waits: bool, time: float, held: float
) -> Row:
    """Print a step beside the one before."""
    from overlap1f1b.plan import Chains, fastest
    from overlap1f1b.plan.orders import serial
    from tests.plan.rules import broken_rules

    begun = process_time()
    plans = fastest(program, shape, costs, overlap, counts_block=waits)
    seconds, plan = process_time() - begun, plans[0]
    if broken := list(broken_rules(plan)):
        raise ValueError(f"step {step}: {broken[0]}; allowed: plans that keep all rules")
    chains = Chains(program.placement, shape)
    serials = [list(serial(program.actions(rank), chains)) for rank in range(len(plan.ranks))]
    alone = costs.peak_bytes([[node for node in nodes if not node.microbatch] for nodes in serials])
    front = min((one.memory() for one in plans if one.predicted <= time * (1 + ROUNDING)), default=float("inf"))
    least = held <= max(alone) * (1 + ROUNDING)
    row = Row(plan.predicted / time, plan.memory() / held, front / held, least, seconds, plan.fingerprint)
    print(
        f"{step:5} {len(plan.ranks):6} {program.microbatches:13} {sum(map(len, plan.ranks)):6} {row.time:7.3f} "
        f"{row.bytes:7.3f} {front / held:7.3f} {seconds:8.2f} {'equal' * row.equal} {'least' * least}",
        flush=True,
    )
    return row


def told(rows: list[Row]) -> None:
    """Print what holds of all steps."""
    equal, seconds = [row for row in rows if row.equal], [row.seconds for row in rows]
    free = [row for row in equal if not row.least]
    kinds = {
        f"time of {len(rows)} steps": [row.time for row in rows],
        f"bytes of {len(rows)} steps": [row.bytes for row in rows],
        f"front of {len(rows)} steps": [row.front for row in rows],
        f"bytes of {len(equal)} equal steps": [row.bytes for row in equal],
        f"bytes of {len(free)} equal steps, not least before": [row.bytes for row in free],
        "seconds of a processor": seconds,
    }
    for what, values in kinds.items():
        if values:
            print(f"{what}: median {median(values):.3f}, {min(values):.3f} to {max(values):.3f}")
    print(f"all plans: {sha256(''.join(row.fingerprint for row in rows).encode()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
