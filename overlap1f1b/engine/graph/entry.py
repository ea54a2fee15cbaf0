"""Tensors that enter a graph without their history."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overlap1f1b.transport.functions import direct, plain_apply


class Entry:
    """A place where a tensor enters a segment: it catches the gradient, and holds neither values nor graph.

    Args:
        tensor: The tensor, of which shape, dtype and device are kept.

    Attributes:
        grad: Gradient of the tensor; None before a backward has reached it.
    """

    __slots__ = ("device", "dtype", "grad", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.grad: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the gradient, or zeros if none has come."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device) if self.grad is None else self.grad

    def enter(self, tensor: Tensor, anchor: Tensor) -> Tensor:
        """Return the tensor without its history; it requires a gradient, which this entry will catch.

        Args:
            anchor: Any leaf that requires a gradient; it gets none.
        """
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        try:
            entered: Tensor = _enter(anchor, (tensor,), self)
        finally:
            torch._C._set_grad_enabled(before)
        return entered


@direct
class Enter(torch.autograd.Function):
    """The tensor as it is, in a graph of its own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: tuple[Tensor], entry: Entry) -> Tensor:
        ctx.entry = entry
        ctx.materialize_grads = False
        return tensor[0].detach()  # no view: it may be changed in place, and shares its version with the tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        entry = ctx.entry
        if grad is not None:
            entry.grad = grad if entry.grad is None else entry.grad + grad
        return None, None, None


_enter = plain_apply(Enter)
