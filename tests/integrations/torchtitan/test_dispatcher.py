"""torchtitan's own token dispatcher, unmodified: its exchanges are found and hidden, and gradients are equal."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.integrations.torchtitan import on_cpu
from tests.play.plain import HIDDEN, MICROBATCHES, compare
from tests.ranks import Kept

pytestmark = pytest.mark.skipif(
    find_spec("torchtitan") is None or find_spec("spmd_types") is None, reason="torchtitan is not installed"
)
EXPERTS, TOP_K, LAYERS = 8, 2, 2


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


def _compared(rank: int, size: int) -> list[str]:
    on_cpu.install()
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("partial_dtensor")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))

    def build() -> nn.Sequential:
        return nn.Sequential(*[Block(mesh) for _ in range(LAYERS)], nn.Linear(HIDDEN, HIDDEN))

    exchanges = 2 * 2 * LAYERS * MICROBATCHES
    return compare("overlap 3", build, mesh, exchanges=exchanges, overlap=3)


def test_two_ranks(titan: Kept) -> None:
    assert titan[2].run(_compared) == [[], []]
