#!/usr/bin/env bash
# pytorch-optimizer 4.1.0: Ftrl sets a weight to zero if its gradient is zero, without any regularization.
#
# It works on each element alone, so one expects that an expert without tokens stays as it is. But a weight is computed
# from what its gradients have summed up to, and from nothing else. An expert that gets no token in the first step is
# gone; its own first token finds zeros.
. "$(dirname "$0")/environment" torch==2.13.0 pytorch-optimizer==4.1.0 numpy==2.4.6
check <<'PY'
from importlib.metadata import version

import torch
from pytorch_optimizer import load_optimizer

print(f"pytorch-optimizer {version('pytorch-optimizer')}, torch {torch.__version__}; norms of three experts, the last is idle")
for name, options in {"adamw": {"weight_decay": 0.0}, "rmsprop": {}, "ftrl": {}}.items():
    torch.manual_seed(0)
    experts = torch.nn.Parameter(torch.randn(3, 4, 4))
    before = experts.detach().clone()
    optimizer = load_optimizer(name)([experts], lr=0.01, **options)
    for _ in range(3):
        experts.grad = torch.randn(3, 4, 4)
        experts.grad[2] = 0
        optimizer.step()
    norms = [[round(one.norm().item(), 2) for one in stack] for stack in (before, experts.detach())]
    print(f"{name:8} {norms[0]} -> {norms[1]}")
    if name == "ftrl":
        group = optimizer.param_groups[0]
        assert group["lambda_1"] == group["lambda_2"] == 0.0
        assert not experts[2].any() and experts[:2].all(), "Ftrl keeps the idle expert now"
    else:
        assert torch.equal(experts[2], before[2])
PY
