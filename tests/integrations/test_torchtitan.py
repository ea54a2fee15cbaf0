"""torchtitan's own token dispatcher, unmodified: its exchanges are found and hidden, and gradients are equal."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b.engine import Engine
from overlap1f1b.plan import NodeCosts, Op
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(
    find_spec("torchtitan") is None or find_spec("spmd_types") is None, reason="torchtitan is not installed"
)
HIDDEN, EXPERTS, TOP_K, MICROBATCHES, LAYERS = 16, 8, 2, 4, 2
COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, aggregate=0.2, dense=1, reduce=2)


class Block(nn.Module):
    """Norm, router, torchtitan's dispatcher around local experts, and a shared expert."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

        self.norm, self.router = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS // mesh.size()))
        self.dispatcher: Any = AllToAllTokenDispatcher(AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K))
        self.dispatcher.wire_meshes(ep_mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scores, chosen = self.router(h).softmax(-1).topk(TOP_K)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        rows, local, metadata = self.dispatcher.dispatch(h, scores, chosen, counts)
        parts = rows.split(local.tolist()) if len(local) == len(self.experts) else [rows]
        made = [F.gelu(expert(part)) for expert, part in zip(self.experts, parts, strict=True)]
        return x + self.dispatcher.combine(torch.cat(made), metadata, h) + self.shared(h)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _compare(rank: int, size: int) -> list[str]:
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("default")  # the other one exchanges by a collective that gloo has not
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))

    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(*[Block(mesh) for _ in range(LAYERS)], nn.Linear(HIDDEN, HIDDEN))

    data = torch.randn(2, MICROBATCHES * 9, HIDDEN, generator=torch.Generator().manual_seed(rank))
    plain, problems = build(), []
    for x, y in zip(data[0].chunk(MICROBATCHES), data[1].chunk(MICROBATCHES), strict=True):
        (loss_fn(plain(x), y) / (MICROBATCHES * size)).backward()
    for overlap in ("pairs", 3):
        model = build()
        program = build_schedule("combined_1f1b", microbatches=MICROBATCHES, extra_warmup=1)
        engine = Engine(
            model, program, mesh=mesh, loss_fn=loss_fn, overlap=overlap, costs=COSTS, reduce=False, timeout=30
        )
        for step in range(3):
            model.zero_grad()
            engine.step(data[0], target=data[1])
            found = models.equal(models.gradients(model), models.gradients(plain))
            problems += [f"{overlap}, step {step}: {name}" for name in found]
        exchanged = [node for node in engine.plan.ranks[0] if node.op in (Op.DISPATCH, Op.COMBINE)]
        if len(exchanged) != 2 * 2 * LAYERS * MICROBATCHES:
            problems.append(f"{overlap}: {len(exchanged)} exchanges are hidden")
    return problems


def test_two_ranks(ranks2: Ranks) -> None:
    assert ranks2.run(_compare, timeout=120) == [[], []]
