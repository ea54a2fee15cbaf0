#!/usr/bin/env bash
# torch 2.13: FlopCounterMode counts no operation of torch.nn.functional.grouped_mm, forward or backward.
#
# A figure of utilization that rests on it has nothing of the experts of a model, which are most of its operations.
# The same products by a loop of torch.mm are counted.
. "$(dirname "$0")/environment" torch==2.13.0 numpy==2.4.6
check <<'PY'
import torch
from torch.nn.functional import grouped_mm
from torch.utils.flop_counter import FlopCounterMode

rows, experts, inner, outer = 64, 4, 32, 16
x = torch.randn(rows, inner, requires_grad=True)
weight = torch.randn(experts, inner, outer, requires_grad=True)
ends = torch.tensor([16, 16, 40, 64], dtype=torch.int32)  # the second expert has no row


def loop():
    return torch.cat([torch.mm(part, one) for part, one in zip(x.tensor_split(ends[:-1].tolist()), weight)])


def counted(product):
    with FlopCounterMode(display=False) as forward:
        y = product()
    with FlopCounterMode(display=False) as backward:
        y.backward(torch.ones_like(y))
    return forward.get_total_flops(), backward.get_total_flops()


by_loop, by_grouped = counted(loop), counted(lambda: grouped_mm(x, weight, offs=ends))
true = 2 * rows * inner * outer
print(f"torch {torch.__version__}; operations {true} forward, {2 * true} backward")
print(f"counted of a loop of torch.mm: {by_loop}")
print(f"counted of grouped_mm:         {by_grouped}")
assert by_loop == (true, 2 * true)
assert by_grouped == (0, 0), "grouped_mm is counted now"
PY
