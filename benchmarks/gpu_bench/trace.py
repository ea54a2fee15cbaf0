"""One step of the default program, as the engine's own timeline and as a profiler's trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from gpu_bench.context import Context
from gpu_bench.model import build
from gpu_bench.steps import ROWS, Steps
from overlap1f1b.transport.loopback import LoopbackExchange


def run(context: Context) -> dict[str, Any]:
    """Files beside the results."""
    work = build(context, 4, routing="real")
    steps = Steps(context, work, ROWS[-1], LoopbackExchange(context.device))
    while steps.engine.costs is None:
        steps.step()
    for _ in range(2):  # one compiles, one warms up
        _, result = steps.step()
    timeline = f"{context.path}-timeline.json"
    result.overlap.to_chrome_trace(timeline, unit_us=1e6)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.cuda else [])]
    with profile(activities=activities) as profiler:
        steps.step()
    trace = f"{context.path}-trace.json.gz"
    profiler.export_chrome_trace(trace)
    hidden = result.overlap.hidden_fraction
    return {"timeline": Path(timeline).name, "trace": Path(trace).name, "hidden_fraction": hidden}
