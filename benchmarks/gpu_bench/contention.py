"""What products lose beside blocks that hold multiprocessors, as NCCL's do, and if these are carved out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_bench.context import Context

BLOCKS = (1, 4, 8, 16, 32)
CARVED = (2, 4, 8, 12, 16, 24, 32, 48)
SHARED = 200 << 10
"""Bytes of shared memory of a block: no other block fits beside it."""
SPIN_CYCLES, CALLS = 60_000_000, 4
"""Cycles for which blocks spin, 30 ms and more, and calls of a product meanwhile."""
SOURCE = """
extern "C" __global__ void spin(int cycles) {
    extern __shared__ char room[];
    long long begun = clock64();
    while (clock64() - begun < cycles) {}
    if (cycles < 0) room[threadIdx.x] = 1;
}
"""


def run(context: Context) -> dict[str, Any]:
    """Milliseconds of each product alone, beside spinning blocks, and there with multiprocessors carved out.

    Also whether a product has the same bits with any number of them carved out.
    """
    products, spin = products_of(context), spinner(context)
    rows: list[dict[str, Any]] = []
    for name, product in products.items():
        for _ in range(3):
            whole = product()
        bits = {carved: same(product, whole, carved) for carved in CARVED}

        def took(blocks: int, carved: int | None = None, product: Callable[[], Tensor] = product) -> float:
            with carve(carved):
                return median(beside(context, product, spin, blocks) for _ in range(3 if context.quick else 5))

        alone = took(0)
        for blocks in BLOCKS:
            carved = {carved: took(blocks, carved) for carved in CARVED if carved >= blocks}
            row = {"product": name, "blocks": blocks, "alone_ms": alone, "all_ms": took(blocks), "carved_ms": carved}
            rows.append(row | {"same_bits": bits})
            found = ", ".join(f"{c} carved {ms / alone:.2f}" for c, ms in carved.items())
            context.say(f"{name}, {blocks} blocks: {row['all_ms'] / alone:.2f}; {found}; same bits {bits}")
        context.keep({"rows": rows})
    return {"rows": rows}


@contextmanager
def carve(sms: int | None) -> Iterator[None]:
    """Let products leave so many multiprocessors alone, where this torch can."""
    put = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if put is not None:
        put(sms)
    try:
        yield
    finally:
        if put is not None:
            put(None)


def same(product: Callable[[], Tensor], whole: Tensor, carved: int) -> bool:
    """Return whether a product has the same bits with so many multiprocessors less."""
    with carve(carved):
        return torch.equal(product(), whole)


def products_of(context: Context) -> dict[str, Callable[[], Tensor]]:
    """The products of a layer: dense, grouped, attention."""
    rows, width, inner, experts, sequence = (64, 16, 8, 4, 16) if context.tiny else (32768, 4096, 2048, 16, 4096)
    x, w = context.randn(rows // 4, width), context.randn(width, width)
    found: dict[str, Callable[[], Tensor]] = {"mm": lambda: x @ w}
    if context.cuda:
        grouped, weights = context.randn(rows, width), context.randn(experts, width, inner)
        ends = torch.arange(1, experts + 1, device=context.device, dtype=torch.int32) * (rows // experts)
        found["grouped_mm"] = lambda: torch._grouped_mm(grouped, weights, offs=ends)
    q, k, v = (context.randn(2, max(1, width // 128), sequence, 128, seed=n) for n in range(3))
    found["attention"] = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return found


def spinner(context: Context) -> Callable[[int], object]:
    """Return a function that lets so many blocks spin, on a stream of high priority."""
    if not context.cuda:
        return lambda blocks: None
    kernel = torch.cuda._compile_kernel(SOURCE, "spin")
    kernel.set_shared_memory_config(SHARED)
    stream = torch.cuda.Stream(context.device, priority=-1)

    def spin(blocks: int) -> None:
        with torch.cuda.stream(stream):
            kernel((blocks, 1, 1), (256, 1, 1), [SPIN_CYCLES], shared_mem=SHARED, stream=stream)

    return spin


def beside(context: Context, product: Callable[[], object], spin: Callable[[int], object], blocks: int) -> float:
    """Milliseconds of a call while so many blocks spin."""
    if not context.cuda:
        return 1e3 * context.seconds(product)[0]
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    context.synchronize()
    if blocks:
        spin(blocks)
    torch.cuda._sleep(2_000_000)  # until the blocks have their places
    begun.record()
    for _ in range(CALLS):
        product()
    ended.record()
    context.synchronize()
    return begun.elapsed_time(ended) / CALLS
