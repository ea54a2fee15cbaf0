"""Every schedule on NCCL: gradients of every overlap are those of the serial order, and close to one plain process."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.plan import Overlap, compile
from overlap1f1b.schedule import AUTO, SCHEDULES, Program
from tests import models
from tests.device.steps import COSTS, LAYERS, program_of
from tests.engines import make
from tests.nccl.joined import on_nccl
from tests.ranks import RankError, Ranks, run
from tests.tiers import first, wide

OVERLAPS: tuple[Overlap, ...] = ("serial", "pairs", 3)
ROWS, SEQUENCE = 2, 7


def _plays(rank: int, size: int, name: str, pp: int, ep: int, options: dict[str, Any]) -> list[str]:
    with models.default_dtype(torch.float64), on_nccl(rank, size, pp=pp, ep=ep) as (mesh, device):
        return problems_of(program_of(name, pp), mesh, device, options)


def problems_of(program: Program, mesh: DeviceMesh, device: torch.device, options: dict[str, Any]) -> list[str]:
    """Gradients that differ."""
    pp, ep = mesh.shape
    number = mesh.get_local_rank("ep")
    model = models.build(mesh.get_group("ep") if ep > 1 else None, layers=LAYERS[pp]).to(device)
    engine = make(model, program, mesh=mesh, overlap="serial", costs=COSTS, timeout=30, **options)
    inputs, target = batch_of(program, number, device)
    serial: dict[str, Tensor] = {}
    problems: list[str] = []
    for overlap in OVERLAPS:
        if not program.search_seconds:
            engine.plan = compile(program, engine.shapes, COSTS, overlap)
        model.zero_grad()
        engine.step(inputs, target=target)
        found = models.held(engine, model)
        serial = serial or found
        problems += [f"{overlap}: {at} differs from serial" for at in models.equal(serial, found)]
    engine.close()
    expected = plain(program, pp, ep, device)
    for label, gradient in serial.items():
        wanted = expected[label]
        if len(wanted) != len(gradient):  # this rank's experts
            wanted = wanted.chunk(ep)[number]
        if not torch.allclose(gradient, wanted, rtol=1e-9, atol=1e-12):
            problems.append(f"{label} differs from one process by {float((gradient - wanted).abs().max()):.1e}")
    return problems


def batch_of(program: Program, number: int, device: torch.device) -> Sequence[Tensor]:
    """The batch of a rank along "ep"."""
    drawn = models.batch(program.microbatches, rows=ROWS, sequence=SEQUENCE, seed=number)
    return [tensor.to(device) for tensor in drawn]


def plain(program: Program, pp: int, ep: int, device: torch.device) -> dict[str, Tensor]:
    """Gradients of one process, of the mean over the data of all ranks along "ep"."""
    model = models.build(layers=LAYERS[pp]).to(device)
    for number in range(ep):
        inputs, target = batch_of(program, number, device)
        models.plain_gradients(model, inputs, target, program.microbatches, 1 / ep)
    return models.gradients(model)


@pytest.mark.parametrize("name", first(SCHEDULES, "sequential"))
def test_two_stages(ranks2: Ranks, name: str) -> None:
    assert ranks2.run(_plays, name, 2, 1, {}) == [[]] * 2


@pytest.mark.parametrize("options", [{}, *wide({"parts": 2}, {"recompute": "block"}, {"recompute": "experts"})])
def test_two_expert_ranks(ranks2: Ranks, options: dict[str, Any]) -> None:
    assert ranks2.run(_plays, "combined_1f1b", 1, 2, options) == [[]] * 2


@pytest.mark.parametrize("name", ["combined_1f1b", *wide("zb_v", "dualpipe", AUTO)])
def test_two_stages_and_two_expert_ranks(ranks4: Ranks, name: str) -> None:
    assert ranks4.run(_plays, name, 2, 2, {}, timeout=120) == [[]] * 4


class _Fails(nn.Module):
    """Passes on what it gets, and raises in the given call."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        self.call -= 1
        if self.call == 0:
            raise ArithmeticError("planted")
        return x


def _fails(rank: int, size: int, pp: int, ep: int, failing: int) -> None:
    with on_nccl(rank, size, pp=pp, ep=ep) as (mesh, device):
        program = program_of("combined_1f1b", pp)
        model = models.build(mesh.get_group("ep") if ep > 1 else None, layers=LAYERS[pp])
        at = 0 if mesh.get_local_rank("pp") == 0 else len(model) - 1
        model[at] = nn.Sequential(model[at], _Fails(2 * program.microbatches if rank == failing else 0))
        engine = make(model.to(device), program, mesh=mesh, costs=COSTS, timeout=20)
        inputs, target = batch_of(program, mesh.get_local_rank("ep"), device)
        for _ in range(3):
            engine.step(inputs, target=target)


@pytest.mark.parametrize(("pp", "ep", "failing"), [(2, 1, 0), (2, 1, 1), (1, 2, 1)])
def test_a_failure_ends_the_other_rank(pp: int, ep: int, failing: int) -> None:
    """With pp 2 the other rank waits in CUDA, for the sizes of its experts, when the first one fails."""
    with pytest.raises(RankError) as error:
        run(_fails, 2, pp, ep, failing, grace=25)
    own, others = error.value.failures[failing], error.value.failures[1 - failing]
    assert "ArithmeticError: planted" in own
    assert "LostRankError" not in own
    assert "LostRankError" in others
    assert "ArithmeticError: planted" in others


def _dies(rank: int, size: int) -> None:
    with on_nccl(rank, size, pp=1, ep=2) as (mesh, device):
        program = program_of("combined_1f1b", 1)
        model = models.build(mesh.get_group("ep"), layers=1).to(device)
        engine = make(model, program, mesh=mesh, costs=COSTS, timeout=10)
        inputs, target = batch_of(program, rank, device)
        engine.step(inputs, target=target)
        if rank:
            os._exit(7)
        engine.step(inputs, target=target)


def test_a_rank_that_dies_ends_the_other() -> None:
    with pytest.raises(RankError) as error:
        run(_dies, 2, grace=25)
    assert "LostRankError" in error.value.failures[0]
