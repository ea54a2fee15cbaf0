#!/usr/bin/env bash
# torch 2.13.0: zero-bubble schedules cannot play a stage that uses a layer again behind another one.
#
# InterleavedZeroBubble computes weight gradients apart from input gradients. A stage that applies layers in the order
# 0, 0, 1 has the gradients of a plain loop. In the order 0, 1, 0, as models with a shared block have it, the first
# weight gradient ends in an error about a second backward. Interleaved1F1B plays both. One process is enough.
. "$(dirname "$0")/environment" torch==2.13.0 numpy==2.4.6
check <<'PY'
import copy
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

logging.disable(logging.CRITICAL)


class Block(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.layers, self.order = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), order

    def forward(self, x):
        for number in self.order:
            x = self.layers[number](x).tanh()
        return x


def loss_of(output, target):
    return (output - target).square().mean()


def played(schedule, order):
    torch.manual_seed(0)
    blocks = [Block(order), Block(order)]
    plain = copy.deepcopy(blocks)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    for mine, wanted in zip(x.chunk(4), target.chunk(4)):
        (loss_of(plain[1](plain[0](mine)), wanted) / 4).backward()
    stages = [PipelineStage(block, number, 2, torch.device("cpu")) for number, block in enumerate(blocks)]
    try:
        schedule(stages, 4, loss_fn=loss_of).step(x, target=target)
    except RuntimeError as error:
        return str(error.__cause__ or error)[:50]
    pairs = zip(nn.ModuleList(blocks).parameters(), nn.ModuleList(plain).parameters())
    return "as a plain loop" if all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs) else "other gradients"


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(f"torch {torch.__version__}")
found = {}
for schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
    for order in ((0, 0, 1), (0, 1, 0)):
        found[schedule, order] = played(schedule, order)
        print(f"{schedule.__name__:30} layers {order}: {found[schedule, order]}")
failed = found.pop((ScheduleInterleavedZeroBubble, (0, 1, 0)))
assert set(found.values()) == {"as a plain loop"}, "it is other schedules or orders now"
assert failed.startswith("Trying to backward through the graph a second time"), "it is played now"
PY
