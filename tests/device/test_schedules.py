"""Every schedule plays on a device, without a hang in any setting, and with the gradients of the serial order."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap1f1b.plan import Overlap, compile
from overlap1f1b.schedule import AUTO, SCHEDULES
from tests import models
from tests.device.model import Entry
from tests.device.standin import World, here
from tests.device.steps import COSTS, Layout, batch_of, engine_of, mesh_of, played, program_of, stuck
from tests.engines import make
from tests.ranks import over
from tests.tiers import wide

OVERLAPS: tuple[Overlap, ...] = ("serial", "pairs", 3)
TWO_PIPES = ("dualpipe",)  # sum over replicas, in another order than one process


def problems_of(name: str, layout: Layout, **options: Any) -> tuple[list[str], list[list[Entry]]]:
    """Hangs of a schedule on a layout, and wrong gradients; and what each rank wrote down in its last step.

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
    return problems, [log[begins[-1] :] for log, (_, begins) in zip(world.logs, found, strict=True)]


@cache
def _sequential(layout: Layout, microbatches: int, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Gradients of all stages in the order without a schedule, by rank along "ep"."""
    _, plain = played(program_of("sequential", layout.pp, microbatches), layout, ("serial",), **options)
    wanted: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.ep)]
    for number, ((gradients,), _) in enumerate(plain):
        wanted[number % layout.ep] |= gradients
    return wanted


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("combined_1f1b", Layout(2, 2), {}),
        ("combined_1f1b", Layout(1, 2), {"parts": 2}),
        *wide(*((name, Layout(2, 2), {}) for name in ("zb_v", "dualpipe", AUTO))),
        *wide(*((name, Layout(4, 1), {}) for name in SCHEDULES)),
        *wide(*(("combined_1f1b", Layout(2, 2), options) for options in ({"parts": 2}, {"recompute": "block"}))),
    ],
)
@over(1)
def test_every_schedule(rank: int, size: int, name: str, layout: Layout, options: dict[str, Any]) -> None:
    problems, _ = problems_of(name, layout, **options)
    assert not problems, problems


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


@pytest.mark.parametrize("dynamic", [False, *wide(True)])
@over(1)
def test_dtypes_that_nccl_lacks_pass_between_stages(rank: int, size: int, dynamic: bool) -> None:
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
        found = models.held(engine, own)
        engine.close()
        return found

    first, second = World(2).run(step)
    assert expected.keys() == first.keys() | second.keys()
    for name, gradient in expected.items():
        assert torch.allclose(gradient, (first | second)[name], rtol=1e-12), name


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


@pytest.mark.parametrize("name", ["zb_h1", *wide("dualpipe", "combined_1f1b")])
@over(1)
def test_receives_at_other_places_hang(rank: int, size: int, name: str) -> None:
    world = World(4)
    begins = world.run(_step_without_rendezvous, name)
    logs = [log[begin:] for log, begin in zip(world.logs, begins, strict=True)]
    settings = [setting for setting, _ in stuck(logs)]
    assert "lazy, a sync at every node, one queue" in settings, settings
    assert "eager, a sync at every node, one queue" in settings, settings
