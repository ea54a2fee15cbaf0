"""Every schedule on the stand-in: ``python -m tests.device.campaign``; the suite plays samples of it.

Its last step is played with a device-wide sync at each node in turn, and under 200 maps of streams to 8 queues. One
line is printed for each case. The process ends with 1 if a case hangs, or has other gradients than the serial order.
"""

import argparse
import sys
import time

from overlap1f1b.schedule import SCHEDULES
from tests.device.model import nodes_of
from tests.device.steps import Layout, program_of, stuck
from tests.device.test_schedules import problems_of
from tests.plan.tries import few_tries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES))
    parser.add_argument("--pp", nargs="*", type=int, default=[2, 3, 4])
    parser.add_argument("--ep", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--maps", type=int, default=200, help="random maps of streams to 8 queues")
    parser.add_argument(
        "--syncs", type=int, default=1_000_000, help="nodes with a device-wide sync, each in a play alone"
    )
    options = parser.parse_args()
    failed = False
    for name in options.schedules:
        for pp in options.pp:
            for ep in options.ep:
                try:
                    program_of(name, pp)
                except ValueError as error:
                    print(f"{name} pp {pp} ep {ep}: {error}")
                    continue
                start = time.monotonic()
                with few_tries():
                    problems, step = problems_of(name, Layout(pp, ep))
                problems += [f"{s}: {w}" for s, w in stuck(step, pp * 10 + ep, maps=options.maps, syncs=options.syncs)]
                nodes = sum(map(nodes_of, step))
                took = time.monotonic() - start
                print(
                    f"{name} pp {pp} ep {ep}: {nodes} nodes, {len(problems)} problems, {took:.0f} s",
                    *problems[:5],
                    flush=True,
                )
                failed |= bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
