"""Time to generate, check and simulate a large schedule, at three sizes, in one process.

    python benchmarks/schedule_scale.py

64 ranks, 4 chunks a rank; 256, 512 and 1,024 microbatches: up to 524,288 actions. Prints seconds by the wall clock.
``simulate`` checks the program once more by itself, so only ``play_actions`` is timed for the simulation.
"""

from __future__ import annotations

import time

from overlap1f1b.schedule import build_schedule
from overlap1f1b.simulation import Costs, play_actions

RANKS, CHUNKS = 64, 4


def main() -> None:
    print("microbatches   actions  generate   check  simulate   total  µs/action")
    for name in ("combined_1f1b", "zb_h1"):
        print(name)
        for microbatches in (256, 512, 1024):
            start = time.perf_counter()
            program = build_schedule(name, ranks=RANKS, microbatches=microbatches, chunks=CHUNKS)
            generated = time.perf_counter()
            program.check()
            checked = time.perf_counter()
            timeline = play_actions(program, Costs(forward=1, backward=2, weight=1))
            simulated = time.perf_counter()
            assert timeline.makespan > microbatches * 3
            count = sum(1 for rank in range(RANKS) for _ in program.actions(rank))
            parts = generated - start, checked - generated, simulated - checked
            print(
                f"{microbatches:12} {count:9} {parts[0]:9.2f} {parts[1]:7.2f} {parts[2]:9.2f} {sum(parts):7.2f} "
                f"{1e6 * sum(parts) / count:10.1f}"
            )


if __name__ == "__main__":
    main()
