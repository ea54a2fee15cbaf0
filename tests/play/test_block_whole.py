"""Blocks that are one call of autograd: gradients are those of a plain loop to the bit, whatever a block does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import COSTS, make
from tests.play.test_recompute_checkpoints import plainly, selective
from tests.ranks import over
from tests.tiers import wide

SIZE, MICROBATCHES, STEPS = 8, 4, 3
"""Rows of a microbatch and features: where both agree, no shape tells an activation and a weight apart."""


class Again(torch.autograd.Function):
    """Runs a function a second time in its own backward, and walks that graph, as kernels of others do."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.function, ctx.weights = function, len(weights)
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad, *[None] * ctx.weights


class Odd(nn.Module):
    """Two linear layers, used in a way that has a name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        if how == "computed weight":
            self.first = weight_norm(self.first)
        if how == "frozen":
            self.first.requires_grad_(requires_grad=False)
        if how == "hooks":
            self.first.register_full_backward_hook(lambda module, into, out: (2 * into[0],))
            self.second.weight.register_hook(lambda grad: 3 * grad)

    def forward(self, x: Tensor) -> Tensor:
        return x + getattr(self, self.how.replace(" ", "_"), self.part)(x)

    def part(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y

    def checkpoint(self, x: Tensor) -> Tensor:
        y: Tensor = plainly(self.part, x)
        return y

    def policy(self, x: Tensor) -> Tensor:
        y: Tensor = selective(self.part, x)
        return y

    def half_a_checkpoint(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(checkpoint(lambda x: self.first(x).tanh().sin(), x, use_reentrant=False))
        return y

    def again(self, x: Tensor) -> Tensor:
        y: Tensor = Again.apply(self.part, x, self.first.weight, self.second.weight)  # type: ignore[no-untyped-call]
        return y

    def layer_twice(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(self.part(x))
        return y

    def weight_twice(self, x: Tensor) -> Tensor:
        return self.part(x) + F.linear(x, self.first.weight) * self.second.weight.sum()

    def in_place(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).mul_(2).add_(x))
        return y

    def hooks_of_saved(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
            return self.part(x)


HOWS = (
    "checkpoint",
    "weight twice",
    "again",
    *("policy", "half a checkpoint", "layer twice", "in place", "hooks of saved", "computed weight", "frozen", "hooks"),
)


def gradients(blocks: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Those of a plain loop."""
    for inputs, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        (F.mse_loss(blocks(inputs), target) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]
    return models.gradients(blocks)


def build(how: str, blocks: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Odd("part"), *(Odd(how) for _ in range(blocks - 1)))


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
