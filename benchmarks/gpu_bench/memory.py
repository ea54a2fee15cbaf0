"""What plans hold under limits of memory, as the allocator counts it, and how long their steps take."""

from __future__ import annotations

from statistics import median
from typing import Any

from gpu_bench.context import Context
from gpu_bench.model import build
from gpu_bench.steps import ROWS, Steps
from overlap1f1b.learn.memory import ByteCount
from overlap1f1b.transport.loopback import LoopbackExchange

LIMITS = ((1.05, "none"), (1.3, "none"), (1.6, "none"), (2.0, "none"), (2.5, "none"), (1.05, "auto"))
"""In plain loops, and how blocks recompute."""
GBPS = 10.0  # exchanges take about as long as compute


def run(context: Context) -> dict[str, Any]:
    """A row for each limit: what was predicted, what was held, and the time."""
    work = build(context, 4, routing="real")
    exchange = LoopbackExchange(context.device, None if context.tiny else GBPS)
    for _ in range(2):
        work.model.zero_grad()
        with ByteCount(context.device) as plain:
            work.plain_step()
    found: dict[str, Any] = {"plain_bytes": plain.peak, "rows": [], "skipped": [], "problems": []}
    for limit, recompute in LIMITS:
        if context.left <= 0:
            found["skipped"].append(f"{limit:g}, {recompute}: no time left")
            continue
        work.model.zero_grad()
        room = round(limit * plain.peak)
        try:
            steps = Steps(context, work, ROWS[-1], exchange, memory=plain.before + room, recompute=recompute)
            while steps.engine.tuner.settling:
                steps.step()
            work.model.zero_grad()
            with ByteCount(context.device) as count:
                steps.engine.step(work.inputs, target=work.target)
        except ValueError as error:  # no plan keeps within it
            found["skipped"].append(f"{limit:g}, {recompute}: {error}")
            continue
        plan = steps.engine.plan
        row = {
            "limit": limit, "recompute": recompute, "program": plan.program.name, "order": plan.order,
            "predicted": plan.peak_bytes[0] / plain.peak, "held": count.peak / plain.peak,
            "step_ms": 1e3 * median(steps.step()[0] for _ in range(1 if context.quick else 3)),
        }  # fmt: skip
        found["rows"].append(row)
        if count.peak > room:
            found["problems"].append(f"{limit:g}, {recompute}: {row['held']:.2f} plain loops were held")
        context.say(f"{limit:g}, {recompute}: {row['held']:.2f} held, {row['step_ms']:.1f} ms, {plan.program.name}")
        context.keep(found)
        del steps, plan
        context.free()
    return found
