"""Gradients on their way: where they enter a graph, where those of weights wait, and how they get to ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from overlap1f1b.cut.edges import backward, edge_of

Gradients = dict[nn.Parameter, Tensor]


class Root(NamedTuple):
    """The graph of a tensor without the tensor: where its gradient enters, and the gradient's shape and dtype."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def at(cls, tensor: Tensor) -> Root | None:
        """Return the root of a tensor; None if it requires no gradient."""
        if not tensor.requires_grad:
            return None
        return cls(edge_of(tensor), tensor.shape, tensor.dtype, tensor.device)

    def checked(self, grad: Tensor, name: str) -> Tensor:
        """Return a gradient, for the block ``name``, on the tensor's device and in its dtype; a scalar is broadcast."""
        if grad.dim() and grad.shape != self.shape:
            raise ValueError(
                f"a gradient of shape {tuple(grad.shape)} for an output of {name}; allowed: {tuple(self.shape)}"
            )
        if (grad.device, grad.dtype) != (self.device, self.dtype):
            grad = grad.to(self.device, self.dtype)
        return grad if grad.shape == self.shape else grad.expand(self.shape)


class WeightQueue:
    """Weight gradients that one backward of one microbatch has left for later."""

    def __init__(self) -> None:
        self._waiting: list[tuple[nn.Parameter, Callable[[], Tensor | None]]] = []
        self._ready: Gradients = {}

    def put(self, weight: nn.Parameter, gradient: Callable[[], Tensor | None]) -> None:
        """Leave a gradient to be computed later; ``gradient`` returns None if it has added it elsewhere."""
        self._waiting.append((weight, gradient))

    def keep(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Keep a gradient that is computed already, to be added to the queued gradients of the same parameter."""
        self._ready[weight] = self._ready[weight] + gradient if weight in self._ready else gradient

    def move(self, weights: Collection[nn.Parameter], other: WeightQueue) -> None:
        """Leave the gradients of some parameters to another queue."""
        other._waiting += [entry for entry in self._waiting if entry[0] in weights]
        self._waiting = [entry for entry in self._waiting if entry[0] not in weights]

    def take(self) -> list[tuple[nn.Parameter, Callable[[], Tensor | None]]]:
        """Return the gradients that are left for later, and empty the queue."""
        taken, self._waiting = self._waiting, []
        return taken

    def compute(self) -> Gradients:
        """Return all gradients, summed per parameter, and empty the queue."""
        total, self._ready = self._ready, {}
        for weight, gradient in self._waiting:
            found = gradient()
            if found is not None and (before := total.setdefault(weight, found)) is not found:
                total[weight] = before + found
        self._waiting = []
        return total


def accumulate(gradients: Gradients) -> None:
    """Add to ``.grad`` through each parameter's own autograd node, so that hooks fire as in any backward."""
    if not gradients:
        return
    for parameter in gradients:
        if parameter.is_leaf and parameter.grad is None:  # a parametrised weight is no leaf
            break
    else:
        backward(list(gradients), list(gradients.values()))
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
