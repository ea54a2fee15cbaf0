"""Blocks that use the weights of two layers in odd ways: twice, in a checkpoint, in a function that runs them again."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.play.test_recompute_checkpoints import plainly, selective


class Again(torch.autograd.Function):
    """Runs a function a second time in its own backward, and walks that graph, as kernels of others do."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.function, ctx.weights = function, len(weights)
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad, *[None] * ctx.weights


class Odd(nn.Module):
    """Two linear layers, used in a way that has a name, a key of ``HOWS`` or ``"part"``."""

    def __init__(self, how: str, size: int) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        if how == "computed weight":
            self.first = weight_norm(self.first)
        if how == "frozen":
            self.first.requires_grad_(requires_grad=False)
        if how == "hooks":
            self.first.register_full_backward_hook(lambda module, into, out: (2 * into[0],))
            self.second.weight.register_hook(lambda grad: 3 * grad)

    def forward(self, x: Tensor) -> Tensor:
        return x + getattr(self, self.how.replace(" ", "_"), self.part)(x)

    def part(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())

    def checkpoint(self, x: Tensor) -> Tensor:
        return plainly(self.part, x)

    def policy(self, x: Tensor) -> Tensor:
        return selective(self.part, x)

    def half_a_checkpoint(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(lambda x: self.first(x).tanh().sin(), x, use_reentrant=False))

    def again(self, x: Tensor) -> Tensor:
        return Again.apply(self.part, x, self.first.weight, self.second.weight)

    def layer_twice(self, x: Tensor) -> Tensor:
        return self.first(self.part(x))

    def weight_twice(self, x: Tensor) -> Tensor:
        return self.part(x) + F.linear(x, self.first.weight) * self.second.weight.sum()

    def in_place(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).mul_(2).add_(x))

    def hooks_of_saved(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
            return self.part(x)


HOWS = (
    "checkpoint",
    "weight twice",
    "again",
    *("policy", "half a checkpoint", "layer twice", "in place", "hooks of saved", "computed weight", "frozen", "hooks"),
)
