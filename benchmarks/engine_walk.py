"""The engine's own cost of a schedule: actions whose blocks do nothing, beside a plain loop of the same calls.

    python benchmarks/engine_walk.py                  # 10,000 actions
    python benchmarks/engine_walk.py --schedule zb_h1 --microbatches 2000

A step of the engine is timed, and a loop of ``module(x).backward()`` over the same microbatches, interleaved; both
contain autograd's own cost of a call. Medians over the rounds; the difference is what the engine adds.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import torch
from torch import Tensor, nn

from overlap1f1b import Engine, NodeCosts, build_schedule


class Nothing(nn.Module):
    """Returns its only parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedule", default="sequential")
    parser.add_argument("--microbatches", type=int, default=5000, help="each is a forward and a backward, 2 actions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    module, count = Nothing(), options.microbatches
    program = build_schedule(options.schedule, microbatches=count)
    actions = sum(1 for _ in program.actions(0))
    costs = NodeCosts.uniform(attention=1, experts=1, dispatch=1, dense=1)
    engine = Engine([module], program, loss_fn=lambda x, _: x, costs=costs, overlap="serial")
    inputs = torch.zeros(count, 1)
    parts = inputs.split(1)
    stepped, looped = [], []
    for turn in range(options.rounds + 1):
        start = time.perf_counter()
        engine.step(inputs, target=inputs)
        middle = time.perf_counter()
        for x in parts:
            module(x).backward()
        if turn:  # the first compiles the plan
            stepped.append(middle - start)
            looped.append(time.perf_counter() - middle)
    step, loop = median(stepped), median(looped)
    result = {
        "actions": actions,
        "step_ms": 1e3 * step,
        "plain_ms": 1e3 * loop,
        "own_ms": 1e3 * (step - loop),
        "own_us_per_action": 1e6 * (step - loop) / actions,
    }
    print(
        f"{actions} actions of {program.name}: step {1e3 * step:.0f} ms, plain loop {1e3 * loop:.0f} ms, "
        f"own cost {1e3 * (step - loop):.0f} ms ({result['own_us_per_action']:.0f} µs an action)"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
