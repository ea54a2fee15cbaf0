"""Weight gradients apart from input gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlap1f1b.kernels.grouped_mm import grouped_mm, grouped_mm_input_grad, grouped_mm_weight_grad, product_dtype

Gradients = dict[nn.Parameter, Tensor]


class WeightQueue:
    """Weight gradients that one backward of one microbatch has left for later.

    While ``probing`` is set, backwards leave nothing: the engine walks a part of a graph a second time.
    """

    def __init__(self) -> None:
        self.probing = False
        self._waiting: list[tuple[nn.Parameter, Callable[[], Tensor]]] = []
        self._ready: Gradients = {}

    def put(self, weight: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        """Leaves a gradient to be computed later."""
        if not self.probing:
            self._waiting.append((weight, gradient))

    def keep(self, gradients: Gradients) -> None:
        """Keeps gradients that are there already: a parameter may get one from a split layer and one from elsewhere."""
        self._ready = gradients

    def compute(self) -> Gradients:
        """Computes and empties what waits, together with what was kept, summed per parameter."""
        total, self._ready = self._ready, {}
        for weight, gradient in self._waiting:
            total[weight] = total[weight] + gradient() if weight in total else gradient()
        self._waiting = []
        return total


class SplitLinear(torch.autograd.Function):
    """``F.linear`` whose backward gives the gradients of input and bias and queues that of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, queue: WeightQueue) -> Tensor:
        kind = x.device.type
        ctx.cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        ctx.dtype, ctx.queue, ctx.weight = x.dtype, queue, weight
        if ctx.cast is not None:
            x = x.to(ctx.cast)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)  # autocast, where it is on, casts weight and bias here as it would outside

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        cast, queue = ctx.cast, ctx.queue
        if ctx.needs_input_grad[1] and not queue.probing:
            queue.put(ctx.weight, lambda: _linear_weight_grad(grad, x).to(weight.dtype))
        matrix = weight if cast is None else weight.to(cast)
        grad_x = (grad @ matrix).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        grad_bias = None
        if ctx.needs_input_grad[2] and not queue.probing:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(weight.dtype)
        return grad_x, None, grad_bias, None


def _linear_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


class SplitGroupedMM(torch.autograd.Function):
    """``grouped_mm`` whose backward gives the gradient of the rows and queues that of the weight."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: nn.Parameter, counts: Sequence[int], queue: WeightQueue) -> Tensor:
        ctx.counts, ctx.queue, ctx.weight = counts, queue, weight
        ctx.dtype, ctx.rows_dtype = product_dtype(weight), rows.dtype
        rows = rows.to(ctx.dtype)
        ctx.save_for_backward(rows, weight)
        return grouped_mm(rows, weight.to(ctx.dtype), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,), (rows, weight), counts = grads, ctx.saved_tensors, ctx.counts
        if ctx.needs_input_grad[1]:
            ctx.queue.put(ctx.weight, lambda: grouped_mm_weight_grad(grad, rows, counts).to(weight.dtype))
        return grouped_mm_input_grad(grad, weight.to(ctx.dtype), counts).to(ctx.rows_dtype), None, None, None


def accumulate(gradients: Gradients) -> None:
    """Adds to ``.grad`` through each parameter's own autograd node, so that hooks fire as in any backward."""
    if all(parameter.grad is not None for parameter in gradients):
        torch.autograd.backward(list(gradients), list(gradients.values()))
        return
    # A first gradient becomes ``.grad`` without a copy only if nothing else holds it, no Python list either.
    parameters, box = list(gradients), list(gradients.values())
    gradients.clear()
    with torch.enable_grad():
        root = _Deliver.apply(box, *parameters)
    torch.autograd.backward(root)


class _Deliver(torch.autograd.Function):
    """A scalar whose backward gives each parameter what is in the box."""

    @staticmethod
    def forward(ctx: Any, box: list[Tensor], *parameters: nn.Parameter) -> Tensor:
        ctx.box = box
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        delivered = (None, *ctx.box)
        ctx.box.clear()
        return delivered
