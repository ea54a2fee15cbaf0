"""Where gradients enter a graph that has been cut, and what they are computed by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from overlap1f1b.engine.weights import Gradients


class Root(NamedTuple):
    """A tensor of which only the graph is left: where its gradient goes, and what that looks like."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Root | None:
        """None where no gradient will come."""
        if not tensor.requires_grad:
            return None
        return cls(get_gradient_edge(tensor), tensor.shape, tensor.dtype, tensor.device)

    def checked(self, grad: Tensor, name: str) -> Tensor:
        """The gradient, broadcast from a scalar.

        Raises:
            ValueError: Another shape.
        """
        if grad.dim() and grad.shape != self.shape:
            raise ValueError(
                f"a gradient of shape {tuple(grad.shape)} for what {name} returns; allowed: {tuple(self.shape)}"
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
    # Its type allows tensors or edges, the function itself both together.
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
    """Gradients of the leaves, whose own hooks wait: they see the whole gradient when it is accumulated."""
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
    """Gradients of the leaves; those of parameters are added to ``.grad`` on the way.

    Without ``inputs``, which no checkpoint that runs a backward inside of this one would be compatible with.
    """
    if roots:
        torch.autograd.backward(cast("Sequence[Tensor]", roots), grads)
    return [leaf.grad for leaf in leaves]


def leaf(tensor: Tensor) -> Tensor:
    """A leaf of the same values, where a gradient is to come."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def present(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> Gradients:
    return {p: g for p, g in zip(parameters, grads, strict=True) if g is not None}


def dense(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad
