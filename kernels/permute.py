"""Rows of tokens in the order of their experts, and the weighted sum that brings them back.

A *slot* is one (token, choice): slot ``t·K + k`` is the k-th expert of token ``t``. ``order [T·K]`` lists slots by
expert, equal experts by slot, so the rows that go to one rank lie side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sort_slots(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Slots in the order of their experts.

    >>> order, counts = sort_slots(torch.tensor([[2, 0], [0, 1]]), experts=3)
    >>> order.tolist(), counts.tolist()
    ([1, 2, 3, 0], [2, 1, 1])

    Args:
        indices: ``[T, K]`` int64, expert of each slot.
        experts: E.

    Returns:
        ``order [T·K]`` int64 and ``counts [E]`` int64.
    """
    flat = indices.reshape(-1)
    return flat.argsort(stable=True), torch.bincount(flat, minlength=experts)


def gather_rows(tokens: Tensor, order: Tensor, top_k: int) -> Tensor:
    """``[T, H] → [T·K, H]``: the token of each slot, in ``order``."""
    return tokens.index_select(0, order.div(top_k, rounding_mode="floor"))


def gather_rows_backward(grad_rows: Tensor, order: Tensor, top_k: int) -> Tensor:
    """``[T·K, H] → [T, H]``: the sum over a token's slots in the order of k, in float32 or wider."""
    return _sum_slots(grad_rows, _inverse(order), None, top_k)


def aggregate_rows(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what the experts returned.

    Args:
        rows: ``[T·K, H]``, in ``order``.
        order: ``[T·K]``.
        weights: ``[T, K]``.

    Returns:
        ``[T, H]`` in the dtype of ``rows``, summed over k in order, in float32 or wider.
    """
    return _sum_slots(rows, _inverse(order), weights, weights.shape[1])


def aggregate_rows_backward(grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients ``[T·K, H]`` of ``rows`` and ``[T, K]`` of ``weights`` from that ``[T, H]`` of their sum."""
    grad_slots = gather_rows(grad, order, weights.shape[1])
    wide = torch.promote_types(rows.dtype, torch.float32)
    grad_weights = torch.empty(order.shape[0], dtype=wide, device=rows.device)
    grad_weights[order] = torch.linalg.vecdot(grad_slots.to(wide), rows.to(wide))
    grad_rows = grad_slots.mul_(weights.reshape(-1, 1).index_select(0, order).to(rows.dtype))
    return grad_rows, grad_weights.view(weights.shape).to(weights.dtype)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse


def _sum_slots(rows: Tensor, inverse: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    slots = inverse.view(-1, top_k)
    total = torch.zeros(slots.shape[0], rows.shape[1], dtype=wide, device=rows.device)
    for k in range(top_k):  # in order, without atomics: the sum has the same bits every time
        choice = rows.index_select(0, slots[:, k]).to(wide)
        if weights is None:
            total.add_(choice)
        else:
            total.addcmul_(choice, weights[:, k : k + 1].to(wide))
    return total.to(rows.dtype)


class GatherRows(torch.autograd.Function):
    """:func:`gather_rows` for plain autograd."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return gather_rows(tokens, order, top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gather_rows_backward(grads[0], order, ctx.top_k), None, None


class AggregateRows(torch.autograd.Function):
    """:func:`aggregate_rows` for plain autograd."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, order, weights)
        return aggregate_rows(rows, order, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        grad_rows, grad_weights = aggregate_rows_backward(grads[0], *ctx.saved_tensors)
        return grad_rows, None, grad_weights
