#!/usr/bin/env bash
# heavyball 3.2.1: the first step of Scion replaces all weights by new random ones, whatever they were.
#
# A model that was read from a checkpoint is lost by one step, with gradients of zero, too. The class has no option for
# it, and its documentation does not say so. Each matrix is then orthogonal; a stack of experts is taken for one tensor,
# and ends at a sixtieth of its norm.
. "$(dirname "$0")/environment" torch==2.13.0 heavyball==3.2.1 numpy==2.4.6
check <<'PY'
from importlib.metadata import version

import heavyball
import torch

heavyball.utils.compile_mode = None
print(f"heavyball {version('heavyball')}, torch {torch.__version__}; one step with gradients of zero, lr 0.01")
for kind in (heavyball.AdamW, heavyball.Muon, heavyball.Scion):
    for shape in ((16, 8), (4, 16, 8)):
        torch.manual_seed(1)
        weight = torch.nn.Parameter(torch.randn(shape))
        before, optimizer = weight.detach().clone(), kind([weight], lr=0.01)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        cosine = torch.nn.functional.cosine_similarity(weight.flatten(), before.flatten(), 0).item()
        print(f"{kind.__name__:6} {shape!s:11} norm {before.norm():5.2f} -> {weight.norm():5.2f}, cosine {cosine:5.2f}")
        if kind is heavyball.Scion:
            assert abs(cosine) < 0.2 and weight.norm() < before.norm() / 2, "Scion keeps the weights now"
        else:
            assert torch.equal(weight, before)
PY
