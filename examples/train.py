"""Trains a mixture of experts of one's own, its exchanges hidden.

python examples/train.py                                 # one process, which holds all experts
torchrun --nproc-per-node 2 examples/train.py            # two, which share them
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import overlap1f1b as o1
from overlap1f1b.moe import GroupedExperts

VOCABULARY, HIDDEN, EXPERTS, BATCH, SEQUENCE = 64, 64, 8, 16, 32


class Block(nn.Module):
    """Any module that maps one tensor to one tensor, and calls experts somewhere in its forward."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = GroupedExperts(EXPERTS, HIDDEN, 2 * HIDDEN, group=group)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H]
        tokens = self.norm(x).flatten(0, 1)  # [T, H]
        weights, indices = self.router(tokens).softmax(-1).topk(2)  # [T, K] each
        return x + self.experts(tokens, indices, weights).view_as(x)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:  # of one microbatch
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


mesh = None
if "RANK" in os.environ:  # torchrun
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
rank, group = (0, None) if mesh is None else (mesh.get_rank(), mesh.get_group("ep"))

torch.manual_seed(0)  # the same weights outside the experts on all ranks
blocks = [Block(group) for _ in range(3)]
model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), *blocks, nn.Linear(HIDDEN, VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

program = o1.build_schedule("combined_1f1b", microbatches=4)
engine = o1.Engine(model, program, mesh=mesh, loss_fn=loss_fn)
torch.manual_seed(1 + rank)  # other data on each
for step in range(20):
    tokens = (torch.randint(VOCABULARY, (BATCH, 1)) + 5 * torch.arange(SEQUENCE + 1)) % VOCABULARY
    result = engine.step(tokens[:, :-1], target=tokens[:, 1:])  # gradients are in .grad
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {result.loss:.3f}, {result.overlap.hidden_fraction:.0%} of the exchange hidden")
if mesh is not None:
    dist.destroy_process_group()
