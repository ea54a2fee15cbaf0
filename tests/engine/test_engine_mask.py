"""Padding: with a mask a step is that of a model that is run on the real tokens alone, in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import build_schedule
from overlap1f1b.moe import MoE, Router, RouterConfig, set_auxiliary_scale
from tests import engines, models
from tests.ranks import over
from tests.tiers import wide

H, EXPERTS, MICROBATCHES, LENGTH, PAD = 12, 8, 4, 6, 0
CONFIG = RouterConfig(EXPERTS, 2, aux_coefficient=0.3, z_coefficient=0.1)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"parts": 2},
    {"capacity": 4.0},
    {"recompute": "block"},
    {"recompute": "attention", "parts": 2},
    {"recompute": "experts", "capacity": 4.0, "parts": 2},
]


class Entry(nn.Embedding):
    """Sends the mask of real tokens along; their values are not numbers in other places, as behind some attentions."""

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        real = text != PAD
        return super().forward(text).where(real.unsqueeze(-1), torch.nan), real


class Layer(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None, shared: int) -> None:
        super().__init__()
        self.moe = MoE(H, 8, CONFIG, group=group, shared_intermediate=shared)
        self.moe.experts.reset_parameters(torch.Generator().manual_seed(shared), std=0.5)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.moe(x, mask), mask


class Head(nn.Linear):
    """Logits, of real tokens alone: a product with what is no number would have no gradient."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x.masked_fill(~mask.unsqueeze(-1), 0))


def build(group: dist.ProcessGroup | None) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Entry(models.V, H), Layer(group, 0), Layer(group, 5), Head(H, models.V)]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over targets of real tokens, 0 for none."""
    every = nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=PAD, reduction="sum")
    return every / (target != PAD).sum().clamp(min=1)


def texts(shards: int) -> Tensor:
    """Rows that end at another place in each shard and microbatch: ``[shards, microbatches, 2, LENGTH]``.

    One shard has no token at all, and another none in a microbatch.
    """
    generator = torch.Generator().manual_seed(3)
    found = torch.randint(1, models.V, (shards, MICROBATCHES, 2, LENGTH), generator=generator)
    ends = torch.randint(1, LENGTH + 1, (shards, MICROBATCHES, 2, 1), generator=generator)
    ends[0, 1] = 0
    ends[shards - 1, 2 if shards == 1 else slice(None)] = 0
    return found.masked_fill(torch.arange(LENGTH) >= ends, PAD)


def unpadded(every: Tensor) -> tuple[list[nn.Module], list[list[Tensor]]]:
    """The model after a plain loop over the real tokens of all shards, and its losses."""
    blocks, shards = build(None), len(every)
    entry, first, second, head = blocks
    set_auxiliary_scale(nn.Sequential(*blocks), 1 / (MICROBATCHES * shards))
    losses = []
    for mine in every:
        losses.append([])
        for text in mine:
            real = text[text != PAD]
            x = nn.functional.embedding(real, entry.weight)  # type: ignore[arg-type]
            for layer in (first, second):
                x = x + layer.moe(x)
            loss = loss_fn(nn.functional.linear(x, head.weight, head.bias), real)  # type: ignore[arg-type]
            (loss / (MICROBATCHES * shards)).backward()
            losses[-1].append(loss.detach())
    return blocks, losses


@pytest.mark.parametrize(("pp", "dp", "ep"), [(1, 1, 2), (2, 1, 1), *wide((2, 1, 2), (1, 1, 4), (1, 2, 2), (2, 2, 1))])
@over(lambda pp, dp, ep: pp * dp * ep, timeout=240)
def test_a_mask_leaves_what_the_real_tokens_alone_leave(rank: int, size: int, pp: int, dp: int, ep: int) -> None:
    check(init_device_mesh("cpu", (pp, dp, ep), mesh_dim_names=("pp", "dp", "ep")))


def test_a_mask_on_one_rank() -> None:
    check(None)


def check(mesh: Any) -> None:
    """Compare with the plain loop; the order of sums is another one, hence the tolerance."""
    pp, dp, ep = (1, 1, 1) if mesh is None else mesh.shape
    shard = 0 if mesh is None else mesh.get_local_rank("dp") * ep + mesh.get_local_rank("ep")
    slot = 0 if mesh is None else mesh.get_local_rank("ep")
    with models.default_dtype(torch.float64):
        every = texts(dp * ep)
        plain, losses = unpadded(every)
        inputs = every[shard].flatten(0, 1)
        for options in SETTINGS:
            model = build(None if mesh is None else mesh.get_group("ep"))
            program = build_schedule("combined_1f1b", ranks=pp, microbatches=MICROBATCHES)
            given = {"mesh": mesh, "loss_fn": loss_fn, "overlap": 3, "costs": engines.COSTS, "timeout": 60}
            with engines.make(nn.Sequential(*model), program, **given, **options) as engine:
                result = engine.step(inputs, target=inputs)
            if result.losses:
                torch.testing.assert_close(list(result.losses), losses[shard], rtol=1e-12, atol=1e-14)
            held = [block for stage in engine.stages.values() for block in stage.blocks]
            for block, twin in ((b, t) for b, t in zip(model, plain, strict=True) if b in held):
                for (name, found), wanted in zip(block.named_parameters(), twin.parameters(), strict=True):
                    want = wanted.grad
                    if found.shape != want.shape:
                        want = want[slot * len(found) :][: len(found)]
                    limit = 1e-12 * float(wanted.grad.abs().max())
                    torch.testing.assert_close(found.grad, want, rtol=0, atol=limit, msg=f"{name}, {options}")
                for one, other in zip(routers(block), routers(twin), strict=True):
                    load = one.load.clone()
                    for name in () if mesh is None else ("dp", "ep"):
                        dist.all_reduce(load, group=mesh.get_group(name))
                    assert torch.equal(load, other.load), options


def routers(block: nn.Module) -> list[Router]:
    return [module for module in block.modules() if isinstance(module, Router)]
