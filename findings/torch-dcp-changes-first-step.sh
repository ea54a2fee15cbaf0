#!/usr/bin/env bash
# torch 2.13: get_optimizer_state_dict before the first step changes what the first step does.
#
# It is how torch.distributed.checkpoint asks for the state of an optimizer, so a checkpoint at step 0 is enough. To
# have a state it takes a step with a learning rate of zero, and leaves the counters of that step behind: AdamW then
# corrects its bias for step 2, ASGD and Rprop keep a step size from the rate of zero. Weights do not move meanwhile.
. "$(dirname "$0")/environment" torch==2.13.0 numpy==2.4.6
check <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_step(kind, asks):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = kind(model.parameters(), lr=0.01)
    before = model.weight.detach().clone()
    if asks:
        get_optimizer_state_dict(model, optimizer)
    assert torch.equal(model.weight, before)
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    return (model.weight - before).norm().item()


print(f"torch {torch.__version__}; the first step after the call, divided by the first step without it")
expected = {"AdamW": 0.744, "NAdam": 0.989, "Rprop": 1e-4, "ASGD": 0.0, "RMSprop": 1.0, "Adadelta": 1.0}
for name, wanted in expected.items():
    kind = getattr(torch.optim, name)
    ratio = first_step(kind, True) / first_step(kind, False)
    print(f"{name:9} {ratio:.4f}")
    assert abs(ratio - wanted) < 1e-3, f"{name} was {wanted}"
PY
