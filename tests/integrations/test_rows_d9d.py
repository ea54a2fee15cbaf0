"""d9d's schedules and MoE layers, with the lines of docs/recipes.md."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import overlap1f1b as o1
from overlap1f1b.schedule import Pair
from tests.engines import COSTS, make
from tests.ranks import over

pytestmark = pytest.mark.skipif(find_spec("d9d") is None, reason="d9d is not installed")
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
E, H, M = 4, 16, 4


@cache
def recipe() -> dict[str, Any]:
    """What the page's programs for d9d define."""
    names: dict[str, Any] = {"o1": o1, "__name__": "recipes"}
    _, _, section = PAGE.read_text().partition("## d9d")
    for program in re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL):
        exec(program, names)
    return names


@pytest.mark.parametrize(
    ("name", "options", "ranks", "stages", "pairs"),
    [
        ("GPipe", {}, 4, 4, False),
        ("LoopedBFS", {"num_stages_per_rank": 2}, 4, 8, False),
        ("1F1B", {"num_stages_per_rank": 1, "zero_bubble": False}, 4, 4, False),
        ("1F1B", {"num_stages_per_rank": 2, "zero_bubble": True}, 2, 4, False),
        ("DualPipeV", {}, 4, 8, True),
        ("ZeroBubbleV", {}, 2, 4, False),
    ],
)
def test_schedules(name: str, options: dict[str, Any], ranks: int, stages: int, pairs: bool, tmp_path: Path) -> None:
    from d9d.pipelining import factory

    config = getattr(factory, f"PipelineSchedule{name}Config")(**options)
    program = recipe()["program_of"](config, 12, ranks, tmp_path / "d9d.csv")
    program.check()
    assert (program.microbatches, len(program.ranks), program.placement.stages) == (12, ranks, stages)
    assert any(isinstance(slot, Pair) for mine in program.ranks for slot in mine) == pairs


class Block(nn.Module):
    """A linear layer and d9d's MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(H, H)
        self.moe: Any = recipe()["MoELayer"](H, 24, E, 2, True)
        self.moe.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(x + self.mix(x).tanh())
        return x + y

    def plain(self, x: Tensor) -> Tensor:
        """The same in one process, one expert after another."""
        h = x + self.mix(x).tanh()
        rows, experts = h.flatten(0, -2), self.moe.grouped_experts
        routed, y = self.moe.router(rows), torch.zeros_like(h.flatten(0, -2))
        for e in range(E):
            token, k = (routed.selected_expert_indices == e).nonzero(as_tuple=True)
            gate, up, down = (getattr(experts, f"{part}_proj").weight[e] for part in ("gate", "up", "down"))
            out = F.silu(rows[token] @ gate) * (rows[token] @ up) @ down
            y = y.index_add(0, token, out * routed.selected_probabilities[token, k, None])
        return x + y.view_as(x)


@over(2)
def test_moe_layers(rank: int, size: int) -> None:
    from d9d.module.block.moe import grouped_experts
    from d9d.module.parallelism.style import ShardMoESparseExpertsParallel

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    model, plain = (nn.Sequential(Block(), Block(), nn.Linear(H, H)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    x, target = torch.randn(2, size, 2 * M, 6, H, generator=torch.Generator().manual_seed(1))
    for shard in range(size):
        for part, wanted in zip(x[shard].chunk(M), target[shard].chunk(M), strict=True):
            y = part
            for block in plain:
                y = block.plain(y) if isinstance(block, Block) else block(y)
            (F.mse_loss(y, wanted) / (M * size)).backward()
    recipe()
    for block in (block for block in model if isinstance(block, Block)):
        parallelize_module(block.moe, mesh["ep"], ShardMoESparseExpertsParallel(shard_dim_name="ep"))
    program = o1.build_schedule("combined_1f1b", microbatches=M)
    engine = make(model, program, mesh=mesh, loss_fn=F.mse_loss, costs=COSTS)
    with patch.object(grouped_experts, "silu_mul", lambda x, y: F.silu(x) * y):  # a kernel for GPUs
        for _ in range(3):
            model.zero_grad()
            result = engine.step(x[rank], target=target[rank])
    assert result.overlap.hidden_fraction > 0
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None, name
        whole = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        apart = float((whole - theirs.grad).abs().max() / theirs.grad.abs().max())
        assert apart < 1e-6, (name, apart)
