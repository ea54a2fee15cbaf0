"""Train a mixture of experts of your own, its exchanges hidden, on a GPU for each rank or on the CPU.

python examples/train_own.py
torchrun --nproc-per-node 4 examples/train_own.py --pp 2 --save folder
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import overlap1f1b as o1
from overlap1f1b.moe import GroupedExperts

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--pp", type=int, default=1, help="pipeline stages; the ranks of one stage share its experts")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
parser.add_argument("--save", default="", help="folder for checkpoints; a run of any number of ranks goes on from them")
args = parser.parse_args()

ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))  # torchrun sets both
device = "cuda" if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "cpu"
mesh, group, shard, shards = None, None, 0, 1  # shards of the data; the ranks of one pipeline read the same one
if device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
if "RANK" in os.environ:
    mesh = init_device_mesh(device, (args.pp, ranks // args.pp), mesh_dim_names=("pp", "ep"))
    group, shard, shards = mesh.get_group("ep"), mesh["ep"].get_local_rank(), mesh["ep"].size()


class Block(nn.Module):
    """One MoE layer. A block maps one tensor to one tensor and calls its experts somewhere in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(64), nn.Linear(64, 8)
        self.experts = GroupedExperts(8, hidden=64, intermediate=128, group=group)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H]
        tokens = self.norm(x).flatten(0, 1)  # [T, H]
        weights, indices = self.router(tokens).softmax(-1).topk(2)  # [T, K] each
        return x + self.experts(tokens, indices, weights).view_as(x)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return tokens [B, S] that count up by five, and the token that follows each."""
    start = torch.randint(64, (16, 1), generator=torch.Generator().manual_seed(number * shards + shard))
    tokens = ((start + 5 * torch.arange(33)) % 64).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.mT, target)


torch.manual_seed(0)  # the same weights on all ranks
model = nn.Sequential(nn.Embedding(64, 64), Block(), Block(), Block(), nn.Linear(64, 64)).to(device)
program = o1.build_schedule("combined_1f1b", ranks=args.pp, microbatches=4)
engine = o1.Engine(model, program, mesh=mesh, loss_fn=loss_fn)
optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
first = o1.load_checkpoint(engine, args.save, optimizer) if args.save else 0
for step in range(first, args.steps):
    begin = time.perf_counter()
    tokens, target = batch(step)
    result = engine.step(tokens, target=target)  # adds gradients to .grad
    loss, norm = engine.mean_loss(result), engine.clip_gradients(1.0)  # over all ranks
    optimizer.step()
    optimizer.zero_grad()
    tps = shards * tokens.numel() / (time.perf_counter() - begin)
    line = f"step {step} loss {loss:.3f} grad_norm {norm:.2f} tps {tps:.0f}"
    if shards > 1:  # else nothing is exchanged
        line += f", {result.overlap.hidden_fraction:.0%} of the exchange hidden"
    if step % 10 == 9:
        tokens, target = batch(-1)
        line += f"\nheld out: loss {engine.mean_loss(engine.evaluate(tokens, target=target)):.3f}"
    if args.save and (step + 1) % args.every == 0:
        o1.save_checkpoint(engine, args.save, step + 1, optimizer, keep=2)
    if rank == 0:
        print(line, flush=True)
engine.close()  # all ranks end its communicators before the processes end
if dist.is_initialized():
    dist.destroy_process_group()
