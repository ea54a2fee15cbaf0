"""Positions of each token's choices, in rows sorted by expert or in equal room for every destination.

A *slot* is one (token, choice): slot ``t·K + k`` is the k-th expert of token ``t``. A *row* is a position in the sorted
order: rows of one expert are contiguous, so rows for one rank are too; within an expert slots keep their order.

:func:`pack_slots` gives each of D destinations, ranks or experts, room for C rows, so the host needs no sizes. Free
room holds zeros. Rows without room are left out and counted in ``dropped``. :func:`group_places` groups received rows
by expert. Nothing is copied to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels


class Slots(NamedTuple):
    """Maps between slots and rows.

    Args:
        order: ``[rows]`` int64, the slot of each row; −1 for a row without a slot.
        inverse: ``[T·K]`` int64, the row of each slot; −1 for a slot without a row.
        counts: ``[E]`` int64, slots of each expert.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor


def sort_slots(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the slots in the order of their experts.

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
    """Return the order of :func:`sort_slots` with its inverse, without reading values on the host.

    >>> order, inverse, counts = place_slots(torch.tensor([[2, 0], [0, 1]]), 3)
    >>> order.tolist(), inverse.tolist(), counts.tolist()
    ([1, 2, 3, 0], [3, 0, 1, 2], [2, 1, 1])

    Triton needs three launches: histogram, offsets and inverse. They are its cost; torch sorts, in about a dozen.

    Args:
        indices: ``[T, K]`` int64, expert of each slot. A slot whose index names no expert gets no row and is not
            counted: then ``counts.sum() < T·K``.
        experts: E.
    """
    flat = indices.reshape(-1)
    # One more bin, after all others, is for indices that name no expert.
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = key.argsort(stable=True)
    every = torch.zeros(experts + 1, dtype=torch.int64, device=key.device)
    counts = every.scatter_add_(0, key, torch.ones_like(key))[:experts]
    row = torch.arange(len(key), device=key.device)
    lost = row >= counts.sum()
    inverse = torch.empty_like(row)
    inverse[order] = row.masked_fill(lost, -1)
    return Slots(order.masked_fill_(lost, -1), inverse, counts)


class Groups(NamedTuple):
    """Maps between rows as they are received, by source and then by expert, and rows grouped by expert.

    Args:
        order: ``[R]`` int64, the received position of each grouped row; −1 behind the last expert's rows.
        inverse: ``[R]`` int64, the grouped position of each received row; −1 for padding.
        ends: ``[E_local]`` int32, the end of each expert's grouped rows.
    """

    order: Tensor
    inverse: Tensor
    ends: Tensor


def group_places(arrived: Tensor, rows: int, padded: bool = False) -> Groups:
    """Return the maps of received rows; within an expert they keep the order of their sources.

    >>> order, inverse, ends = group_places(torch.tensor([[1, 2], [1, 0]]), 4)
    >>> order.tolist(), inverse.tolist(), ends.tolist()
    ([0, 3, 1, 2], [0, 2, 3, 1], [2, 4])

    Args:
        arrived: ``[ranks, E_local]`` int64, rows of each source and expert.
        rows: R.
        padded: Whether every source has equal room, R / ranks, with padding behind its rows.
    """
    (ranks, local), sizes = arrived.shape, arrived
    if padded:  # of one more expert, the last
        sizes = torch.cat([arrived, rows // ranks - arrived.sum(1, keepdim=True)], 1)
    by_source, by_expert = sizes.reshape(-1), sizes.t().reshape(-1)
    ends = by_expert.cumsum(0)
    begins = (by_source.cumsum(0) - by_source).view(sizes.shape).t().reshape(-1)
    row = torch.arange(rows, device=arrived.device)
    order = row + (begins - (ends - by_expert)).repeat_interleave(by_expert, output_size=rows)
    inverse = torch.empty_like(order)
    inverse[order] = row
    ends = ends.view(-1, ranks)[:local, -1].to(torch.int32)
    if padded:
        order.masked_fill_(row >= ends[-1], -1)
        inverse.masked_fill_(inverse >= ends[-1], -1)
    return Groups(order, inverse, ends)


def invert(order: Tensor) -> Tensor:
    """Return the row of each slot from the slot of each row; ``order`` is a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse


class Packing(NamedTuple):
    """Maps between slots and positions in equal room for every destination.

    Args:
        order: ``[D·C]`` int64, the slot of each position, −1 for a free position; sorted by expert for each
            destination.
        inverse: ``[T·K]`` int64, the position of each slot, −1 for a slot that was left out.
        counts: ``[E]`` int64, packed rows of each expert.
        dropped: ``[E]`` int64, rows of each expert without room; their sum is zero if no row was lost.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor
    dropped: Tensor


def pack_slots(indices: Tensor, experts: int, destinations: int, capacity: int, kernels: Kernels) -> Packing:
    """Return positions for the slots of ``indices [T, K]``.

    >>> order, inverse, counts, dropped = pack_slots(torch.tensor([[0], [0], [1], [0]]), 2, 2, 2, Kernels("torch"))
    >>> order.view(2, 2).tolist(), inverse.tolist(), dropped.tolist()
    ([[0, 1], [2, -1]], [0, 1, 2, -1], [1, 0])

    Args:
        indices: ``[T, K]`` int64, expert of each slot.
        experts: E.
        destinations: D, which divides E: destination d has experts ``d·E/D`` to ``(d+1)·E/D − 1``.
        capacity: C, rows of each destination.
    """
    slots = kernels(place_slots, indices, experts)
    by_destination = slots.counts.view(destinations, -1)
    before = by_destination.cumsum(1) - by_destination  # rows of a destination before the expert's rows
    counts = torch.minimum((capacity - before).clamp_(min=0), by_destination).view(-1)
    order, inverse = kernels(pack_places, *slots, destinations, capacity)
    return Packing(order, inverse, counts, slots.counts - counts)


def pack_places(
    order: Tensor, inverse: Tensor, counts: Tensor, destinations: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """Return the maps of a :class:`Packing` from the maps of :class:`Slots`."""
    ends = counts.view(destinations, -1).sum(1).cumsum(0)
    row = torch.arange(len(order), device=order.device)
    destination = torch.searchsorted(ends, row, right=True).clamp_(max=destinations - 1)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    within = row - starts[destination]
    lost = (within >= capacity) | (order < 0)
    place = (destination * capacity + within).masked_fill_(lost, -1)
    rows = destinations * capacity
    packed = torch.full((rows + 1,), -1, dtype=torch.int64, device=order.device)  # the last: slots without a place
    packed[place.masked_fill(lost, rows)] = order
    placed = torch.cat([place, place.new_full((1,), -1)])  # an inverse of −1 stays −1
    return packed[:rows], placed[inverse]
