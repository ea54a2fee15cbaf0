"""Time to generate, check, simulate and compile a large schedule, at three sizes, in one process.

    python benchmarks/schedule_scale.py

64 ranks, 4 chunks a rank; 256, 512 and 1,024 microbatches: up to 524,288 actions. Prints seconds of the processor.
``simulate`` checks the program once more by itself, so only ``play_actions`` is timed for the simulation. The second
table compiles the serial plan of one block a stage, which checks the program too.
"""

from __future__ import annotations

from time import process_time

from overlap1f1b.plan import BlockShape, NodeCosts, compile
from overlap1f1b.schedule import Program, build_schedule
from overlap1f1b.simulation import Costs, play_actions

RANKS, CHUNKS = 64, 4
MICROBATCHES = (256, 512, 1024)


def main() -> None:
    print("microbatches   actions  generate   check  simulate   total  µs/action")
    for name in ("combined_1f1b", "zb_h1"):
        print(name)
        for microbatches in MICROBATCHES:
            measure(name, microbatches)
    print("microbatches     nodes   compile    µs/node")
    for microbatches in MICROBATCHES:
        measure_plan(build_schedule("combined_1f1b", ranks=RANKS, microbatches=microbatches, chunks=CHUNKS))


def measure(name: str, microbatches: int) -> None:
    """Print one line of the first table."""
    start = process_time()
    program = build_schedule(name, ranks=RANKS, microbatches=microbatches, chunks=CHUNKS)
    generated = process_time()
    program.check()
    checked = process_time()
    timeline = play_actions(program, Costs(forward=1, backward=2, weight=1))
    simulated = process_time()
    assert timeline.makespan > microbatches * 3
    count = sum(1 for rank in range(RANKS) for _ in program.actions(rank))
    parts = generated - start, checked - generated, simulated - checked
    print(
        f"{microbatches:12} {count:9} {parts[0]:9.2f} {parts[1]:7.2f} {parts[2]:9.2f} {sum(parts):7.2f} "
        f"{1e6 * sum(parts) / count:10.1f}",
        flush=True,
    )


def measure_plan(program: Program) -> None:
    """Print one line of the second."""
    start = process_time()
    plan = compile(program, (BlockShape(expert_calls=0),), NodeCosts(), "serial")
    seconds, count = process_time() - start, sum(map(len, plan.ranks))
    print(f"{program.microbatches:12} {count:9} {seconds:9.2f} {1e6 * seconds / count:10.1f}", flush=True)


if __name__ == "__main__":
    main()
