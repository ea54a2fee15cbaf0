"""Gradients of a graph that has been cut, and weight gradients apart from input gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.grouped_mm import (
    add_weight_grad_,
    grouped_mm,
    grouped_mm_input_grad,
    grouped_mm_weight_grad,
    offsets,
    product_dtype,
)


class Root(NamedTuple):
    """The graph of a tensor without the tensor: where its gradient enters, and the gradient's shape and dtype."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Root | None:
        """Return the root of a tensor; None if it requires no gradient."""
        if not tensor.requires_grad:
            return None
        return cls(get_gradient_edge(tensor), tensor.shape, tensor.dtype, tensor.device)

    def checked(self, grad: Tensor, name: str) -> Tensor:
        """Return the gradient on the tensor's device and in its dtype; a scalar is broadcast.

        Raises:
            ValueError: The gradient has another shape; ``name`` is the block's.
        """
        if grad.dim() and grad.shape != self.shape:
            raise ValueError(
                f"a gradient of shape {tuple(grad.shape)} for an output of {name}; allowed: {tuple(self.shape)}"
            )
        grad = grad.to(self.device, self.dtype)
        return grad if grad.shape == self.shape else grad.expand(self.shape)


def grad_of(
    roots: Sequence[Tensor | GradientEdge],
    leaves: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    retain_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    # The annotation allows tensors or edges, the function itself both together.
    mixed = cast("Sequence[Tensor]", roots)
    try:
        return torch.autograd.grad(mixed, leaves, grads, allow_unused=True, retain_graph=retain_graph)
    except RuntimeError as error:
        if "Checkpointing is not compatible" not in str(error):
            raise
        raise ValueError(
            "a checkpoint with use_reentrant=True in a block whose weight gradients are computed apart; "
            "allowed: use_reentrant=False, or recompute= of the engine"
        ) from error


def gradients(
    roots: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return gradients of the leaves without running the leaves' hooks: those run when the sum is accumulated."""
    hooks = [leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]
    held = [dict(hook) for hook in hooks]
    try:
        for hook in hooks:
            hook.clear()
        if not roots or not leaves:
            return (None,) * len(leaves)
        return grad_of(roots, leaves, grads)
    finally:
        for hook, content in zip(hooks, held, strict=True):
            hook.update(content)


def accumulated(
    roots: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return gradients of the leaves, and add gradients of parameters to ``.grad`` on the way.

    ``backward`` gets no ``inputs``: a reentrant checkpoint refuses them.
    """
    if roots:
        torch.autograd.backward(cast("Sequence[Tensor]", roots), grads)
    return [leaf.grad for leaf in leaves]


def leaf(tensor: Tensor) -> Tensor:
    """Return a leaf of the same values if the tensor requires a gradient, else the tensor."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def present(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> Gradients:
    return {p: g for p, g in zip(parameters, grads, strict=True) if g is not None}


def dense(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


Gradients = dict[nn.Parameter, Tensor]


class WeightQueue:
    """Weight gradients that one backward of one microbatch has left for later.

    While ``probing`` is set, backwards leave nothing: the engine will walk that part of the graph a second time.
    """

    def __init__(self) -> None:
        self.probing = False
        self._waiting: list[tuple[nn.Parameter, Callable[[], Tensor | None]]] = []
        self._ready: Gradients = {}

    def put(self, weight: nn.Parameter, gradient: Callable[[], Tensor | None]) -> None:
        """Leave a gradient to be computed later; ``gradient`` returns None if it has added it elsewhere."""
        if not self.probing:
            self._waiting.append((weight, gradient))

    def keep(self, gradients: Gradients) -> None:
        """Keep gradients that are computed already, to be added to the queued gradients of the same parameters."""
        self._ready = gradients

    def compute(self) -> Gradients:
        """Return all gradients, summed per parameter, and empty the queue."""
        total, self._ready = self._ready, {}
        for weight, gradient in self._waiting:
            if (found := gradient()) is not None:
                total[weight] = total[weight] + found if weight in total else found
        self._waiting = []
        return total


class SplitLinear(torch.autograd.Function):
    """``F.linear`` whose backward computes the gradients of input and bias, and queues the weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, queue: WeightQueue) -> Tensor:
        kind = x.device.type
        ctx.cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        ctx.dtype, ctx.queue, ctx.weight = x.dtype, queue, weight
        if ctx.cast is not None:
            x = x.to(ctx.cast)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)  # autocast, if it is on, casts weight and bias here as it does outside

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
    """``grouped_mm`` whose backward computes the gradient of the rows, and queues the weight's.

    With ``kernels`` the weight's gradient is added to its main gradient, if there is one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: nn.Parameter,
        counts: Sequence[int],
        queue: WeightQueue,
        kernels: Kernels | None = None,
    ) -> Tensor:
        ctx.counts, ctx.queue, ctx.weight, ctx.kernels = counts, queue, weight, kernels
        ctx.dtype, ctx.rows_dtype = product_dtype(weight), rows.dtype
        rows = rows.to(ctx.dtype)
        ctx.save_for_backward(rows, weight)
        return grouped_mm(rows, weight.to(ctx.dtype), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,), (rows, weight), counts = grads, ctx.saved_tensors, ctx.counts
        parameter, kernels = ctx.weight, ctx.kernels
        main = None if kernels is None else main_grad(parameter)
        if ctx.needs_input_grad[1] and main is not None:
            ctx.queue.put(parameter, lambda: _add_to_main(parameter, main, grad, rows, counts, kernels))
        elif ctx.needs_input_grad[1]:
            ctx.queue.put(parameter, lambda: grouped_mm_weight_grad(grad, rows, counts).to(weight.dtype))
        return grouped_mm_input_grad(grad, weight.to(ctx.dtype), counts).to(ctx.rows_dtype), None, None, None, None


def main_grad(parameter: nn.Parameter) -> Tensor | None:
    """Return the float32 buffer of a parameter's gradient that Megatron calls ``main_grad``; None without one."""
    main = getattr(parameter, "main_grad", None)
    if not isinstance(main, Tensor) or main.dtype != torch.float32 or main.shape != parameter.shape:
        return None
    return main if main.is_contiguous() else None


def _add_to_main(
    parameter: nn.Parameter, main: Tensor, grad: Tensor, rows: Tensor, counts: Sequence[int], kernels: Kernels
) -> Tensor | None:
    kernels(add_weight_grad_, main, grad, rows, offsets(counts, grad))
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    # Megatron's hooks wait for a gradient, and this tells them not to add it: its values are never read.
    parameter.grad_added_to_main_grad = True
    return torch.empty_like(parameter)


def accumulate(gradients: Gradients) -> None:
    """Add to ``.grad`` through each parameter's own autograd node, so that hooks fire as in any backward."""
    if not gradients:
        return
    if all(parameter.grad is not None for parameter in gradients):
        torch.autograd.backward(list(gradients), list(gradients.values()))
        return
    # Autograd takes a first gradient as ``.grad`` without a copy only if nothing else refers to it.
    parameters, box = list(gradients), list(gradients.values())
    gradients.clear()
    with torch.enable_grad():
        root = _Deliver.apply(box, *parameters)
    torch.autograd.backward(root)


class _Deliver(torch.autograd.Function):
    """A scalar whose backward gives each parameter its gradient from the box."""

    @staticmethod
    def forward(ctx: Any, box: list[Tensor], *parameters: nn.Parameter) -> Tensor:
        ctx.box = box
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        delivered = (None, *ctx.box)
        ctx.box.clear()
        return delivered
