"""Trains a mixture of experts of one's own, its exchanges hidden.

torchrun --nproc-per-node 4 examples/train_own.py --pp 2 --save folder    # or python examples/train_own.py
"""

import argparse
import os
import time

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import overlap1f1b as o1
from overlap1f1b.moe import GroupedExperts

parser = argparse.ArgumentParser()
parser.add_argument("--pp", type=int, default=1)  # stages; further ranks share the experts of each
parser.add_argument("--save", default="")  # folder for checkpoints, from which any number of ranks goes on
args, mesh, group, shard, shards, say = parser.parse_args(), None, None, 0, 1, print
if "RANK" in os.environ:  # torchrun
    mesh = init_device_mesh("cpu", (args.pp, int(os.environ["WORLD_SIZE"]) // args.pp), mesh_dim_names=("pp", "ep"))
    group, shard, shards = mesh.get_group("ep"), mesh["ep"].get_local_rank(), mesh["ep"].size()
    say = print if mesh.get_rank() == 0 else str  # the first rank alone


class Block(nn.Module):  # any that maps one tensor to one tensor, and calls experts somewhere in its forward
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.RMSNorm(64), nn.Linear(64, 8), GroupedExperts(8, 64, 128, group=group)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H]
        tokens = self.norm(x).flatten(0, 1)  # [T, H]
        weights, indices = self.router(tokens).softmax(-1).topk(2)  # [T, K] each
        return x + self.experts(tokens, indices, weights).view_as(x)


def batch(number: int) -> tuple[Tensor, Tensor]:  # [B, S] that count up by five, and what follows each
    start = torch.randint(64, (16, 1), generator=torch.Generator().manual_seed(number * shards + shard))
    return (start + 5 * torch.arange(32)) % 64, (start + 5 * torch.arange(1, 33)) % 64


torch.manual_seed(0)  # the same weights on all ranks
model = nn.Sequential(nn.Embedding(64, 64), Block(), Block(), Block(), nn.Linear(64, 64))
program = o1.build_schedule("combined_1f1b", ranks=args.pp, microbatches=4)
engine = o1.Engine(model, program, mesh=mesh, loss_fn=lambda x, y: nn.functional.cross_entropy(x.mT, y))
optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
for step in range(o1.load_checkpoint(engine, args.save, optimizer) if args.save else 0, 20):
    begin, (tokens, target) = time.perf_counter(), batch(step)
    result = engine.step(tokens, target=target)  # gradients are in .grad
    loss, norm = engine.mean_loss(result), engine.clip_gradients(1.0)
    optimizer.step()
    optimizer.zero_grad()
    tps, hidden = shards * tokens.numel() / (time.perf_counter() - begin), result.overlap.hidden_fraction
    say(f"step {step} loss {loss:.3f} grad_norm {norm:.2f} tps {tps:.0f}, {hidden:.0%} of the exchange hidden")
    if step % 10 == 9:
        say(f"held out: loss {engine.mean_loss(engine.evaluate(batch(-1)[0], target=batch(-1)[1])):.3f}")
        if args.save:
            o1.save_checkpoint(engine, args.save, step + 1, optimizer)
