"""FSDP2's gathers inside a step: how much of them travels behind compute, on a shaped link of two ranks (needs root).

    python benchmarks/gathers.py                        # 480 Mbit/s: a gather takes about half of compute
    python benchmarks/gathers.py --mbit 320 --rounds 5  # a slower link

Eight blocks over dp 2, four microbatches, products that only wait (timed compute). Three engines in turns: parameters
of two blocks at a time, each block gathered once a step, and everything gathered before the step and kept, as without a
limit of memory. Printed for each: the median step, and for each step the gathers' time, its part of compute, and how
much of it was hidden.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import subprocess
import sys
import time
from statistics import median
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlap1f1b import Engine, build_schedule
from overlap1f1b.engine import EngineOptions
from overlap1f1b.engine.engine import StepResult
from overlap1f1b.plan import Op, Resource
from overlap1f1b.running.bench.compute import TimedCompute
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from overlap1f1b.running.wire import Wire

CONFIG = MoEConfig(layers=6, hidden=256, intermediate=256, experts=4, top_k=2, sequence=128, heads=4)
MICROBATCHES, SPEED = 4, 1.2e10
ROWS = {"two blocks at a time": 2.0, "each block once": math.inf, "all before the step": None}
"""By name, the most blocks whose parameters are there at once; None for no limit of memory."""


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of ``[B, S, V]``."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def engine_of(mesh: dist.DeviceMesh, at_once: float | None) -> Engine:
    """Return an engine over a sharded model."""
    model = MoETransformer(CONFIG, seed=1)
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    options = EngineOptions(memory=None if at_once is None else "1TB", tries=0, verify=False, timeout=120)
    program = build_schedule("combined_1f1b", microbatches=MICROBATCHES, extra_warmup=1)
    return Engine(model, program, mesh=mesh, loss_fn=loss_fn, options=options)


def said_of(result: StepResult) -> str:
    """Describe the gathers of a step, none without them."""
    found = result.overlap.by_exchange().get("gather.w")
    if found is None:
        return ""
    spans = result.overlap.spans
    compute = sum(span.end - span.start for span in spans if span.node.resource is Resource.COMPUTE)
    number = sum(span.node.op is Op.GATHER for span in spans)
    return (
        f"\n    {number} gathers {found.exchange:.2f} s, {found.exchange / compute:.2f} of compute, "
        f"{found.hidden_fraction:.0%} hidden"
    )


def measure(rank: int, address: str, rounds: int) -> None:
    """Play the three engines in turns; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    text = torch.randint(256, (4 * MICROBATCHES, 129), generator=torch.Generator().manual_seed(rank))
    x, y = text[:, :-1], text[:, 1:]
    engines = {name: engine_of(mesh, at_once) for name, at_once in ROWS.items()}
    for name, engine in engines.items():
        with patch("overlap1f1b.plan.compiler.GATHERED", (ROWS[name] or math.inf,)), timed(engine):
            while engine.tuner.settling:
                engine.step(x, target=y)
            assert engine.plan is not None
    seconds: dict[str, list[float]] = {name: [] for name in ROWS}
    said = dict.fromkeys(ROWS, "")
    for _ in range(rounds):
        for name, engine in engines.items():
            with timed(engine):
                begin = time.perf_counter()
                said[name] += said_of(engine.step(x, target=y))
                seconds[name].append(time.perf_counter() - begin)
    for name in ROWS if rank == 0 else ():
        print(f"{name}: step {median(seconds[name]):.2f} s{said[name]}", flush=True)
    for engine in engines.values():
        engine.close()
    dist.destroy_process_group()


def timed(engine: Engine):  # type: ignore[no-untyped-def]
    """Return the context in which products wait."""
    return TimedCompute(SPEED).entered(engine.model)


def main() -> None:
    """Start two ranks on a wire of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=480, help="rate of the link, Mbit/s")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each engine")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options.rank, options.address, options.rounds)
        return
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    with Wire(ranks=2, rate=options.mbit * 1e6) as wire:
        words = [sys.executable, __file__, "--rounds", str(options.rounds), "--address", f"{wire.address(0)}:{port}"]
        ranks = [
            subprocess.Popen([*wire.prefix(rank), *words, "--rank", str(rank)], env=os.environ | wire.environment(rank))
            for rank in range(2)
        ]
        try:
            status = max(rank.wait(600) for rank in ranks)
        finally:
            for one in ranks:
                one.kill()
    sys.exit(status)


if __name__ == "__main__":
    main()
