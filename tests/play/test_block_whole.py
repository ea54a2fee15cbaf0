"""Whatever a block does, and however it changes between steps: gradients are those of a plain loop to the bit."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.parametrizations import weight_norm

from overlap1f1b.moe import GroupedExperts, Router, RouterConfig
from overlap1f1b.plan import Recompute
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.loopback import LoopbackExchange
from tests import models
from tests.blocks import HOWS, Odd
from tests.engines import COSTS, make
from tests.ranks import over
from tests.tiers import wide

SIZE, MICROBATCHES, STEPS = 8, 4, 3
"""Rows of a microbatch and features: where both agree, no shape tells an activation and a weight apart."""


def gradients(blocks: nn.Sequential, x: Tensor, y: Tensor, *, autocast: bool = False) -> dict[str, Tensor]:
    """Those of a plain loop; autocast casts a weight for each of its uses."""
    for inputs, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            loss = F.mse_loss(blocks(inputs), target) / MICROBATCHES
        loss.backward()  # type: ignore[no-untyped-call]
    return models.gradients(blocks)


def build(how: str, blocks: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Odd("part", SIZE), *(Odd(how, SIZE) for _ in range(blocks - 1)))


@pytest.mark.parametrize(
    ("schedule", "hows"),
    [("zb_h1", HOWS[:3]), *wide(("1f1b", HOWS), ("zb_h1", HOWS), ("zb_v", HOWS), ("dualpipev", HOWS))],
)
@over(2)
def test_gradients_of_blocks_that_are_one_call(rank: int, size: int, schedule: str, hows: tuple[str, ...]) -> None:
    mesh, problems = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",)), list[str]()
    x, y = torch.randn(2, MICROBATCHES * SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    program = build_schedule(schedule, ranks=size, microbatches=MICROBATCHES)  # type: ignore[arg-type]
    for how in hows:
        model, plain = build(how, 8), gradients(build(how, 8), x, y)
        engine = make(model, program, mesh=mesh, loss_fn=F.mse_loss, costs=COSTS, timeout=30, verify=False)
        for step in range(STEPS):  # in the first one each block is played by its nodes
            model.zero_grad()
            engine.step(x, target=y)
            found = models.held(engine, model)
            unequal = models.equal(found, {name: plain[name] for name in found})
            problems += [f"{how}, step {step}: {name}" for name in unequal]
        engine.close()
    assert not problems, problems


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("how", ["part", "tied", *HOWS])
def test_gradients_under_autocast(how: str, recompute: Recompute) -> None:
    """Each use of a weight that is used several times has a cast of its own, in the first step and behind it."""

    def made() -> nn.Sequential:
        model = build("part" if how == "tied" else how, 4)
        if how == "tied":
            model[2].first.weight = model[1].first.weight
        return model

    x, y = torch.randn(2, MICROBATCHES * SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    plain = {casts: gradients(made(), x, y, autocast=casts) for casts in (True, False)}
    program = build_schedule("sequential", microbatches=MICROBATCHES)
    for casts in ((True,) * STEPS, (False, False, True, True, False)):
        model = made()
        engine = make(model, program, loss_fn=F.mse_loss, costs=COSTS, recompute=recompute, verify=False)
        for step, now in enumerate(casts):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=now):
                engine.step(x, target=y)
            assert not models.equal(models.held(engine, model), plain[now]), (casts, step)


def forward_of_its_own(block: Odd) -> None:
    plain = block.first.forward
    block.first.forward = lambda x: 2 * plain(x)  # type: ignore[method-assign]


def another_class(block: Odd) -> None:
    block.first.__class__ = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})


def another_layer(block: Odd) -> None:
    block.first = nn.Sequential(block.first, nn.Tanh(), block.second)  # type: ignore[assignment]


def another_weight(block: Odd) -> None:
    block.first.weight = nn.Parameter(block.second.weight.detach().sin())


def computed_weight(block: Odd) -> None:
    weight_norm(block.first)


def hooks(block: Odd) -> None:
    block.first.register_forward_hook(lambda module, given, out: 2 * out)
    block.second.register_full_backward_hook(lambda module, into, out: (2 * into[0],))


def frozen(block: Odd) -> None:
    block.first.requires_grad_(requires_grad=False)


def another_way(block: Odd) -> None:
    block.how = "weight twice"


@pytest.mark.parametrize("schedule", ["sequential", "zb_h1"])
@pytest.mark.parametrize(
    "change",
    [forward_of_its_own, another_class, another_layer, another_weight, computed_weight, hooks, frozen, another_way],
)
def test_block_that_changes_between_steps(change: Callable[[Odd], None], schedule: str) -> None:
    """What users do to a model that trains: gradients follow from the next step on."""
    x, y = torch.randn(2, MICROBATCHES * SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    model, other = build("part", 4), build("part", 4)
    engine = make(model, build_schedule(schedule, microbatches=MICROBATCHES), loss_fn=F.mse_loss, costs=COSTS)
    for step in range(2 * STEPS):
        if step == STEPS:
            change(model[1])  # type: ignore[arg-type]
            change(other[1])  # type: ignore[arg-type]
        model.zero_grad()
        other.zero_grad()
        engine.step(x, target=y)
        assert not models.equal(models.gradients(model), gradients(other, x, y)), step


class Mixed(nn.Module):
    """Experts, whose products may be the user's own."""

    def __init__(self, kind: type[GroupedExperts]) -> None:
        super().__init__()
        self.router = Router(SIZE, RouterConfig(experts=4, top_k=2))
        self.experts = kind(4, SIZE, SIZE)
        self.experts.reset_parameters(torch.Generator().manual_seed(1), std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x, *self.router(x))
        return x + y


class Doubled(GroupedExperts):
    def product(self, rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
        return 2 * GroupedExperts.product(self, rows, weight, counts)


@pytest.mark.parametrize("recompute", ["none", "experts", "block"])
@pytest.mark.parametrize("later", [False, True])
def test_products_of_a_users_own(recompute: Recompute, *, later: bool) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(Odd("part", SIZE), *(Mixed(GroupedExperts if later else Doubled) for _ in range(2)))

    x, y = torch.randn(2, MICROBATCHES * SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    model, other = made(), made()
    program = build_schedule("zb_h1", microbatches=MICROBATCHES)
    exchange = LoopbackExchange(torch.device("cpu"))
    engine = make(model, program, loss_fn=F.mse_loss, costs=COSTS, overlap=3, recompute=recompute, exchange=exchange)
    for step in range(STEPS):
        if later and step == 1:
            for blocks in (model, other):
                blocks[1].experts.product = Doubled.product.__get__(blocks[1].experts)
        model.zero_grad()
        other.zero_grad()
        engine.step(x, target=y)
        assert not models.equal(models.gradients(model), gradients(other, x, y)), step
