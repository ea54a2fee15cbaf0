"""A long run: does anything grow? Two ranks, with evaluations, checkpoints, other numbers of microbatches and sizes.

    python -m tests.soak --steps 5000

Of each tenth of the run: memory of a rank, its open files and threads, and the median step.
"""

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.checkpoint import save_checkpoint
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import make
from tests.ranks import run

WINDOWS = 10
NUMBERS, SEQUENCES = (2, 3, 4), (5, 7, 9)
"""Microbatches, and lengths of sequences."""


class Window(NamedTuple):
    """What a rank held at the end of a part of its run, and the median step of those with the most microbatches."""

    megabytes: float
    files: int
    threads: int
    ms: float

    def __str__(self) -> str:
        return f"{self.megabytes:8.1f} MB  {self.files:4} files  {self.threads:4} threads  {self.ms:7.2f} ms"


def soaked(rank: int, size: int, steps: int, folder: str) -> list[Window]:
    """Train, and return what there was at the end of each tenth."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    model = models.build(mesh.get_group("ep"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    windows, every = [], max(1, steps // WINDOWS)
    program, options = (
        build_schedule("combined_1f1b", microbatches=NUMBERS[-1]),
        {"tries": 1, "drift": True, "timeout": 120},
    )
    with make(model, program, mesh=mesh, **options) as engine:
        seconds: list[float] = []
        for number in range(1, steps + 1):
            count, sequence = NUMBERS[number % len(NUMBERS)], SEQUENCES[number // 3 % len(SEQUENCES)]
            batch = models.batch(count, sequence=sequence, seed=number * size + rank)
            start = time.perf_counter()
            engine.step(*batch, microbatches=count)
            if count == NUMBERS[-1]:
                seconds.append(time.perf_counter() - start)
            engine.clip_gradients(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if number % 10 == 0:
                engine.evaluate(*batch)
            if number % max(5, every // 4) == 0:
                save_checkpoint(engine, Path(folder), number, optimizer, keep=1, background=True)
            if number % every == 0:
                engine.wait_for_checkpoint()
                gc.collect()
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                found = [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]
                windows.append(Window(resident / 1e6, *found, 1e3 * median(seconds)))
                seconds = []
    return windows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as kept:
        for at, windows in enumerate(run(soaked, 2, chosen.steps, kept, timeout=3600)):
            print(f"rank {at}", *windows, sep="\n")
