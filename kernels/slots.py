"""Where each choice of a token lies when rows are sorted by expert.

A *slot* is one (token, choice): slot ``t·K + k`` is the k-th expert of token ``t``. A *row* is a place in the sorted
order: rows of equal experts lie side by side, so those that go to one rank do, and among them slots stay in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """The two maps between slots and rows.

    Args:
        order: ``[rows]`` int64, the slot of each row; −1 for a row that has none.
        inverse: ``[T·K]`` int64, the row of each slot; −1 for a slot that has none.
        counts: ``[E]`` int64, slots of each expert.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor


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


def place_slots(indices: Tensor, experts: int) -> Slots:
    """The order of :func:`sort_slots` with its inverse, without a look at values on the host.

    >>> order, inverse, counts = place_slots(torch.tensor([[2, 0], [0, 1]]), 3)
    >>> order.tolist(), inverse.tolist(), counts.tolist()
    ([1, 2, 3, 0], [3, 0, 1, 2], [2, 1, 1])

    Histogram, offsets and inverse, in three launches of Triton: a few MB (B of the docs: 65,536 slots of 128 experts,
    0.5 MB of indices and 1 MB of maps), so launches are what it costs; torch sorts, in about a dozen.

    Args:
        indices: ``[T, K]`` int64, expert of each slot. A slot whose index names no expert gets no row and is not
            counted: ``counts.sum() < T·K`` tells.
        experts: E.
    """
    flat = indices.reshape(-1)
    # One more bin for what names no expert: it sorts behind all others.
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = key.argsort(stable=True)
    every = torch.zeros(experts + 1, dtype=torch.int64, device=key.device)
    counts = every.scatter_add_(0, key, torch.ones_like(key))[:experts]
    row = torch.arange(len(key), device=key.device)
    lost = row >= counts.sum()
    inverse = torch.empty_like(row)
    inverse[order] = row.masked_fill(lost, -1)
    return Slots(order.masked_fill_(lost, -1), inverse, counts)


def invert(order: Tensor) -> Tensor:
    """The row of each slot, from the slot of each row, where both are all there."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse
