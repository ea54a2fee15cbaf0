"""Biases of routers are the same on all ranks that hold them, and ranks that differ in what they share are told so."""

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import build_schedule
from overlap1f1b.engine import Engine
from overlap1f1b.moe import MoE, Router, RouterConfig
from tests import engines
from tests.ranks import over
from tests.tiers import wide

H, MICROBATCHES, STEPS = 12, 4, 3
SAID = (
    r"^the values of buffer {name} of block 0 \({block}\) of stage 0 differ between rank {one} and rank "
    r"{other}; allowed: the same on all ranks, as by the same optimizer, and update_correction_bias over all ranks "
)


class Layer(nn.Module):
    """Biases have 8 experts to choose from, and decide soon."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.moe = MoE(H, 8, RouterConfig(8, 2, score="sigmoid"), group=group)
        self.moe.experts.reset_parameters(torch.Generator().manual_seed(1), std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


class Normed(nn.Module):
    """Running statistics of the rows that a rank has seen, and what else may differ."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(H), nn.Linear(H, H)
        self.register_buffer("mean", torch.zeros(H))
        self.register_buffer("bias", torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.get_buffer("mean").add_(x.mean((0, 1)))
        return self.linear(self.norm(x.flatten(0, -2)).view_as(x))


def build(group: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(group) for _ in range(4)))


def rows(shard: int, step: int) -> Tensor:
    """Skewed, so that loads are uneven, and otherwise on each shard."""
    return torch.randn(2 * MICROBATCHES, 5, H, generator=torch.Generator().manual_seed(10 * step + shard)) + 0.3 * shard


def routers(model: nn.Module) -> Iterator[Router]:
    return (module for module in model.modules() if isinstance(module, Router))


def make(model: nn.Module, mesh: Any, schedule: str = "combined_1f1b", **options: Any) -> Engine:
    pp = mesh.size(mesh.mesh_dim_names.index("pp")) if "pp" in mesh.mesh_dim_names else 1
    program = build_schedule(schedule, ranks=pp, microbatches=MICROBATCHES)
    given = {"mesh": mesh, "loss_fn": nn.functional.mse_loss, "costs": engines.COSTS, "timeout": 60}
    return engines.make(model, program, **given, **options)


LAYOUTS = [
    ((1, 1, 2, 1), "combined_1f1b", {}),
    ((2, 1, 1, 1), "dualpipe", {}),
    ((1, 2, 2, 1), "combined_1f1b", {}),
    *wide(
        ((2, 1, 2, 1), "combined_1f1b", {}),
        ((1, 2, 2, 1), "combined_1f1b", {"reduce": False}),
        ((2, 1, 2, 1), "dualpipe", {"reduce": False}),
        ((1, 1, 2, 2), "combined_1f1b", {}),
    ),
]


@pytest.mark.parametrize(("sizes", "schedule", "options"), LAYOUTS)
@over(lambda sizes, schedule, options: torch.Size(sizes).numel(), timeout=120)
def test_biases_follow_the_load_of_all_ranks(
    rank: int, size: int, sizes: tuple[int, ...], schedule: str, options: dict[str, Any]
) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "ep", "tp"))
    dp, ep, model, plain = mesh.get_local_rank("dp"), mesh.get_local_rank("ep"), build(mesh.get_group("ep")), build()
    engine = make(model, mesh, schedule, **options)
    for step in range(STEPS):
        x = rows(sizes[2] * dp + ep, step)
        engine.step(x, target=x)
        for shard in range(sizes[1] * sizes[2]):
            plain(rows(shard, step))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for router in routers(model):  # of all stages, though this rank has counted for its own alone
                router.update_correction_bias(0.05)
            assert not heard
            for router in routers(plain):
                router.update_correction_bias(0.05)
            assert "by the choices of this rank alone, outside an engine; allowed: group=" in str(heard[0].message)
    held = {module for stage in engine.stages.values() for block in stage.blocks for module in block.modules()}
    for one, other in zip(routers(model), routers(plain), strict=True):
        assert other.correction_bias.any()
        assert torch.equal(one.correction_bias, other.correction_bias if one in held else torch.zeros(8))
    engine.close()


@over(2)
def test_a_closed_engine_adds_nothing_up(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    model = build(mesh.get_group("ep"))
    engine = make(model, mesh)
    engine.close()
    with pytest.raises(RuntimeError, match=r"^update_correction_bias after its engine was closed; allowed: group="):
        next(routers(model)).update_correction_bias(0.1)
    with make(model, mesh):  # another takes its place
        next(routers(model)).update_correction_bias(0.1)


@over(4)
def test_ranks_that_route_differently_are_told(rank: int, size: int) -> None:
    """The load of "ep" in dp × ep is another on each "dp"."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = build(mesh.get_group("ep"))
    engine = make(model, mesh)
    engine.step(rows(rank, 0), target=rows(rank, 0))
    for router in routers(model):
        router.update_correction_bias(0.05, mesh.get_group("ep"))
    with pytest.raises(ValueError, match="allowed") as raised:
        engine.step(rows(rank, 1), target=rows(rank, 1))
    ep = mesh.get_local_rank("ep")
    name = r"moe\.router\.correction_bias"
    assert re.match(
        SAID.format(name=name, block="Layer", one=f"dp 0, ep {ep}", other=f"dp 1, ep {ep}"), str(raised.value)
    )


def play(engine: Engine, rank: int, steps: int) -> None:
    for step in range(steps):
        engine.step(rows(rank, step), target=rows(rank, step))


@over(2)
def test_only_what_ranks_share_is_compared(rank: int, size: int) -> None:
    """Statistics may differ for ever; a bias that is permuted, or a weight, is told by the next comparison."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(Normed())
    for spoiled in ("bias", "linear.weight"):
        model[0].bias.copy_(torch.arange(H))  # type: ignore[operator]
        engine = make(model, mesh)
        play(engine, rank, 5)
        assert not torch.equal(model[0].mean, torch.zeros(H))
        with torch.no_grad():
            tensor = model[0].get_buffer("bias") if spoiled == "bias" else model[0].get_parameter(spoiled)
            tensor.copy_(tensor.flip(0) if spoiled == "bias" and rank else tensor + rank)
        with pytest.raises(ValueError, match="allowed") as raised:
            play(engine, rank, 5)
        assert engine.tuner.steps == 8  # the next comparison was before the ninth
        assert f"{spoiled} of block 0 (Normed) of stage 0 differ" in str(raised.value)
