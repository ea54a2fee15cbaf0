"""Limits of memory: the plan that is chosen, beside the best one whose blocks all recompute alike.

    python benchmarks/limits.py                      # counted bytes, simulated times, one process
    python benchmarks/limits.py --exchange 8         # exchanges longer than compute
    python benchmarks/limits.py --host-link 0        # without host memory
    python benchmarks/limits.py --only-offload       # without recompute, in a tenth of the time

A step counts what each node of two models holds, in each mode of recompute. Times are set: attention 3, experts 4, an
exchange 5.25, so that exchange takes as long as compute. For limits in multiples of what a plain loop holds: the
predicted step of the plan that ``recompute="auto"`` chooses, and of the best of all open actions up to 3, forwards to
warm up and modes alike in all blocks. Beside them the plan of ``offload="auto"``, with a link to host memory over which
all of a microbatch takes ``--host-link`` of its compute each way. Last the best plan without any limit: nothing can
gain more.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from overlap1f1b import Engine, build_schedule
from overlap1f1b.engine import EngineOptions
from overlap1f1b.learn.planner import Measured, Planner, lighter
from overlap1f1b.plan import RESOURCE_OF, NodeCosts, Op, Plan, Resource, fastest
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from overlap1f1b.schedule import Kind, Program

LIMITS = (0.7, 1.0, 1.3, 1.6, 2.0, 2.5)
MICROBATCHES = (6, 8)
SIZES = {
    "8 experts, 2 chosen": MoEConfig(layers=4, hidden=32, intermediate=64, sequence=32),
    "32 experts, 8 chosen (as Qwen3-MoE)": MoEConfig(
        layers=4, hidden=64, intermediate=48, sequence=32, experts=32, top_k=8
    ),
}


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of ``[B, S, V]``."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def measured(
    blocks: nn.Module, program: Program, times: NodeCosts, link: float, *, only_none: bool = False
) -> tuple[Planner, Measured]:
    """Return an engine's planner, and the counted bytes of all modes of recompute, or of none; times are set.

    With a ``link`` there are copies to host memory, which take such a part of compute, and nothing recomputes.
    """
    given: dict[str, Any] = {"recompute": "none" if only_none or link else "auto"}
    given |= {"offload": "auto", "offload_threshold": 0} if link else {}
    options = EngineOptions(memory="1TB", tries=0, verify=False, **given)
    engine = Engine(blocks, program, loss_fn=loss_fn, options=options)
    text = torch.randint(256, (2 * program.microbatches, 33), generator=torch.Generator().manual_seed(1))
    with patch.object(Planner, "chosen", autospec=True, side_effect=Planner.chosen) as chosen:
        while engine.tuner.settling:
            engine.step(text[:, :-1], target=text[:, 1:])
    counted: Measured = chosen.call_args.args[2]
    found = {}
    for key, (costs, shapes) in counted.items():
        by_node = {one: times.by_op.get(one[:2], 0.0) for one in costs.bytes}
        compute = sum(by_node[one] for one in costs.bytes if RESOURCE_OF[one[0]] is Resource.COMPUTE)
        sizes = {one[2:]: of.kept for one, of in costs.bytes.items() if one[0] is Op.FETCH}
        for place, size in sizes.items():
            copy = link * compute * size / sum(sizes.values())
            by_node |= {(Op.OFFLOAD, Kind.F, *place): copy, (Op.FETCH, Kind.I, *place): copy}
        found[key] = replace(times, by_node=by_node, bytes=costs.bytes), shapes
    return engine.tuner.planner, found


def chosen(planner: Planner, program: Program, counted: Measured, rooms: tuple[float, ...]) -> Plan | None:
    """Return the plan that is chosen within a limit; None if nothing keeps within it."""
    try:
        return replace(planner, rooms=rooms).chosen(program, counted).plans[0]
    except ValueError:
        return None


def shown(plan: Plan | None, plain: Plan, best: float) -> str:
    """Return the cells of a plan: its step, as a multiple of the best without a limit, and what it holds."""
    if plan is None:
        return f"{'none':>21}"
    return f"{plan.predicted:6.1f} {plan.predicted / best:7.3f} {plan.peak_bytes[0] / plain.peak_bytes[0]:6.2f}"


def main() -> None:
    """Print a table for each model and number of microbatches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchange", type=float, default=5.25, help="time of an exchange; a layer computes 21")
    parser.add_argument(
        "--host-link", type=float, default=0.5, help="copies of a microbatch, over its compute; 0: none"
    )
    parser.add_argument("--only-offload", action="store_true", help="leave out what recompute would choose")
    given = parser.parse_args()
    times = NodeCosts.uniform(attention=3, experts=4, dispatch=given.exchange, aggregate=0.2, dense=1)
    for (name, config), microbatches in product(SIZES.items(), MICROBATCHES):
        program = build_schedule("combined_1f1b", microbatches=microbatches, extra_warmup=1)
        planner, counted = measured(MoETransformer(config, seed=1), program, times, 0.0, only_none=given.only_offload)
        costs, shapes = counted["none", 1]
        plain = fastest(build_schedule("sequential", microbatches=microbatches), shapes, costs, "serial")[0]

        def alike(rooms: tuple[float, ...] = (), found: Measured = counted, whole: Program = program) -> float:
            """Return the best predicted step whose blocks all recompute alike; infinite if none keeps the limit."""
            return min(
                (
                    plan.predicted
                    for (costs, shapes), program in product(found.values(), lighter(whole))
                    for plan in fastest(program, shapes, costs, 3, rooms=rooms)
                ),
                default=inf,
            )

        moves = measured(MoETransformer(config, seed=1), program, times, given.host_link) if given.host_link else None
        best = alike()
        print(f"{name}, {microbatches} microbatches: {best:.1f} without a limit, a plain loop {plain.predicted:.1f}")
        print("  limit  chosen  × best  holds  best alike   offload  × best  holds  leave  chosen plan")
        for limit in LIMITS:
            rooms = (limit * plain.peak_bytes[0],)
            plan = None if given.only_offload else chosen(planner, program, counted, rooms)
            other = None if moves is None else chosen(moves[0], program, moves[1], rooms)
            left, plans = sum(map(len, other.offloads.values())) if other else 0, [one for one in (plan, other) if one]
            modes = Counter(b.recompute for b in plan.shapes[0]) if plan else Counter[str]()
            print(
                f"  {limit:5.1f}  {shown(plan, plain, best)}  {inf if plan is None else alike(rooms):10.1f}    "
                f"{shown(other, plain, best)}  "
                f"{left:5}  "
                f"{', '.join(f'{one.program.name} {one.order}' for one in plans)}; "
                f"{', '.join(f'{count} {mode}' for mode, count in modes.items())}",
                flush=True,
            )


if __name__ == "__main__":
    main()
