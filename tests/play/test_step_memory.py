"""Nothing is kept longer than a step needs it."""

import gc
import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import COSTS, make
from tests.ranks import Ranks, over
from tests.tiers import wide

STEPS = 20


def _held() -> tuple[int, int, int, int]:
    """Tensors and their bytes, threads, and open files of this process."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    size = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    return len(tensors), size, threading.active_count(), len(os.listdir("/proc/self/fd"))


def _steps(rank: int, size: int, name: str, pp: int, microbatches: int, layers: int) -> list[tuple[int, int, int, int]]:
    mesh = init_device_mesh("cpu", (pp, size // pp), mesh_dim_names=("pp", "ep"))
    program = build_schedule(name, ranks=pp, microbatches=microbatches)
    blocks = list(models.build(mesh.get_group("ep"), layers=layers))
    engine = make(blocks, program, mesh=mesh, costs=COSTS, timeout=30)
    inputs, target = models.batch(microbatches)
    found = []
    for step in range(STEPS):
        engine.step(inputs, target=target)
        if step % 10 == 9:
            engine.evaluate(inputs, target=target)
        if step in (9, STEPS - 1):
            found.append(min(_held() for _ in range(5) if not time.sleep(0.05)))  # lanes' threads let go a little later
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files where Linux lists them")
@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "layers"), [("dualpipev", 2, 4, 1), *wide(("combined_1f1b", 1, 2, 2))]
)
def test_memory_is_flat_over_many_steps(ranks2: Ranks, name: str, pp: int, microbatches: int, layers: int) -> None:
    for early, late in ranks2.run(_steps, name, pp, microbatches, layers, timeout=120):
        assert late[:3] == early[:3]
        assert late[3] <= early[3]


class Watched(nn.Module):
    """Keeps weak references to what it returned."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.returned = inner, []

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.returned.append(weakref.ref(y))
        return y


class LooksBack(nn.Module):
    """Counts at each forward how many outputs of another block are alive."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.watched, self.alive = [watched], []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(sum(output() is not None for output in self.watched[0].returned))
        return x + self.weight


def test_an_output_lives_no_longer_than_it_is_passed_on() -> None:
    """A block's output is held by its graph alone: the tensor goes when the next block, which is given it, has run."""
    watched = Watched(nn.Linear(4, 4))
    counter = LooksBack(watched)
    program = build_schedule("afab", microbatches=5)
    engine = make([watched, counter], program, loss_fn=lambda y, _: y.sum(), costs=COSTS)
    batch: Any = torch.randn(10, 4)
    for alive in (0, 1):  # by its nodes the next block is given another tensor of the same values
        engine.step(batch, target=batch)
        assert counter.alive[-5:] == [alive] * 5


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files where Linux lists them")
@over(2)
def test_an_engine_takes_its_groups_and_threads_with_it(rank: int, size: int) -> None:
    """Threads and open files after each of several engines."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "ep"))
    found = []
    for _ in range(3):
        blocks = list(models.build(mesh.get_group("ep"), layers=2))
        program = build_schedule("1f1b", ranks=2, microbatches=2)
        engine = make(blocks, program, mesh=mesh, costs=COSTS, timeout=30)
        engine.step(*models.batch(2))
        mesh.get_group("pp").barrier().wait()
        del engine
        gc.collect()
        time.sleep(0.1)  # threads on their way out, with their files
        found.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        mesh.get_group("pp").barrier().wait()
    threads, files = zip(*found, strict=True)
    assert threads[-1] <= threads[0], found
    assert files[-1] <= files[0], found
