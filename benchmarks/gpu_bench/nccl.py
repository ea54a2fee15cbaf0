"""The exchange of rows over NCCL, alone and beside matrix products; NCCL refuses two ranks on one GPU."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from gpu_bench.context import Context, NoTimeError
from overlap1f1b.transport.exchange import new_exchange

WIDTH, PRODUCT = 2048, 4096  # elements of a row; sides of the matrices
SIZES = (4 << 20, 32 << 20, 256 << 20)
"""Bytes that a rank sends, its own part included."""


def run(context: Context) -> dict[str, Any]:
    """Exchanges of equal and of uneven sizes between all GPUs of this machine."""
    ranks = torch.cuda.device_count() if context.cuda else 1
    if ranks < 2:
        return {"ranks": ranks, "rows": [], "skipped": ["NCCL, which a single GPU cannot show: it needs two or more"]}
    with tempfile.TemporaryDirectory() as folder:
        workers = mp.start_processes(_work, (ranks, folder, 5 if context.quick else 20), ranks, join=False)
        while not workers.join(timeout=1.0):
            if context.left < 0:
                for process in workers.processes:
                    process.kill()
                raise NoTimeError("no time left")
        return {"ranks": ranks, "rows": json.loads((Path(folder) / "rows.json").read_text())}


def _work(rank: int, ranks: int, folder: str, rounds: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows = measured(torch.device("cuda", rank), SIZES, rounds)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def measured(device: torch.device, sizes: Sequence[int], rounds: int, product: int = PRODUCT) -> list[dict[str, Any]]:
    """Medians on this rank, in ms: the exchange alone, products about as long, and both at once."""
    world = dist.group.WORLD
    assert world is not None
    exchange = new_exchange(world, device=device.type)
    rank, ranks = exchange.rank, exchange.ranks
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.randn(product, product, device=device, dtype=dtype)
    found = []
    for size in sizes:
        for uneven in (False, True):
            table = _table(max(1, size // (WIDTH * dtype.itemsize * ranks)), ranks, uneven)
            send, receive = table[rank], [row[rank] for row in table]
            source = torch.randn(sum(send), WIDTH, device=device, dtype=dtype)

            def compute(count: int) -> None:
                for _ in range(count):
                    matrix @ matrix

            def both(count: int, source: Tensor = source, send: Any = send, receive: Any = receive) -> None:
                transfer = exchange.rows(source, send, receive)
                compute(count)
                transfer.finish()

            alone, one = (
                _milliseconds(device, rounds, partial(both, 0)),
                _milliseconds(device, rounds, partial(compute, 1)),
            )
            count = max(1, math.ceil(alone / one))
            products, together = (_milliseconds(device, rounds, partial(f, count)) for f in (compute, both))
            sent = (sum(send) - send[rank]) * WIDTH * dtype.itemsize
            found.append({
                "bytes": sent, "uneven": uneven, "exchange_ms": alone, "gb_s": sent / alone / 1e6,
                "products_ms": products, "both_ms": together,
                "hidden": min(1.0, max(0.0, (alone + products - together) / min(alone, products))),
            })  # fmt: skip
    return found


def _table(each: int, ranks: int, uneven: bool) -> list[list[int]]:
    """Rows from each rank to each rank; uneven ones differ by up to three times."""
    return [[each * (1 + (r + p) % 3) // 2 if uneven else each for p in range(ranks)] for r in range(ranks)]


def _milliseconds(device: torch.device, rounds: int, function: Callable[[], object]) -> float:
    times = []
    for turn in range(rounds + 2):  # the first two warm up
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn > 1:
            times.append(1e3 * (time.perf_counter() - start))
    return median(times)
