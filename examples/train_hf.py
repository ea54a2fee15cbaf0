"""Train a mixture of experts of the transformers library, unmodified, on a GPU for each rank or on the CPU.

python examples/train_hf.py MODEL TEXT …                    # MODEL: config.json, or a folder, with or without weights
torchrun --nproc-per-node 4 examples/train_hf.py MODEL TEXT … --pp 2
"""

import argparse
import math
import os
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist

import overlap1f1b as o1

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
except ModuleNotFoundError:
    raise SystemExit("train_hf.py needs transformers; pip install 'overlap1f1b[hf]'") from None

from overlap1f1b.integrations.transformers import split_model

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model", type=Path)
parser.add_argument("text", type=Path, nargs="+")
defaults = {"pp": 1, "steps": 20, "batch": 8, "microbatches": 4, "sequence": 64, "every": 10, "lr": 2e-3, "save": ""}
for name, value in defaults.items():  # --save: folder for checkpoints; a run of any number of ranks goes on from them
    parser.add_argument(f"--{name}", type=type(value), default=value)
args = parser.parse_args()
ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))  # torchrun sets both
device = "cuda" if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
mesh = None
if "RANK" in os.environ:  # the ranks of one stage share its experts
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = dist.init_device_mesh(device, (args.pp, ranks // args.pp), mesh_dim_names=("pp", "ep"))
shards = ranks // args.pp  # of the data; the ranks of one pipeline read the same one
config = AutoConfig.from_pretrained(args.model)
config.output_router_logits = True  # the model's own loss then includes the router's
torch.manual_seed(0)  # the same weights on all ranks
trained = any(args.model.glob("*.safetensors"))
with torch.device("meta" if trained else device):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
words, text = any(args.model.glob("tokenizer*")), "\n".join(path.read_text() for path in args.text)
ids = torch.tensor(AutoTokenizer.from_pretrained(args.model)(text)["input_ids"] if words else list(text.encode()))


def batch(tokens: torch.Tensor, seed: int) -> torch.Tensor:
    """Return random pieces of a text, [B, S]."""
    generator = torch.Generator().manual_seed(seed * shards + rank % shards)
    starts = torch.randint(len(tokens) - args.sequence, (args.batch, 1), generator=generator)
    return tokens[starts + torch.arange(args.sequence)].to(device)


program = o1.build_schedule("combined_1f1b", ranks=args.pp, microbatches=args.microbatches)
stages = split_model(model, program, mesh)
if trained:
    stages.load_pretrained(args.model, device)  # reads this rank's part alone
engine = o1.Engine(stages, program, mesh=mesh, loss_fn=stages.loss_fn)
optimizer = torch.optim.AdamW(stages.parameters(), lr=args.lr, betas=(0.9, 0.95))
first = o1.load_checkpoint(engine, args.save, optimizer) if args.save else 0
for step in range(first, args.steps):
    begin, tokens = time.perf_counter(), batch(ids[: len(ids) * 9 // 10], step)
    loss = engine.mean_loss(engine.step(tokens, target=tokens))  # the model shifts its labels
    norm = engine.clip_gradients(1.0)
    for group in optimizer.param_groups:  # a warm-up, then a cosine
        group["lr"] = args.lr * min(1, 10 * (step + 1) / args.steps) * (1.1 + math.cos(math.pi * step / args.steps)) / 2
    optimizer.step()
    optimizer.zero_grad()
    tps = shards * tokens.numel() / (time.perf_counter() - begin)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if device == "cuda":
        memory = torch.cuda.max_memory_allocated() / 2**30
    line = f"step {step} loss {loss:.3f} grad_norm {norm:.2f} tps {tps:.0f} memory {memory:.2f} GiB"
    if (step + 1) % args.every == 0:
        tokens = batch(ids[len(ids) * 9 // 10 :], 0)
        line += f" held_out {engine.mean_loss(engine.evaluate(tokens, target=tokens)):.3f}"
        if args.save:
            o1.save_checkpoint(engine, args.save, step + 1, optimizer)
    if rank == 0:
        print(line, flush=True)
if mesh is not None:
    dist.destroy_process_group()
