"""Rows by their number, and back: what regroups received rows by expert."""

from __future__ import annotations

from torch import Tensor


def take_rows(rows: Tensor, index: Tensor, partial: bool = False) -> Tensor:
    """``rows[index]``; zeros where the index is −1.

    >>> take_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, -1, 0]), True).tolist()
    [[2.0], [0.0], [1.0]]

    ``2·R·H`` elements move: in bfloat16 537 MB for R65536 H2048, computed 125 µs at 4.3 TB/s.

    Args:
        rows: ``[N, H]``.
        index: ``[R]`` int64.
        partial: Whether −1 occurs; the twin looks for it only then.

    Returns:
        ``[R, H]``.
    """
    if not partial:
        return rows.index_select(0, index)
    if not rows.shape[0]:
        return rows.new_zeros(index.shape[0], rows.shape[1])
    return rows.index_select(0, index.clamp(min=0)).masked_fill_((index < 0).unsqueeze(1), 0)


def put_rows(rows: Tensor, index: Tensor) -> Tensor:
    """The inverse of :func:`take_rows` for an index that is a permutation: ``out[index] = rows``."""
    return rows.new_empty(rows.shape).index_copy_(0, index, rows)
