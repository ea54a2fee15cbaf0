"""Tokens as rows in the order of their experts.

Triton reads a token once and writes its K rows, so ``(1 + K)·T·H`` elements move: in bfloat16 528 MB for T4096 H7168 K8
and 302 MB for T8192 H2048 K8, computed 123 and 70 µs at 4.3 TB/s. ``tokens[index]`` reads it K times. The backward is
the sum of :mod:`~overlap1f1b.kernels.combine`, with as many bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels, run
from overlap1f1b.kernels.combine import sum_rows
from overlap1f1b.kernels.slots import Slots, invert
from overlap1f1b.kernels.take import take_rows


def spread_rows(tokens: Tensor, order: Tensor, inverse: Tensor, top_k: int, partial: bool = False) -> Tensor:
    """``[T, H] → [R, H]``: the token of each row's slot.

    Args:
        tokens: ``[T, H]``.
        order: ``[R]`` int64, the slot of each row; −1 for padding, whose row is zero.
        inverse: ``[T·K]`` int64, the row of each slot; −1 for none.
        top_k: K.
        partial: Whether −1 occurs in either.
    """
    token = order.div(top_k, rounding_mode="floor")
    return take_rows(tokens, token.masked_fill(order < 0, -1) if partial else token, partial)


def spread_weighted(
    tokens: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, partial: bool = False
) -> tuple[Tensor, Tensor]:
    """:func:`spread_rows`, and the weight of each row ``[R]`` from ``weights [T, K]``, zero for padding."""
    rows = spread_rows(tokens, order, inverse, weights.shape[1], partial)
    return rows, take_rows(weights.reshape(-1, 1), order, partial).squeeze(1)


def gather_rows(
    tokens: Tensor, order: Tensor, top_k: int, inverse: Tensor | None = None, kernels: Kernels | None = None
) -> Tensor:
    """``[T, H] → [T·K, H]``: the token of each slot, in ``order``.

    Args:
        tokens: ``[T, H]``.
        order: ``[T·K]`` int64.
        top_k: K.
        inverse: That of ``order``, where it is known.
        kernels: What it runs by; its twin by default.
    """
    if kernels is None:
        return spread_rows(tokens, order, order, top_k)  # the twin has no need of the inverse
    return run(kernels, spread_rows, tokens, order, invert(order) if inverse is None else inverse, top_k)


def gather_rows_backward(
    grad_rows: Tensor, order: Tensor, top_k: int, inverse: Tensor | None = None, kernels: Kernels | None = None
) -> Tensor:
    """``[T·K, H] → [T, H]``: the sum over a token's slots in the order of k, in float32 or wider."""
    return run(kernels, sum_rows, grad_rows, invert(order) if inverse is None else inverse, top_k)


class GatherRows(torch.autograd.Function):
    """:func:`gather_rows` for plain autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        order: Tensor,
        top_k: int,
        inverse: Tensor | None = None,
        kernels: Kernels | None = None,
    ) -> Tensor:
        inverse = invert(order) if inverse is None else inverse
        ctx.save_for_backward(order, inverse)
        ctx.top_k, ctx.kernels = top_k, kernels
        return gather_rows(tokens, order, top_k, inverse, kernels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        order, inverse = ctx.saved_tensors
        return gather_rows_backward(grads[0], order, ctx.top_k, inverse, ctx.kernels), None, None, None, None


class PermuteRows(torch.autograd.Function):
    """Tokens ``[T, H]`` and weights ``[T, K]`` → rows ``[R, H]`` and the weight of each ``[R]``, padding included.

    For experts that apply the weight themselves (:mod:`~overlap1f1b.kernels.swiglu`), so that combining is a plain sum.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor, slots: Slots, kernels: Kernels | None = None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(slots.inverse)
        ctx.shape, ctx.kernels = weights.shape, kernels
        return run(kernels, spread_weighted, tokens, weights, slots.order, slots.inverse, True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,), (rows, weights) = ctx.saved_tensors, grads
        grad_tokens = run(ctx.kernels, sum_rows, rows, inverse, ctx.shape[1], None, True)
        grad_weights = run(ctx.kernels, take_rows, weights.unsqueeze(1), inverse, True)
        return grad_tokens, grad_weights.view(ctx.shape), None, None
