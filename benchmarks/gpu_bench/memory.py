"""What plans hold under limits of memory, as the allocator counts it, and how long their steps take."""

from __future__ import annotations

from statistics import median
from typing import Any

from gpu_bench.context import Context
from gpu_bench.model import build
from gpu_bench.steps import ROWS, Steps
from overlap1f1b.learn.memory import ByteCount
from overlap1f1b.plan import Resource
from overlap1f1b.transport.loopback import LoopbackExchange

Case = tuple[float, dict[str, Any]]
"""A limit in plain loops, and options of the engine beside it."""
LIMITS: list[Case] = [*((limit, {}) for limit in (1.05, 1.3, 1.6, 2.0, 2.5)), (1.05, {"recompute": "auto"})]
GBPS = 10.0  # exchanges take about as long as compute


def run(context: Context) -> dict[str, Any]:
    """A row for each limit: what was predicted, what was held, and the time."""
    return limited(context, LIMITS)


def limited(context: Context, cases: list[Case]) -> dict[str, Any]:
    """A row for each case; those with ``offload`` have the bytes and the rate of their copies, too."""
    work = build(context, 4, routing="real")
    exchange = LoopbackExchange(context.device, None if context.tiny else GBPS)
    for _ in range(2):
        work.model.zero_grad()
        with ByteCount(context.device) as plain:
            work.plain_step()
    found: dict[str, Any] = {"plain_bytes": plain.peak, "rows": [], "skipped": [], "problems": []}
    for limit, options in cases:
        name = ", ".join([f"{limit:g}", *(f"{key}={value}" for key, value in options.items())])
        if context.left <= 0:
            found["skipped"].append(f"{name}: no time left")
            continue
        work.model.zero_grad()
        room = round(limit * plain.peak)
        try:
            steps = Steps(context, work, ROWS[-1], exchange, memory=plain.before + room, **options)
            while steps.engine.tuner.settling:
                steps.step()
            work.model.zero_grad()
            with ByteCount(context.device) as count:
                steps.engine.step(work.inputs, target=work.target)
        except ValueError as error:  # no plan keeps within it
            found["skipped"].append(f"{name}: {error}")
            continue
        plan = steps.engine.plan
        row = {
            "limit": limit, "name": name, "program": plan.program.name, "order": plan.order,
            "predicted": plan.peak_bytes[0] / plain.peak, "held": count.peak / plain.peak,
            "step_ms": 1e3 * median(steps.step()[0] for _ in range(1 if context.quick else 3)),
        }  # fmt: skip
        if plan.offloads:
            result = steps.step()[1]
            took = {span.node: span.end - span.start for span in result.times.spans()}
            copies = [
                flight for flight in result.times.flights if flight.node.resource is Resource.HOST and flight.sent
            ]
            moved = sum(flight.sent for flight in copies)
            row |= {"moved": moved, "gbps": moved / 1e9 / sum(took[flight.node] for flight in copies)}
        found["rows"].append(row)
        if count.peak > room:
            found["problems"].append(f"{name}: {row['held']:.2f} plain loops were held")
        context.say(f"{name}: {row['held']:.2f} held, {row['step_ms']:.1f} ms, {plan.program.name}")
        context.keep(found)
        del steps, plan
        context.free()
    return found
