"""Every kernel at every shape once, so that no other section's time goes into a compiler."""

from __future__ import annotations

import time
from typing import Any

import torch

from gpu_bench.checks import SMALL
from gpu_bench.context import Context
from gpu_bench.kernels import SHAPES, TINY, cases
from overlap1f1b.kernels.choice import triton_of


def run(context: Context) -> dict[str, Any]:
    """Seconds of the first call of each kernel; on a CPU of its twin. What does not fit the time is said."""
    found: dict[str, Any] = {"rows": [], "skipped": [], "problems": []}
    for shape in (*SMALL, *(TINY if context.tiny else SHAPES)):
        for case in cases(context, shape):
            name = f"{case.name} at {shape.name}"
            if context.left <= 0:
                found["skipped"].append(f"{name}: no time left")
                continue
            begun = time.monotonic()
            try:
                with torch.no_grad():
                    (triton_of(case.op) if context.cuda else case.op)(*case.args)
                context.synchronize()
            except Exception as error:
                found["problems"].append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            found["rows"].append({"name": name, "seconds": time.monotonic() - begun})
        context.free()
    found["seconds"] = sum(row["seconds"] for row in found["rows"])
    context.say(f"{len(found['rows'])} kernels in {found['seconds']:.1f} s, {len(found['skipped'])} left out")
    return found
