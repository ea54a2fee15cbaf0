#!/usr/bin/env bash
# torch 2.13: rows behind the last offset of torch.nn.functional.grouped_mm get a gradient of uninitialised memory.
#
# The documentation says that elements beyond the last offset are ignored, so one expects zeros for their gradient. Who
# pads the rows of a batch to a fixed number, and sums or clips the gradients of all rows, adds what was in memory.
# torch.use_deterministic_algorithms fills new memory with NaN, which shows it each time.
. "$(dirname "$0")/environment" torch==2.13.0 numpy==2.4.6
check <<'PY'
import torch
from torch.nn.functional import grouped_mm

torch.use_deterministic_algorithms(True)
x = torch.randn(64, 32, requires_grad=True)
weight = torch.randn(4, 32, 16, requires_grad=True)
ends = torch.tensor([16, 16, 40, 50], dtype=torch.int32)  # the last 14 rows belong to no expert
y = grouped_mm(x, weight, offs=ends)
grad = torch.zeros_like(y)
grad[:50] = 1.0  # and nothing depends on them
y.backward(grad)
used, unused = x.grad[:50], x.grad[50:]
print(f"torch {torch.__version__}")
print(f"gradient of the 50 rows of experts: all finite {used.isfinite().all().item()}")
print(f"gradient of the 14 other rows: NaN in {unused.isnan().sum().item()} of {unused.numel()} elements")
print(f"norm of the whole gradient, as a clipping takes it: {x.grad.norm().item()}")
assert used.isfinite().all() and weight.grad.isfinite().all()
assert unused.isnan().all(), "these rows have a gradient of their own now"
PY
