"""The engine's own time on the host: steps of tiny blocks, beside a plain loop of the same calls.

    python benchmarks/engine_walk.py                  # 10,000 actions that do nothing, and 2,000 tiny MoE layers
    python benchmarks/engine_walk.py --schedule zb_h1 --microbatches 2000
    python benchmarks/engine_walk.py --against ../before   # the same of another checkout, in turns

Two rows. *Actions*: one block that does nothing; what the engine adds to an action. *Layers*: transformer layers with
experts on one rank, of a few tokens; what the engine adds to the forward and backward of a layer for a microbatch.
A step of the engine and a loop of ``module(x).backward()`` over the same microbatches are timed in turns; both contain
torch's own cost of a call. Medians of the process's CPU time over the rounds; the difference is what the engine adds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor, nn

from overlap1f1b import Engine, NodeCosts, build_schedule
from overlap1f1b.engine import EngineOptions
from overlap1f1b.moe import MoE, RouterConfig

TOKENS, HIDDEN, LAYERS = 16, 8, 4


class Nothing(nn.Module):
    """Returns its only parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


class Layer(nn.Module):
    """A transformer layer whose attention is one matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.attention = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(HIDDEN, HIDDEN, RouterConfig(experts=4, top_k=2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y: Tensor = x + self.moe(self.norms[1](x))
        return y


def own_seconds(
    blocks: Sequence[nn.Module], schedule: str, microbatches: Sequence[Tensor], rounds: int
) -> tuple[float, float]:
    """Return the medians of the engine's step and of the plain loop, in seconds."""
    program = build_schedule(schedule, microbatches=len(microbatches))
    costs = NodeCosts.uniform(attention=1, experts=1, dispatch=1, dense=1)
    engine = Engine(
        list(blocks), program, loss_fn=lambda x, _: x.sum(), options=EngineOptions(costs=costs, overlap="serial")
    )
    model, inputs = nn.Sequential(*blocks), torch.cat(list(microbatches))
    stepped, looped = [], []
    for turn in range(rounds + 1):
        start = time.process_time()
        engine.step(inputs, target=inputs)
        middle = time.process_time()
        for x in microbatches:
            model(x).sum().backward()
        if turn:  # the first compiles the plan
            stepped.append(middle - start)
            looped.append(time.process_time() - middle)
    return median(stepped), median(looped)


def measured(options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of both rows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    count = options.microbatches
    actions = 2 * count
    step, loop = own_seconds([Nothing()], options.schedule, torch.zeros(count, 1).split(1), options.rounds)
    few = max(1, count // 10)
    tokens = torch.randn(few * TOKENS, HIDDEN).split(TOKENS)
    layers_step, layers_loop = own_seconds([Layer() for _ in range(LAYERS)], options.schedule, tokens, options.rounds)
    return {
        "actions": actions,
        "step_ms": 1e3 * step,
        "plain_ms": 1e3 * loop,
        "own_ms": 1e3 * (step - loop),
        "own_us_per_action": 1e6 * (step - loop) / actions,
        "layers": few * LAYERS,
        "layers_step_ms": 1e3 * layers_step,
        "layers_plain_ms": 1e3 * layers_loop,
        "own_us_per_layer": 1e6 * (layers_step - layers_loop) / (few * LAYERS),
    }


def line(found: dict[str, float]) -> str:
    """Return the figures as text."""
    return (
        f"{found['actions']:.0f} actions: step {found['step_ms']:.0f} ms, plain loop {found['plain_ms']:.0f} ms, "
        f"own {found['own_us_per_action']:.1f} µs an action; "
        f"{found['layers']:.0f} layers: step {found['layers_step_ms']:.0f} ms, "
        f"plain loop {found['layers_plain_ms']:.0f} ms, own {found['own_us_per_layer']:.0f} µs a layer and microbatch"
    )


def beside(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the medians of this checkout and of another one, each measured in its own process, in turns."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = {"before": os.path.abspath(options.against), "now": here}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    command = [sys.executable, os.path.abspath(__file__), "--schedule", options.schedule, "--json", "-"]
    command += ["--microbatches", str(options.microbatches), "--rounds", str(options.rounds)]
    for _ in range(options.turns):
        for name, folder in folders.items():
            environment = {**os.environ, "PYTHONPATH": folder}
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
            found[name].append(json.loads(ran.stdout))
            print(f"{name:6} {line(found[name][-1])}", file=sys.stderr, flush=True)
    return {name: {key: median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="sequential")
    parser.add_argument("--microbatches", type=int, default=5000, help="each is a forward and a backward, 2 actions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", help="folder of another checkout to measure in turns with this one")
    parser.add_argument("--turns", type=int, default=3, help="turns of each checkout")
    parser.add_argument("--json", help="file for the results; - for the standard output, and nothing else there")
    options = parser.parse_args()
    if min(options.microbatches, options.rounds, options.turns) < 1:
        parser.error("--microbatches, --rounds and --turns; allowed: 1 or more")
    if options.against and not os.path.isdir(os.path.join(options.against, "overlap1f1b")):
        parser.error(f"--against {options.against}; allowed: a folder with the package overlap1f1b")
    result = beside(options) if options.against else measured(options)
    if options.json == "-":
        print(json.dumps(result))
        return
    if options.against:
        before, now = result["before"], result["now"]
        print("median before", line(before))
        print("median now   ", line(now))
        for key in ("own_us_per_action", "own_us_per_layer"):
            print(f"{key}: {now[key] / before[key]:.2f} of before")
    else:
        print(line(result))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
