"""What the engine costs where there is nothing to hide: against a plain loop, every exchange answered locally."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from gpu_bench.context import Context
from gpu_bench.model import build
from gpu_bench.steps import Steps, deterministic, gradients
from overlap1f1b.plan import Overlap
from overlap1f1b.transport.exchange import LocalExchange

ROWS: tuple[tuple[str, int, Overlap], ...] = (("sequential", 0, 3), ("combined_1f1b", 1, 3))


def run(context: Context) -> dict[str, Any]:
    """Four layers of hidden 2048, 4,096 tokens a microbatch; in turns, medians."""
    work = build(context, 4, overhead=True)

    def plain() -> float:
        work.model.zero_grad()
        return context.seconds(work.plain_step)[0]

    engines = [Steps(context, work, row, LocalExchange()) for row in ROWS]
    problems = []
    for engine in engines:
        while engine.engine.costs is None:
            engine.step()
        engine.step()  # this one compiles the plan
        with deterministic():
            engine.step()
        engine.grads = gradients(work.model.parameters())
        engine.step()
        if not all(torch.equal(a, b) for a, b in zip(engine.grads, engines[0].grads, strict=True)):
            problems.append(f"{engine.name}: gradients differ")
    samples: dict[str, list[float]] = {"plain": [], **{engine.name: [] for engine in engines}}
    launched: dict[str, list[float]] = {engine.name: [] for engine in engines}
    plain()
    for _ in range(3 if context.quick else 7):
        samples["plain"].append(plain())
        for engine in engines:
            samples[engine.name].append(engine.step()[0])
            launched[engine.name].append(engine.queued_s)
        if context.left < 0:
            break
    base = median(samples["plain"])
    rows = [
        {"name": name, "step_ms": 1e3 * median(values), "over_plain": median(values) / base}
        | ({"launch_ms": 1e3 * median(launched[name])} if name in launched else {})
        for name, values in samples.items()
    ]
    for row in rows:
        context.say(f"{row['name']}: {row['step_ms']:.2f} ms, {row['over_plain']:.3f} of the plain loop")
    return {"workload": work.options, "rows": rows, "problems": problems}
