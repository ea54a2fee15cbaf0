"""What a training program has beside its steps, on NCCL: FSDP2, exchanges of a model's own, norms and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from overlap1f1b.checkpoint import load_checkpoint, save_checkpoint
from overlap1f1b.plan import compile
from tests import models
from tests.all_to_all import any_sizes
from tests.cut.test_exchanges import build
from tests.device.steps import LAYERS, program_of
from tests.engines import make
from tests.nccl.joined import on_nccl
from tests.nccl.test_engine import batch_of
from tests.play.plain import MICROBATCHES, compare
from tests.ranks import Ranks
from tests.reduce.test_fsdp import COSTS, OVERLAPS, engine_over, own_loop, programs
from tests.tiers import wide

WAYS = ("functional", *wide("torch.distributed.nn", "a Function of its own", "a Function with a handle", "exchange"))


def _own_exchanges(rank: int, size: int, way: str) -> list[str]:
    with on_nccl(rank, size, ep=size) as (mesh, device), any_sizes():
        group = mesh.get_group("ep")
        return compare(way, lambda: build(group, way, "blocks").to(device), mesh, exchanges=2 * 2 * 2 * MICROBATCHES)


@pytest.mark.parametrize("way", WAYS)
def test_exchanges_of_a_model_s_own(ranks2: Ranks, way: str) -> None:
    """Hidden from the second step on, and equal to a plain loop."""
    assert ranks2.run(_own_exchanges, way) == [[], []]


def _fsdp2(rank: int, size: int, options: dict[str, Any]) -> list[str]:
    with models.default_dtype(torch.float64), on_nccl(rank, size, dp=size, ep=1) as (mesh, device):
        return _differences(mesh, device, rank, size, options)


def _differences(mesh: DeviceMesh, device: torch.device, rank: int, size: int, options: dict[str, Any]) -> list[str]:
    """Gradients that differ between orders of a program, or from FSDP2's own loop, which sums in other kernels."""
    data = [tensor.to(device) for tensor in models.batch(3, seed=rank)]

    def sharded() -> nn.Sequential:
        model = models.build().to(device)
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        return model

    expected, problems = own_loop(sharded(), (data[0], data[1]), 3, size), []
    for program in programs(3):
        model, serial = sharded(), {}
        with engine_over(model, program, mesh, **options) as engine:
            for overlap in OVERLAPS:
                model.zero_grad()
                engine.plan = compile(program, engine.shapes, COSTS, overlap)
                engine.step(data[0], target=data[1])
                found = models.gradients(model)
                serial = serial or found
                problems += [f"{program.name} {overlap}: {name}" for name in models.equal(found, serial)]
        for name, gradient in serial.items():
            if not torch.allclose(gradient, expected[name], rtol=1e-9, atol=1e-12):
                by = float((gradient - expected[name]).abs().max())
                problems.append(f"{program.name}: {name} differs from FSDP2's own loop by {by:.1e}")
    return problems


@pytest.mark.parametrize("options", [{}, *wide({"costs": None, "memory": "1TB"})])
def test_fsdp2(ranks2: Ranks, options: dict[str, Any]) -> None:
    """Parameters stay gathered for a step; or nodes gather them, of two blocks at a time."""
    assert ranks2.run(_fsdp2, options) == [[], []]


class Training:
    """A model of two stages, or of one with experts over two ranks, and its optimizer."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, **options: Any) -> None:
        self.pp, self.ep = mesh.shape
        self.program = program_of("combined_1f1b", self.pp)
        self.model = models.build(mesh.get_group("ep") if self.ep > 1 else None, layers=LAYERS[self.pp]).to(device)
        self.engine = make(self.model, self.program, mesh=mesh, costs=COSTS, timeout=30, **options)
        self.optimizer = torch.optim.AdamW(self.engine.parameters(), lr=0.02, foreach=False)
        self.batch = batch_of(self.program, mesh.get_local_rank("ep"), device)

    def train(self, steps: int) -> list[float]:
        """Return losses and norms of the whole model."""
        shown = []
        for _ in range(steps):
            result = self.engine.step(self.batch[0], target=self.batch[1])
            shown += [self.engine.mean_loss(result), float(self.engine.clip_gradients(0.5))]
            self.optimizer.step()
            self.optimizer.zero_grad()
        shown.append(self.engine.mean_loss(self.engine.evaluate(self.batch[0], target=self.batch[1])))
        return shown


def _trains(rank: int, size: int, pp: int, ep: int, folder: Path, options: dict[str, Any]) -> list[str]:
    with models.default_dtype(torch.float64), on_nccl(rank, size, pp=pp, ep=ep) as (mesh, device):
        first, problems = Training(mesh, device, **options), []
        shown = first.train(2)
        save_checkpoint(first.engine, folder, 2, first.optimizer, background=True)
        unbroken = first.train(2)
        again = Training(mesh, device, **options)
        load_checkpoint(again.engine, folder, again.optimizer)
        if again.train(2) != unbroken:
            problems.append("a resumed run differs")
        expected = plain(first, device)
        if shown != pytest.approx(expected, rel=1e-9):
            problems.append(f"{shown}, in one process {expected}")
        first.engine.close()
        again.engine.close()
        return problems


def plain(training: Training, device: torch.device) -> list[float]:
    """What :meth:`Training.train` shows, of one process with the data of all ranks along "ep"."""
    model = models.build(layers=LAYERS[training.pp]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    ranks, count, shown = training.ep, training.program.microbatches, []
    every = [batch_of(training.program, number, device) for number in range(ranks)]
    for _ in range(2):
        losses = [loss for x, y in every for loss in models.plain_gradients(model, x, y, count, 1 / ranks)[0]]
        shown += [float(torch.stack(losses).mean()), float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        parts = [zip(x.chunk(count), y.chunk(count), strict=True) for x, y in every]
        losses = [models.loss_fn(model(x), y) for pairs in parts for x, y in pairs]
    return [*shown, float(torch.stack(losses).mean())]


@pytest.mark.parametrize(("pp", "ep", "options"), [(2, 1, {}), *wide((1, 2, {}), (1, 2, {"capacity": 8.0}))])
def test_norms_and_checkpoints(ranks2: Ranks, tmp_path: Path, pp: int, ep: int, options: dict[str, Any]) -> None:
    assert ranks2.run(_trains, pp, ep, tmp_path, options) == [[], []]
