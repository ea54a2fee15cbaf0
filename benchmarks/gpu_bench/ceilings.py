"""What the machine can do at best: copies, matrix products, the way through host memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from gpu_bench.context import Context
from overlap1f1b.transport.loopback import LoopbackExchange
from overlap1f1b.transport.streams import side_stream


def run(context: Context) -> dict[str, Any]:
    """Copy bandwidth (bytes read plus bytes written), products in bf16, copies to and from the host, both at once."""
    size, width = (1 << 16, 64) if context.tiny else (1 << 29, 8192)
    source = context.randn(size)
    target = torch.empty_like(source)
    copy_ms = context.milliseconds(lambda: target.copy_(source))
    found: dict[str, Any] = {"copy_gb_s": 2 * source.numel() * source.element_size() / copy_ms / 1e6}
    context.say(f"copy {found['copy_gb_s']:.0f} GB/s")
    a, b = context.randn(width, width, seed=1), context.randn(width, width, seed=2)
    found["matmul_tflop_s"] = 2 * width**3 / context.milliseconds(lambda: a @ b) / 1e9
    context.say(f"product {found['matmul_tflop_s']:.0f} TFLOP/s")
    chunk = source[: size // 4]
    host = [torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=context.cuda) for _ in range(2)]
    device = torch.empty_like(chunk)
    out, back = side_stream(context.device, "out"), side_stream(context.device, "back")

    def rate(*jobs: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(4):
            context.synchronize()
            start = time.perf_counter()
            marks = [stream.run(job) for stream, job in zip((out, back), jobs, strict=False)]
            for mark in marks:
                mark.synchronize()
            best = min(best, time.perf_counter() - start)
        return chunk.numel() * chunk.element_size() / best / 1e9

    def leave() -> None:
        host[0].copy_(chunk, non_blocking=True)

    def arrive() -> None:
        device.copy_(host[1], non_blocking=True)

    found["to_host_gb_s"], found["from_host_gb_s"] = rate(leave), rate(arrive)
    found["both_ways_each_gb_s"] = rate(leave, arrive)
    found["loopback_gb_s"] = LoopbackExchange(context.device).full_rate((16 if context.tiny else 256) << 20)
    context.say(f"loopback {found['loopback_gb_s']:.1f} GB/s")
    return found
