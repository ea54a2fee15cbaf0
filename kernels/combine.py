"""Sum of a token's K returned rows, weighted or not, without atomics."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap1f1b.kernels.permute import take_rows


def sum_rows(rows: Tensor, inverse: Tensor, top_k: int, weights: Tensor | None = None, partial: bool = False) -> Tensor:
    """Sum the rows of each token.

    Args:
        rows: ``[R, H]``, possibly a part of longer rows.
        inverse: ``[T·K]`` int64, the row of each slot; −1 for a slot without a row.
        top_k: K.
        weights: ``[T, K]``, factor of each row; None for 1.
        partial: Whether −1 occurs; otherwise the twin does not look for it.

    Returns:
        ``[T, H]`` in the dtype of ``rows``, summed over k in order, in float32 or wider.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    slots = inverse.view(-1, top_k)
    total = torch.zeros(slots.shape[0], rows.shape[1], dtype=wide, device=rows.device)
    for k in range(top_k):  # in order, without atomics: the sum has the same bits every time
        choice = take_rows(rows, slots[:, k], partial).to(wide)
        if weights is None:
            total.add_(choice)
        else:
            total.addcmul_(choice, weights[:, k : k + 1].to(wide))
    return total.to(rows.dtype)


def spread_grad(
    grad: Tensor, rows: Tensor, order: Tensor, inverse: Tensor, weights: Tensor, partial: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weighted sum.

    Args:
        grad: ``[T, H]``, gradient of the sum.
        rows: ``[R, H]``, the summed rows.
        order: ``[R]`` int64, the slot of each row, −1 for padding.
        inverse: ``[T·K]`` int64, the row of each slot, −1 for none.
        weights: ``[T, K]``.
        partial: Whether −1 occurs in either.

    Returns:
        ``[R, H]`` of the rows, zeros for padding, and ``[T, K]`` of the weights, dot products in float32 or wider.
    """
    top_k = weights.shape[1]
    wide = torch.promote_types(rows.dtype, torch.float32)
    token = order.div(top_k, rounding_mode="floor")
    grad_slots = take_rows(grad, token.masked_fill(order < 0, -1) if partial else token, partial)
    dots = torch.linalg.vecdot(grad_slots.to(wide), rows.to(wide)).to(wide)  # narrower in a backward under autocast
    if partial:
        grad_weights = take_rows(dots.unsqueeze(1), inverse, True)
        factor = take_rows(weights.reshape(-1, 1), order, True)
    else:
        grad_weights = torch.empty(order.shape[0], dtype=wide, device=rows.device)
        grad_weights[order] = dots
        factor = weights.reshape(-1, 1).index_select(0, order)
    return grad_slots.mul_(factor.to(rows.dtype)), grad_weights.view(weights.shape).to(weights.dtype)
