"""Megatron-Core's linear layers, whose weight gradients are computed apart from those of their inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.engine.run.autograd import SplitLinear, added_to_main
from overlap1f1b.engine.run.blocks import Blocks
from overlap1f1b.integrations.replaced import Replacement
from overlap1f1b.transport.suspend import uncompiled

MODULE = "megatron.core.tensor_parallel.layers"
KINDS = ("ColumnParallelLinear", "RowParallelLinear")
METHOD = "_forward_impl"
"""Method of these layers that multiplies an input by the layer's weight."""


def linears_of(model: nn.Module) -> list[Any]:
    """Return the layers whose weight gradients can be computed apart: those with a trained weight of their own."""
    layers: Any = sys.modules.get(MODULE)
    kinds = tuple(getattr(layers, name) for name in KINDS) if layers is not None else ()
    return [
        module
        for module in model.modules()
        if isinstance(module, kinds) and hasattr(module, METHOD) and _is_trained(module.weight)
    ]


def _is_trained(weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and weight.requires_grad


def leaving(layers: Sequence[Any], stage: Callable[[], Blocks]) -> Iterator[Replacement]:
    """Yield what lets layers leave their weight gradients to the queue in force of a stage."""
    for layer in layers:
        yield vars(layer), METHOD, uncompiled(_leaving(layer, stage))


def _leaving(layer: Any, stage: Callable[[], Blocks]) -> Callable[..., Tensor]:
    plain = getattr(layer, METHOD)

    def product(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Collectives along "tp" must not wait for a weight gradient, which may be computed at any time. A bias is
        # rarely added here, and its gradient would be summed in another order.
        given = args or weight is not layer.weight or kwargs.get("bias") is not None
        if given or kwargs.get("sequence_parallel") or kwargs.get("allreduce_dgrad") or not torch.is_grad_enabled():
            result: Tensor = plain(input, weight, *args, **kwargs)
            return result
        blocks, parameter = stage(), layer.weight
        fused = kwargs.get("gradient_accumulation_fusion") and getattr(parameter, "main_grad", None) is not None
        add = _adding(parameter) if fused else None
        return SplitLinear.apply(input, (parameter,), None, blocks.queue, blocks.anchor, add)

    return product


def _adding(weight: Any) -> Callable[[Tensor, Tensor], Tensor | None]:
    """Return what adds a weight's gradient to its ``main_grad``, by the kernel of Megatron-Core."""
    main = weight.main_grad

    def add(grad: Tensor, rows: Tensor) -> Tensor | None:
        kernels: Any = sys.modules[MODULE]
        kernels = kernels.fused_weight_gradient_mlp_cuda
        kernel = kernels.wgrad_gemm_accum_fp32 if main.dtype == torch.float32 else kernels.wgrad_gemm_accum_fp16
        kernel(rows, grad, main)
        return added_to_main(weight)

    return add
