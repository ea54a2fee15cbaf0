"""Limits of memory: the plan that is chosen, beside the best one whose blocks all recompute alike.

    python benchmarks/limits.py                      # counted bytes, simulated times, one process
    python benchmarks/limits.py --exchange 8         # exchanges longer than compute

A step counts what each node of two models holds, in each mode of recompute. Times are set: attention 3, experts 4, an
exchange 5.25, so that exchange takes as long as compute. For limits in multiples of what a plain loop holds: the
predicted step of the plan that ``recompute="auto"`` chooses, and of the best of all open actions up to 3, forwards to
warm up and modes alike in all blocks. Last the best plan without any limit: nothing can gain more.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor, nn

from overlap1f1b import Engine, build_schedule
from overlap1f1b.engine import EngineOptions
from overlap1f1b.learn.planner import Measured, Planner, lighter
from overlap1f1b.plan import NodeCosts, fastest
from overlap1f1b.running.transformer import MoEConfig, MoETransformer

LIMITS = (1.0, 1.3, 1.6, 2.0, 2.5)
MICROBATCHES = 6
SIZES = {
    "8 experts, 2 chosen": MoEConfig(layers=4, hidden=32, intermediate=64, sequence=32),
    "32 experts, 8 chosen (as Qwen3-MoE)": MoEConfig(
        layers=4, hidden=64, intermediate=48, sequence=32, experts=32, top_k=8
    ),
}
PROGRAM = build_schedule("combined_1f1b", microbatches=MICROBATCHES, extra_warmup=1)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of ``[B, S, V]``."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def measured(blocks: nn.Module, times: NodeCosts) -> tuple[Planner, Measured]:
    """Return an engine's planner, and the counted bytes of all modes of recompute; times are set."""
    options = EngineOptions(memory="1TB", recompute="auto", tries=0, verify=False)
    engine = Engine(blocks, PROGRAM, loss_fn=loss_fn, options=options)
    text = torch.randint(256, (2 * MICROBATCHES, 33), generator=torch.Generator().manual_seed(1))
    with patch.object(Planner, "chosen", autospec=True, side_effect=Planner.chosen) as chosen:
        while engine.tuner.settling:
            engine.step(text[:, :-1], target=text[:, 1:])
    counted: Measured = chosen.call_args.args[2]
    set_times = {
        key: replace(times, by_node={one: times.by_op.get(one[:2], 0.0) for one in costs.bytes}, bytes=costs.bytes)
        for key, (costs, _) in counted.items()
    }
    return engine.tuner.planner, {key: (set_times[key], shapes) for key, (_, shapes) in counted.items()}


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchange", type=float, default=5.25, help="time of an exchange; a layer computes 21")
    times = NodeCosts.uniform(attention=3, experts=4, dispatch=parser.parse_args().exchange, aggregate=0.2, dense=1)
    for name, config in SIZES.items():
        planner, counted = measured(MoETransformer(config, seed=1), times)
        costs, shapes = counted["none", 1]
        plain = fastest(build_schedule("sequential", microbatches=MICROBATCHES), shapes, costs, "serial")[0]

        def alike(rooms: tuple[float, ...] = (), found: Measured = counted) -> float:
            """Return the best predicted step whose blocks all recompute alike."""
            return min(
                plan.predicted
                for (costs, shapes), program in product(found.values(), lighter(PROGRAM))
                for plan in fastest(program, shapes, costs, 3, rooms=rooms)
            )

        print(f"{name}\n  limit  chosen   holds  best alike  times as fast  chosen plan")
        for limit in LIMITS:
            rooms = (limit * plain.peak_bytes[0],)
            best, plan = alike(rooms), replace(planner, rooms=rooms).chosen(PROGRAM, counted).plans[0]
            modes = ", ".join(f"{count} {mode}" for mode, count in Counter(b.recompute for b in plan.shapes[0]).items())
            holds = plan.peak_bytes[0] / plain.peak_bytes[0]
            print(
                f"  {limit:5.1f}  {plan.predicted:6.1f}  {holds:6.2f}  {best:10.1f}  {best / plan.predicted:13.3f}  "
                f"{plan.program.name} {plan.order}: {modes}"
            )
        print(f"  none   {alike():6.1f}")


if __name__ == "__main__":
    main()
