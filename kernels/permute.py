"""Tokens as rows in the order of their experts, perhaps each with its routing weight behind it.

Triton reads a token once and writes its K rows, so ``(1 + K)·T·H`` elements move: in bfloat16 528 MB for T4096 H7168 K8
and 302 MB for T8192 H2048 K8, computed 123 and 70 µs at 4.3 TB/s. ``tokens[index]`` reads it K times. The backward is
the sum of :mod:`~overlap1f1b.kernels.combine`, with as many bytes.

A row that carries its weight is 16 bytes longer, in the last of which the weight stands with all its bits: whatever
moves the row moves the weight. At H2048 in bfloat16 that is 0.4 % of the bytes. All rows begin at a multiple of 16
bytes, as wide loads and torch's grouped product want it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overlap1f1b.kernels.take import take_rows

CARRIED = 16
"""Bytes behind a row for its weight."""


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


def carrying(like: Tensor, rows: int, hidden: int) -> Tensor:
    """Room ``[R, W]`` for rows of H elements that carry a weight each, see :func:`opened`; zeros behind the rows."""
    size = like.element_size()
    room = like.new_empty(rows, (-(-hidden * size // CARRIED) + 1) * CARRIED // size)
    room[:, hidden:] = 0  # nobody is to send, or find a NaN in, what happened to lie there
    return room


def opened(rows: Tensor, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``[R, W]`` that carry weights of a dtype → the rows ``[R, H]`` and their weights ``[R]``, both views.

    >>> rows = carrying(torch.empty(0), 3, 5)  # [3, 12]
    >>> [tuple(part.shape) for part in opened(rows, 5, torch.float32)]
    [(3, 5), (3,)]
    """
    return rows[:, :hidden], rows.view(dtype)[:, -(CARRIED // dtype.itemsize)]


def spread_weighted(tokens: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, partial: bool = False) -> Tensor:
    """:func:`spread_rows` that carry ``weights [T, K]``, zero for padding: ``[R, W]``."""
    carried = carrying(tokens, len(order), tokens.shape[1])
    rows, factors = opened(carried, tokens.shape[1], weights.dtype)
    rows.copy_(spread_rows(tokens, order, inverse, weights.shape[1], partial))
    factors.copy_(take_rows(weights.reshape(-1, 1), order, partial).squeeze(1))
    return carried


class OpenRows(torch.autograd.Function):
    """:func:`opened`; its backward has the gradients of the weights carried by those of the rows."""

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
