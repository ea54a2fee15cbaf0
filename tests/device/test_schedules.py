"""Every schedule plays on a device, without a hang in any setting, and with the gradients of the serial order."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap1f1b.plan import Overlap, compile
from overlap1f1b.schedule import AUTO, SCHEDULES
from tests import models
from tests.device.standin import World, here
from tests.device.steps import COSTS, Layout, batch_of, engine_of, gradients_of, mesh_of, played, program_of, stuck
from tests.engines import make
from tests.ranks import Ranks
from tests.tiers import wide

OVERLAPS: tuple[Overlap, ...] = ("serial", "pairs", 3)
TWO_PIPES = ("dualpipe",)  # sum over replicas, in another order than one process


def _plays(rank: int, size: int, name: str, pp: int, ep: int, options: dict[str, Any] | None = None) -> list[str]:
    return problems_of(name, Layout(pp, ep), **(options or {}))[0]


def problems_of(name: str, layout: Layout, **options: Any) -> tuple[list[str], World]:
    """Hangs of a schedule on a layout, and wrong gradients; and the world in which it was played.

    On four stages schedules take turns with the overlaps.
    """
    (pp, ep), program = layout, program_of(name, layout.pp)
    wanted = _sequential(layout, program.microbatches, **options)
    turn = 1 + [*SCHEDULES, AUTO].index(name) % 2
    overlaps = OVERLAPS if pp < 4 else (OVERLAPS[0], OVERLAPS[turn])
    world, found = played(program, layout, overlaps, **options)
    problems = [f"{setting}: {waits}" for setting, waits in stuck(world.logs)]
    for number, ((serial, *others), _) in enumerate(found):
        for overlap, other in zip(overlaps[1:], others, strict=True):
            problems += [f"rank {number}, {overlap}: {at} differs from serial" for at in models.equal(serial, other)]
        for label, gradient in serial.items():
            like = wanted[number % ep][label]
            close = torch.allclose(gradient, like, rtol=1e-9, atol=1e-15)
            if not (close if name in TWO_PIPES else torch.equal(gradient, like)):
                problems.append(f"rank {number}: {label} differs from sequential")
    return problems, world


@cache
def _sequential(layout: Layout, microbatches: int, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Gradients of all stages in the order without a schedule, by rank along "ep"."""
    _, plain = played(program_of("sequential", layout.pp, microbatches), layout, ("serial",), **options)
    wanted: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.ep)]
    for number, ((gradients,), _) in enumerate(plain):
        wanted[number % layout.ep] |= gradients
    return wanted


@pytest.mark.wide
@pytest.mark.parametrize("name", SCHEDULES)
def test_four_stages(alone: Ranks, name: str) -> None:
    assert alone.run(_plays, name, 4, 1) == [[]]


@pytest.mark.parametrize("name", ["combined_1f1b", *wide("zb_v", "dualpipe", AUTO)])
def test_two_stages_and_two_expert_ranks(alone: Ranks, name: str) -> None:
    assert alone.run(_plays, name, 2, 2) == [[]]


@pytest.mark.parametrize(("pp", "options"), [(1, {"parts": 2}), *wide((2, {"parts": 2}), (2, {"recompute": "block"}))])
def test_parts_and_activations_that_are_computed_again(alone: Ranks, pp: int, options: dict[str, Any]) -> None:
    assert alone.run(_plays, "combined_1f1b", pp, 2, options) == [[]]


class _Several(nn.Module):
    """Passes on numbers that NCCL has no dtype for; the gradient of one is complex, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.linear(x)
        return h, torch.complex(h, h.square()), (h > 0).to(torch.int16)


class _Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, h: Tensor, z: Tensor, sign: Tensor) -> Tensor:
        return self.linear(h * sign + (z * z).imag)


def _unlike(rank: int, size: int, dynamic: bool) -> list[dict[str, Tensor]]:
    torch.manual_seed(3)
    model, x, y = nn.Sequential(_Several(), _Joined()), torch.randn(3, 4).double(), torch.randn(3, 4).double()
    loss_fn = nn.functional.mse_loss
    loss_fn(model[1](*model[0](x)), y).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    state = model.state_dict()

    def step(rank: int, size: int) -> dict[str, Tensor]:
        own = nn.Sequential(_Several(), _Joined())
        own.load_state_dict(state)
        program, mesh = program_of("1f1b", 2, 3), mesh_of(Layout(2, 1))
        options = {"costs": COSTS, "dynamic_shapes": dynamic, "timeout": 30}
        engine = make(own, program, mesh=mesh, loss_fn=loss_fn, **options)
        for _ in range(2):  # the first sends headers, with dynamic shapes both do
            own.zero_grad()
            engine.step(x, target=y)
        found = gradients_of(engine, own)
        engine.close()
        return found

    found = World(2).run(step)
    return [expected, found[0] | found[1]]


@pytest.mark.parametrize("dynamic", [False, *wide(True)])
def test_dtypes_that_nccl_lacks_pass_between_stages(alone: Ranks, dynamic: bool) -> None:
    ((expected, found),) = alone.run(_unlike, dynamic)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.allclose(gradient, found[name], rtol=1e-12), name


def _step_without_rendezvous(rank: int, size: int, name: str) -> int:
    """Make two steps, the second with receives where a CPU's plan has them; return where it begins."""
    layout, program = Layout(size, 1), program_of(name, size)
    engine, _ = engine_of(program, layout)
    inputs, target = batch_of(program, layout, rank)
    engine.step(inputs, target=target)
    engine.tuner.planner = replace(engine.tuner.planner, rendezvous=False)
    engine.plan = compile(program, engine.shapes, COSTS, 3)
    begin = len(here().log)
    engine.step(inputs, target=target)
    return begin


def _hangs_without_rendezvous(rank: int, size: int, name: str) -> list[str]:
    """Settings in which a step hangs whose receives stand where a CPU's plan has them."""
    world = World(4)
    begins = world.run(_step_without_rendezvous, name)
    logs = [log[begin:] for log, begin in zip(world.logs, begins, strict=True)]
    return [setting for setting, _ in stuck(logs)]


@pytest.mark.parametrize("name", ["zb_h1", *wide("dualpipe", "combined_1f1b")])
def test_receives_at_other_places_hang(alone: Ranks, name: str) -> None:
    (settings,) = alone.run(_hangs_without_rendezvous, name)
    assert "lazy, a sync at every node, one queue" in settings
    assert "eager, a sync at every node, one queue" in settings
