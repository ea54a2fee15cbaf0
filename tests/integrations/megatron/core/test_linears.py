"""Weight gradients of Megatron-Core's linear layers are computed apart from those of their inputs."""

from __future__ import annotations

import sys
import traceback
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap1f1b.engine.graph.autograd import WeightQueue
from overlap1f1b.engine.run.replaced import replaced
from overlap1f1b.integrations.megatron import weights
from tests.integrations.megatron.core import models, shim
from tests.integrations.megatron.core.cases import OVERLAP_REDUCE, Case
from tests.ranks import run

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def _places(rank: int, size: int) -> list[int]:
    """Return how many weight gradients are computed inside the backward of a layer, and how many apart."""
    shim.apply()
    from megatron.core.tensor_parallel import layers

    from tests.integrations.megatron.core.steps import our_step

    case, found = Case(fused=True, ddp=OVERLAP_REDUCE), [0, 0]
    shim.fuse_weight_gradients()
    plain = layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32

    def add(rows: Tensor, grad: Tensor, main: Tensor) -> None:
        names = {frame.name for frame in traceback.extract_stack()}
        found[not names & {"backward", "walk"}] += 1
        plain(rows, grad, main)

    shim.fuse_weight_gradients = lambda: None  # type: ignore[assignment]
    layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32 = add
    with models.init_parallel(ep=case.ep):
        our_step(case, 3)
    return found


def test_weight_gradients_are_apart() -> None:
    for inside, apart in run(_places, 2, timeout=60):
        assert not inside
        assert apart > 0


def test_the_kernel_gets_rows_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace()
    monkeypatch.setitem(sys.modules, weights.MODULE, module)
    module.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=shim.add_weight_gradient)
    weight: Any = nn.Parameter(torch.randn(2, 3))
    weight.main_grad = torch.zeros(2, 3)
    layer = SimpleNamespace(weight=weight, _forward_impl=None)
    stage: Any = SimpleNamespace(queue=WeightQueue(), anchor=torch.empty(0, requires_grad=True))
    rows, grad = torch.randn(5, 4, 7)[..., :3], torch.randn(2).expand(5, 4, 2)  # of a slice, and of a sum
    with replaced(weights.leaving([layer], lambda: stage)):
        forward: Any = layer._forward_impl
        forward(rows, weight, gradient_accumulation_fusion=True).backward(grad)
    stage.queue.compute()
    torch.testing.assert_close(weight.main_grad, grad.flatten(0, 1).t() @ rows.flatten(0, 1))
