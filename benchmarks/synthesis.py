"""Orders of actions made for the costs against the best fixed schedules of the same parts and memory, simulated.

    python benchmarks/synthesis.py            # the rows of benchmarks/results/synthesis.md
    python benchmarks/synthesis.py --large    # 8 ranks × 32 microbatches, and 16 × 64 layers like DeepSeek-V3's

Experts : attention 4 : 3, input and weight gradients as long as the forward each, both exchanges alike, 4 layers a
rank; ``ratio`` is exchange over compute. A time is divided by the larger of compute and exchange of the slowest rank.
``slow``: one stage computes 30 % longer. Peaks are in a rank's whole share of the model. ``of fixed`` is the time over
that of the best fixed schedule of any placement with one copy of the parameters; ``of bound`` over ``pipeline_bound``.
``seconds`` are of the processor, for the search alone.
"""

from __future__ import annotations

import sys
from time import process_time

from overlap1f1b.plan import BlockShape, NodeCosts, Op, Plan, bound, compile, found_orders, pipeline_bound
from overlap1f1b.schedule import Kind, Placement
from overlap1f1b.simulation.search import candidates

PARTS, LAYERS = 2, 4
ROWS = (
    # placement, microbatches, peak, ratio, slow stage, seconds
    (Placement.v(2, 4), 8, 4.0, 1.0, None, 10.0),
    (Placement.v(4, 4), 16, 7.5, 1.0, None, 10.0),
    (Placement.v(4, 2), 16, 6.0, 1.0, None, 10.0),
    (Placement.loop(4, 4), 16, 6.0, 1.0, None, 10.0),
    *((Placement.loop(2, 4), 8, 4.0, ratio, None, 5.0) for ratio in (0.25, 0.5, 1.0, 2.0, 4.0)),
    *((Placement.loop(2, 4), 8, 4.0, ratio, 1, 5.0) for ratio in (0.5, 1.0, 2.0)),
)
LARGE = (
    (Placement.v(8, 2), 32, 12.0, 1.0, None, 10.0),
    (Placement.v(16, 2), 64, 24.0, 1.0, None, 10.0),
)


def main() -> None:
    print("ranks  chunks  microbatches  ratio  slow   peak  over load  of bound  of fixed  seconds  best fixed")
    for row in LARGE if "--large" in sys.argv[1:] else ROWS:
        measure(*row)


def measure(
    placement: Placement, microbatches: int, peak: float, ratio: float, slow: int | None, seconds: float
) -> None:
    """Print one row."""
    ranks, chunks = placement.ranks, placement.stages // placement.ranks
    shape = (BlockShape(expert_calls=1, parts=PARTS),) * (LAYERS // chunks)
    costs = costs_of(ratio, slow, len(shape))
    start = process_time()
    plan = found_orders(placement, microbatches, shape, costs, peak_activations=peak, seconds=seconds)[0]
    took = process_time() - start
    found = max(map(plan.live, range(ranks))) * placement.share
    shown = f"{chunks:5} {'V' if placement == Placement.v(ranks, chunks) else ' '}"
    load = microbatches * LAYERS * 21 * max(1.0 + (0.3 / chunks if slow is not None else 0.0), ratio)
    best = fixed(ranks, microbatches, peak, costs) if slow is None and ranks <= 4 else None
    against = "" if best is None else f"{plan.predicted / best.predicted:.3f}"
    print(
        f"{ranks:5} {shown} {microbatches:13} {ratio:6} {'' if slow is None else slow:>5} {found:6g} "
        f"{plan.predicted / load:10.3f} {plan.predicted / pipeline_bound(placement, microbatches, shape, costs):9.3f} "
        f"{against:>9} {took:8.1f}  {'' if best is None else best.program.name}",
        flush=True,
    )


def costs_of(ratio: float, slow: int | None, blocks: int) -> NodeCosts:
    """Return the costs; the stage ``slow`` computes 30 % longer."""
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5.25 * ratio).in_parts(PARTS)
    if slow is None:
        return costs
    slower = {
        (op, kind, slow, block, 0, part): 1.3 * cost
        for (op, kind), cost in costs.by_op.items()
        if op in (Op.ATTENTION, Op.EXPERTS)
        for block in range(blocks)
        for part in range(PARTS if op is Op.EXPERTS and kind is not Kind.W else 1)
    }
    return NodeCosts(costs.by_op, slower)


def fixed(ranks: int, microbatches: int, peak: float, costs: NodeCosts) -> Plan | None:
    """Return the best fixed plan within the peak; those whose bound is beyond the best one's time are left out."""
    programs = []
    for candidate in candidates():
        try:
            program = candidate.build(ranks, microbatches)
        except ValueError:  # impossible for these sizes
            continue
        chunks = program.placement.stages // ranks
        if len(program.placement.pipes) == 1 and not LAYERS % chunks:
            shape = (BlockShape(expert_calls=1, parts=PARTS),) * (LAYERS // chunks)
            programs.append((bound(program, shape, costs, 3), shape, program))
    best: Plan | None = None
    for least, shape, program in sorted(programs, key=lambda entry: entry[0]):
        if best is not None and least >= best.predicted:
            break
        plan = compile(program, shape, costs, 3)
        within = max(map(plan.live, range(ranks))) * program.placement.share <= peak
        if within and (best is None or plan.predicted < best.predicted):
            best = plan
    return best


if __name__ == "__main__":
    main()
