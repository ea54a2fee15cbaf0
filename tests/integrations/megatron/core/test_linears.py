"""Weight gradients of Megatron-Core's linear layers are computed apart from those of their inputs."""

from __future__ import annotations

import traceback
from importlib.util import find_spec

import pytest
from torch import Tensor

from tests.integrations.megatron.core import models, shim
from tests.integrations.megatron.core.cases import CASES
from tests.ranks import run

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def _places(rank: int, size: int) -> list[int]:
    """Return how many weight gradients are computed inside the backward of a layer, and how many apart."""
    shim.apply()
    from megatron.core.tensor_parallel import layers

    from tests.integrations.megatron.core.steps import our_step

    case, found = CASES["fused weight gradients, DDP"], [0, 0]
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
