"""Calls of linear layers and products of experts that leave their weight gradients to a queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlap1f1b.engine.graph.autograd import WeightQueue, split_grouped_mm, split_linear
from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.moe.experts import GroupedProduct


class Owner(Protocol):
    """The owner of the queue to which the forward that runs now leaves its weight gradients."""

    queue: WeightQueue
    anchor: Tensor


def split_forward(owner: Owner, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return the forward of a linear layer that leaves its weight gradient to its owner's queue."""

    def forward(input: Tensor) -> Tensor:
        weight, bias = linear.weight, linear.bias
        # It was frozen since. Or torch.func has put a tensor in its place, or transforms a call and knows no Function.
        plain = not isinstance(weight, nn.Parameter) or not weight.requires_grad
        if plain or torch._C._are_functorch_transforms_active():
            return F.linear(input, weight, bias)
        return split_linear(input, (weight,), bias, owner.queue, owner.anchor)

    return forward


def split_product(owner: Owner, kernels: Kernels | None) -> GroupedProduct:
    """Return the grouped product of experts that leaves its weight gradient to its owner's queue.

    ``kernels`` adds the gradient to ``main_grad``, see :func:`split_grouped_mm`; None where gradients go to ``.grad``.
    """

    def product(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
        anchor = owner.anchor if weight.requires_grad else None
        return split_grouped_mm(rows, (weight,), counts, owner.queue, kernels, anchor)

    return product


def splits(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a plain ``nn.Linear`` with a trained real weight (no parametrization, no subclass)."""
    return (
        type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
        and (weight := module._parameters.get("weight")) is not None
        and weight.requires_grad
        and not weight.is_complex()
    )
