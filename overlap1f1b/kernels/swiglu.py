"""SwiGLU of experts, optionally times the routing weight of each row: ``silu(gate) · up · p``.

If the weight is applied here, combine is a plain sum, and this backward gives the weight's gradient. Only the inputs
are saved for the backward, which computes the activation again.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels


def swiglu_rows(gate_up: Tensor, weights: Tensor | None = None, count: Tensor | None = None) -> Tensor:
    """Return ``silu(gate) · up``, ``[R, I]``, of ``gate_up [R, 2·I]`` side by side, times ``weights [R]``.

    Weights may have a wider dtype. From row ``count [1]`` on, int32 or int64 on the device, padding gives zeros.
    """
    gate, up = rearrange(gate_up, "R (two I) -> two R I", two=2)
    y = F.silu(gate) * up
    if weights is not None:
        y = (y * rearrange(weights, "R -> R 1")).to(y.dtype)
    return y if count is None else y.masked_fill(_beyond(y, count), 0)


def swiglu_rows_backward(
    grad: Tensor, gate_up: Tensor, weights: Tensor | None = None, count: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return gradients ``[R, 2·I]`` of ``gate_up`` and ``[R]`` of the weights from the result's ``[R, I]``."""
    gate, up = rearrange(gate_up, "R (two I) -> two R I", two=2)
    silu = F.silu(gate)
    grad_y, grad_weights = grad, None
    if weights is not None:
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad_weights = torch.linalg.vecdot(grad.to(wide), (silu * up).to(wide)).to(weights.dtype)
        grad_y = (grad * rearrange(weights, "R -> R 1")).to(grad.dtype)
    grads = torch.cat([torch.ops.aten.silu_backward(grad_y * up, gate), grad_y * silu], dim=-1)
    if count is not None:
        grads = grads.masked_fill(_beyond(grads, count), 0)
        grad_weights = None if grad_weights is None else grad_weights.masked_fill(_beyond(grads, count).squeeze(1), 0)
    return grads, grad_weights


def _beyond(rows: Tensor, count: Tensor) -> Tensor:
    return (torch.arange(rows.shape[0], device=rows.device) >= count).unsqueeze(1)


class WeightedSwiGLU(torch.autograd.Function):
    """:func:`swiglu_rows` with its own backward, for which only the inputs are saved."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None, count: Tensor | None, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(gate_up, weights, count)
        ctx.kernels = kernels
        return kernels(swiglu_rows, gate_up, weights, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weights, count = ctx.saved_tensors
        return *ctx.kernels(swiglu_rows_backward, grads[0].contiguous(), gate_up, weights, count), None, None


def swiglu(gate_up: Tensor, kernels: Kernels, weights: Tensor | None = None, count: Tensor | None = None) -> Tensor:
    """Return :func:`swiglu_rows` of ``[…, 2·I]`` in autograd; without weights and Triton by torch's own ops.

    Torch's ops save ``silu(gate)`` instead of computing it again, which is faster on a CPU. They do not zero padding.
    """
    flat = gate_up.flatten(0, -2)
    if weights is not None or kernels.uses_triton(swiglu_rows, flat):
        return WeightedSwiGLU.apply(flat, weights, count, kernels).unflatten(0, gate_up.shape[:-1])
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
