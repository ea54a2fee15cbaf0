"""Sums of rows, weighted or not, without atomics: of a row's choices, and of the rows that a token was sent in."""

import torch
from einops import rearrange
from torch import Tensor

from overlap1f1b.kernels.permute import Layout, take_rows


def sum_rows(rows: Tensor, inverse: Tensor, width: int, weights: Tensor | None = None, partial: bool = True) -> Tensor:
    """Sum groups of ``width`` rows of ``[C, H]``, possibly a part of longer rows, in order, in float32 or wider.

    ``inverse [R·K]`` int64 has the K rows of each sum, −1, if ``partial``, for none; ``weights [C]`` are factors.
    Returns ``[R, H]`` in the dtype of ``rows``.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    columns = rearrange(inverse, "(R K) -> K R", K=width)
    total = torch.zeros(columns.shape[1], rows.shape[1], dtype=wide, device=rows.device)
    for column in columns:  # in order, without atomics: the sum has the same bits every time
        here = None
        if partial and column.is_cpu:  # most rows may have few: a device skips the others by itself
            here = (column >= 0).nonzero().squeeze(1)
            column = column[here]  # noqa: PLW2901
        missing = partial and here is None
        part = take_rows(rows, column, missing).to(wide)
        if weights is not None:
            part = part * take_rows(rearrange(weights, "C -> C 1"), column, missing).to(wide)
        total = total.add_(part) if here is None else total.index_add_(0, here, part)
    return total.to(rows.dtype)


def spread_grad(
    grad: Tensor, rows: Tensor, order: Tensor, inverse: Tensor, weights: Tensor, padded: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`sum_rows`, ``[C, H]`` and ``[C]``, from ``grad [R, H]`` of the sums.

    ``order [C]`` int64 is the place of each row in ``inverse``: −1, if ``padded``, for padding, which gets zeros. The
    weights' are dot products in float32 or wider.
    """
    width = len(inverse) // max(len(grad), 1)
    wide = torch.promote_types(rows.dtype, torch.float32)
    row = order.div(max(width, 1), rounding_mode="floor")
    grads = take_rows(grad, row.masked_fill_(order < 0, -1) if padded else row, padded)
    dots = torch.linalg.vecdot(grads.to(wide), rows.to(wide)).to(wide)  # narrower in a backward under autocast
    return grads.mul_(rearrange(weights.to(rows.dtype), "C -> C 1")), dots.to(weights.dtype)


def pack_grads(rows: Tensor, weights: Tensor, inverse: Tensor, layout: Layout, partial: bool = True) -> Tensor:
    """Return the gradients ``[R, W]`` of received rows, from ``[C, H]`` of each choice and ``[C]`` of its weight.

    ``inverse [R·K]`` int64 is the choice of each spot; −1, if ``partial``, for none.
    """
    packed = rows.new_empty(len(inverse) // layout.choices, layout.width)
    of_rows, of_weights, between = layout.opened(packed)
    of_rows.copy_(sum_rows(rows, inverse, layout.choices, None, partial))
    of_weights.copy_(take_rows(rearrange(weights, "C -> C 1"), inverse, partial).view_as(of_weights))
    between.zero_()
    return packed


def open_grads(packed: Tensor, inverse: Tensor, spots: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the gradients of tokens ``[T, H]`` and of weights ``[T, K]`` from those of sent rows ``[R, W]``.

    ``inverse`` and ``spots`` are those of :class:`~overlap1f1b.kernels.slots.Places`.
    """
    rows, weights, _ = layout.opened(packed)
    of_weights = take_rows(rearrange(weights, "R K -> (R K) 1"), spots.view(-1), True).view(spots.shape)
    return sum_rows(rows, inverse, spots.shape[1]), of_weights
