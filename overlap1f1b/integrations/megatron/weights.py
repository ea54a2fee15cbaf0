"""Weight gradients of Megatron-Core's layers, computed apart from the gradients of inputs.

1. Its linear layers leave them to the queue of a weight node.
2. Layers of TransformerEngine compute them in ``backward_dw``, by ``delay_wgrad_compute``. The backward of such a layer
   puts its operands into ``wgrad_store``. Each call of ``backward_dw`` takes the oldest out, computes the gradients
   and calls the hooks of Megatron-Core's data-parallel wrapper. Here the operands wait in the queue of a weight node
   instead, and are in the store only while this node calls ``backward_dw``: so several microbatches may be open, in any
   order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.engine.graph.autograd import added_to_main, split_linear
from overlap1f1b.engine.run.replaced import Replacement
from overlap1f1b.engine.run.stage import Stage
from overlap1f1b.integrations.megatron.config import KERNELS, attribute_of
from overlap1f1b.transport.suspend import uncompiled

# ------------------------------------------------------------------------------------------------------- linear layers

MODULE = "megatron.core.tensor_parallel.layers"
KINDS = ("ColumnParallelLinear", "RowParallelLinear")
METHOD = "_forward_impl"
"""Method of these layers that multiplies an input by the layer's weight."""


def linears_of(model: nn.Module) -> list[Any]:
    """Return the layers with a trained weight of their own: their weight gradients can be computed apart."""
    layers: Any = sys.modules.get(MODULE)
    kinds = tuple(getattr(layers, name) for name in KINDS) if layers is not None else ()
    return [
        module
        for module in model.modules()
        if isinstance(module, kinds)
        and hasattr(module, METHOD)
        and isinstance(module.weight, nn.Parameter)
        and module.weight.requires_grad
    ]


def leaving(layers: Sequence[Any], stage: Callable[[], Stage]) -> Iterator[Replacement]:
    """Yield what lets layers leave their weight gradients to the queue in force of a stage."""
    for layer in layers:
        yield vars(layer), METHOD, uncompiled(_leaving(layer, stage))


def _leaving(layer: Any, stage: Callable[[], Stage]) -> Callable[..., Tensor]:
    plain = getattr(layer, METHOD)

    def product(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Collectives along "tp" must not wait for a weight gradient, which may be computed at any time. A bias is
        # rarely added here, and its gradient would be summed in another order.
        given = args or weight is not layer.weight or kwargs.get("bias") is not None
        if given or kwargs.get("sequence_parallel") or kwargs.get("allreduce_dgrad") or not torch.is_grad_enabled():
            return plain(input, weight, *args, **kwargs)
        blocks, parameter = stage(), layer.weight
        fused = kwargs.get("gradient_accumulation_fusion") and getattr(parameter, "main_grad", None) is not None
        add = _adding(parameter) if fused else None
        return split_linear(input, (parameter,), None, blocks.queue, blocks.anchor, add)

    return product


def _adding(weight: Any) -> Callable[[Tensor, Tensor], Tensor | None]:
    """Return what adds a weight's gradient to its ``main_grad``, by the kernel of Megatron-Core."""
    main = weight.main_grad

    def add(grad: Tensor, rows: Tensor) -> Tensor | None:
        kernels: Any = getattr(sys.modules[MODULE], KERNELS)
        kernel = kernels.wgrad_gemm_accum_fp32 if main.dtype == torch.float32 else kernels.wgrad_gemm_accum_fp16
        kernel(rows.contiguous(), grad.contiguous(), main)  # it reads memory without looking at strides
        return added_to_main(weight)

    return add


# --------------------------------------------------------------------------------------- layers of TransformerEngine

MARK = "skip_backward_post_hook"
"""Attribute of the parameters whose gradients ``backward_dw`` computes."""


def delayed_of(model: nn.Module) -> list[Any]:
    """Return the layers that compute weight gradients in their ``backward_dw``.

    Raises:
        ValueError: A layer's gradients could get lost or be added in another order.
    """
    layers = []
    for name, layer in model.named_modules():
        store = getattr(layer, "wgrad_store", None)
        if store is None or not store.delay_wgrad_compute():
            continue
        where = f"delay_wgrad_compute in {name} ({type(layer).__name__})"
        if not any(hasattr(parameter, MARK) for parameter in layer.parameters(recurse=False)):
            raise ValueError(f"{where}, which marks no parameter by {MARK}; allowed: a TransformerEngine that does")
        if layer.use_bias and layer.return_bias:  # autograd adds its gradient, and hooks wait for backward_dw
            raise ValueError(f"{where}, which returns its bias; allowed: no such bias (add_bias_linear=False)")
        if _delayed(layer):
            layers.append(layer)
    wrapper = attribute_of(model, "ddp_config")
    if layers and wrapper is not None and not getattr(wrapper, "delay_wgrad_compute", False):
        raise ValueError("delay_wgrad_compute=False in ddp_config, and True in the model's layers; allowed: the same")
    return layers


def delaying(layers: Sequence[Any], stage: Callable[[], Stage]) -> Iterator[Replacement]:
    """Yield what lets layers call ``backward_dw`` when the queue in force of a stage is computed."""
    for layer in layers:
        yield vars(layer.wgrad_store), "put", _queueing(layer, stage)


def _queueing(layer: Any, stage: Callable[[], Stage]) -> Callable[..., None]:
    store, parameters = layer.wgrad_store.put, _delayed(layer)

    def put(operands: Any, function: Any) -> None:
        stage().queue.put(parameters[0], lambda: add(operands, function))

    @torch.no_grad()
    def add(operands: Any, function: Any) -> None:
        store(operands, function)
        before = [_set_aside(parameter) for parameter in parameters]
        layer.backward_dw()
        for parameter, grad in zip(parameters, before, strict=True):
            if _is_added(parameter):
                parameter.grad = None
            elif grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)

    return put


def _set_aside(parameter: nn.Parameter) -> Tensor | None:
    """Take away the gradient of earlier microbatches, which ``backward_dw`` would replace.

    A parameter whose gradient goes to ``main_grad`` gets zeros, which nobody reads: hooks wait for a gradient, and the
    one that the backward has left may be gone with another microbatch.
    """
    before = parameter.grad
    parameter.grad = parameter.new_zeros(()).expand_as(parameter) if _is_added(parameter) else None
    return before


def _is_added(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "grad_added_to_main_grad", False)


def _delayed(layer: Any) -> list[nn.Parameter]:
    return [p for p in layer.parameters(recurse=False) if p.requires_grad and getattr(p, MARK, False)]
