"""Rows moved by number: tokens in the order of their experts, and received rows grouped by expert.

In :func:`spread_rows` Triton reads a token once, where ``tokens[index]`` reads it K times. Its backward is the sum of
:mod:`~overlap1f1b.kernels.combine`.

In :func:`spread_weighted` a row that carries its weight is 16 bytes longer. The last of these bytes hold all bits of
the weight. All rows begin at a multiple of 16 bytes, as wide loads and torch's grouped product need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CARRIED = 16
"""Least number of bytes after a row for its weight."""


def spread_rows(tokens: Tensor, order: Tensor, inverse: Tensor, top_k: int, partial: bool = False) -> Tensor:
    """Return ``[R, H]``, the token of each row's slot.

    Args:
        tokens: ``[T, H]``.
        order: ``[R]`` int64, the slot of each row; −1 for padding, whose row is zero.
        inverse: ``[T·K]`` int64, the row of each slot; −1 for none.
        top_k: K.
        partial: Whether −1 occurs in either.
    """
    token = order.div(top_k, rounding_mode="floor")
    return take_rows(tokens, token.masked_fill(order < 0, -1) if partial else token, partial)


def carrying(like: Tensor, rows: int, hidden: int) -> Tensor:
    """Return empty rows ``[R, W]`` with H elements each, and zeros after them for a weight; see :func:`opened`."""
    size = like.element_size()
    room = like.new_empty(rows, (-(-hidden * size // CARRIED) + 1) * CARRIED // size)
    room[:, hidden:] = 0  # uninitialised memory must not be sent, and may hold a NaN
    return room


def opened(rows: Tensor, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return views of rows ``[R, W]`` that carry weights: the rows ``[R, H]`` and their weights ``[R]`` of a dtype.

    >>> rows = carrying(torch.empty(0), 3, 5)  # [3, 12]
    >>> [tuple(part.shape) for part in opened(rows, 5, torch.float32)]
    [(3, 5), (3,)]
    """
    return rows[:, :hidden], rows.view(dtype)[:, -(CARRIED // dtype.itemsize)]


def spread_weighted(tokens: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, partial: bool = False) -> Tensor:
    """Return :func:`spread_rows` with ``weights [T, K]`` in the rows, zero for padding: ``[R, W]``."""
    carried = carrying(tokens, len(order), tokens.shape[1])
    rows, factors = opened(carried, tokens.shape[1], weights.dtype)
    rows.copy_(spread_rows(tokens, order, inverse, weights.shape[1], partial))
    factors.copy_(take_rows(weights.reshape(-1, 1), order, partial).squeeze(1))
    return carried


class OpenRows(torch.autograd.Function):
    """:func:`opened`; in its backward the rows' gradients carry the weights' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.dtype = dtype
        return opened(rows, hidden, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        hidden = grads[0].shape[1]
        carried = carrying(grads[0], len(grads[0]), hidden)
        for part, grad in zip(opened(carried, hidden, ctx.dtype), grads, strict=True):
            part.copy_(grad)
        return carried, None, None


def take_rows(rows: Tensor, index: Tensor, partial: bool = False) -> Tensor:
    """Return ``rows[index]``, with zeros for an index of −1.

    >>> take_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, -1, 0]), True).tolist()
    [[2.0], [0.0], [1.0]]

    Args:
        rows: ``[N, H]``.
        index: ``[R]`` int64.
        partial: Whether −1 occurs; otherwise the twin does not look for it.

    Returns:
        ``[R, H]``.
    """
    if not partial:
        return rows.index_select(0, index)
    if not rows.shape[0]:
        return rows.new_zeros(index.shape[0], rows.shape[1])
    return rows.index_select(0, index.clamp(min=0)).masked_fill_((index < 0).unsqueeze(1), 0)
