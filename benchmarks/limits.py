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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from overlap1f1b import Engine, build_schedule
from overlap1f1b.engine import EngineOptions
from overlap1f1b.engine.tuner import lighter
from overlap1f1b.integrations.transformers import split_model
from overlap1f1b.moe import MoEConfig, MoETransformer
from overlap1f1b.plan import NodeCosts, fastest

LIMITS = (1.0, 1.3, 1.6, 2.0, 2.5)
MICROBATCHES = 6
QWEN = {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 48, "intermediate_size": 128}
QWEN |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of ``[B, S, V]``."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


PROGRAM = build_schedule("combined_1f1b", microbatches=MICROBATCHES, extra_warmup=1)


def measured(blocks: Any, times: NodeCosts) -> Engine:
    """Return an engine that has counted the bytes of all modes of recompute; times are set."""
    options = EngineOptions(memory="1TB", recompute="auto", tries=0, verify=False)
    engine = Engine(blocks, PROGRAM, loss_fn=loss_fn, options=options)
    text = torch.randint(256, (2 * MICROBATCHES, 33), generator=torch.Generator().manual_seed(1))
    while engine.tuner.settling:
        engine.step(text[:, :-1], target=text[:, 1:])
    tuner = engine.tuner
    for mode, (costs, shapes) in tuner._of_modes.items():
        by_node = {key: times.by_op.get(key[:2], 0.0) for key in costs.bytes}
        tuner._of_modes[mode] = replace(times, by_node=by_node, bytes=costs.bytes), shapes
    return engine


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchange", type=float, default=5.25, help="time of an exchange; a layer computes 21")
    times = NodeCosts.uniform(attention=3, experts=4, dispatch=parser.parse_args().exchange, aggregate=0.2, dense=1)
    torch.manual_seed(1)
    models = {
        "MoETransformer": MoETransformer(MoEConfig(layers=4, hidden=32, intermediate=64, sequence=32), seed=1),
        "Qwen3-MoE": split_model(Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, **QWEN)), PROGRAM),
    }
    for name, blocks in models.items():
        tuner = measured(blocks, times).tuner
        costs, shapes = tuner._of_modes["none"]
        plain = fastest(build_schedule("sequential", microbatches=MICROBATCHES), shapes, costs, "serial")[0]
        alike = [
            plan
            for costs, shapes in tuner._of_modes.values()
            for program in lighter(PROGRAM)
            for plan in fastest(program, shapes, costs, 3)
        ]
        print(f"{name}\n  limit  chosen   holds  best alike  times as fast  chosen plan")
        for limit in LIMITS:
            tuner._rooms = (limit * plain.peak_bytes[0],)
            best = min(plan.predicted for plan in alike if plan.fits(tuner._rooms))
            plan = tuner._with_recompute()[1][0]
            modes = ", ".join(block.recompute for block in plan.shapes[0] if block.expert_calls)
            holds = plan.peak_bytes[0] / plain.peak_bytes[0]
            print(
                f"  {limit:5.1f}  {plan.predicted:6.1f}  {holds:6.2f}  {best:10.1f}  {best / plan.predicted:13.3f}  "
                f"{plan.program.name} {plan.order}: {modes}"
            )
        print(f"  none   {min(plan.predicted for plan in alike):6.1f}")


if __name__ == "__main__":
    main()
