"""Cost of launches in a simulated step, with plans that know the launch costs and plans that do not.

    python benchmarks/launch_cost.py

Exchange as long as compute, attention 1 ms and experts 4/3 ms, 100 µs a launch; the host waits for counts, as on a
device with exact sizes. A loss is measured against the plan for free launches, played with free launches.
``empty`` counts forward dispatches without compute between their counts and the host's wait for these, of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import process_time

from overlap1f1b.plan import (
    BlockShape,
    Node,
    NodeCosts,
    Op,
    Overlap,
    Plan,
    Resource,
    compile,
    with_rendezvous,
)
from overlap1f1b.schedule import Kind, Program, build_schedule
from overlap1f1b.simulation import simulate

LAUNCH = 0.1
COUNTS = (0.0, 0.05)
SIZES = (
    # pipeline ranks, chunks, layers of a stage, microbatches, k
    (1, 1, 2, 8, 3),
    (1, 1, 4, 4, 3),
    (1, 1, 4, 8, 2),
    (1, 1, 4, 8, 3),
    (1, 1, 4, 8, 4),
    (1, 1, 4, 32, 3),
    (1, 1, 8, 8, 3),
    (2, 1, 2, 16, 3),
    (2, 1, 4, 8, 3),
    (4, 1, 2, 16, 3),
    (4, 1, 4, 8, 3),
    (4, 2, 2, 16, 3),
)


def costs_of(counts: float, launch: float = 0.0) -> NodeCosts:
    """Return costs in milliseconds."""
    return NodeCosts.uniform(attention=1, experts=4 / 3, dispatch=7 / 4, counts=counts, send=0.2, launch=launch)


def device_plan(program: Program, layers: int, costs: NodeCosts, overlap: Overlap) -> Plan:
    """Return the plan that a device plays."""
    plan = compile(program, (BlockShape(expert_calls=1),) * layers, costs, overlap, counts_block=True)
    return with_rendezvous(plan, costs, counts_block=True)


def empty_waits(nodes: Sequence[Node]) -> int:
    """Return the number of forward dispatches without compute between their counts and themselves."""
    computed, at, empty = 0, dict[Node, int](), 0
    for node in nodes:
        computed += node.resource is Resource.COMPUTE and node.op is not Op.AGGREGATE
        at[node] = computed
        if node.op is Op.DISPATCH and node.kind is Kind.F:
            empty += at[node._replace(op=Op.COUNTS)] == computed
    return empty


def main() -> None:
    print(
        "ranks chunks layers microbatches k counts   step ms     unaware       aware   empty unaware  aware  compile s"
    )
    for ranks, chunks, layers, microbatches, k in SIZES:
        program = build_schedule("combined_1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks)
        for counts in COUNTS:
            free, slow = costs_of(counts), costs_of(counts, LAUNCH)
            begun = process_time()
            plans = [device_plan(program, layers, free, k)]
            middle = process_time()
            plans.append(device_plan(program, layers, slow, k))
            seconds = middle - begun, process_time() - middle
            step = simulate(plans[0], free, counts_block=True).makespan
            losses = [simulate(plan, slow, counts_block=True).makespan / step - 1 for plan in plans]
            empty = [sum(map(empty_waits, plan.ranks)) for plan in plans]
            every = ranks * chunks * layers * microbatches
            print(
                f"{ranks:5} {chunks:6} {layers:6} {microbatches:12} {k} {counts:6.2f} {step:9.2f} "
                f"{losses[0]:+11.2%} {losses[1]:+11.2%} {empty[0]:10}/{every:<4} {empty[1]:5} "
                f"{seconds[0]:6.2f} {seconds[1]:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
