"""Rows in equal slots for every destination: exchanges of sizes that no host has to know.

Each of D destinations, a rank or an expert, has room for C rows. What is left free is zeros; what finds no room is left
out, and said: ``dropped`` names the rows of each expert that were. Nothing is copied to the host.

Triton reads a token for each of its rows and writes every place once, zeros included: in bfloat16 for T8192 H2048 K8
with room for a quarter more, ``(K + 1.25·K)·T·H``, 604 MB, computed 140 µs at 4.3 TB/s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels, run
from overlap1f1b.kernels.slots import Slots, place_slots


class Packing(NamedTuple):
    """Which slot lies where.

    Args:
        order: ``[D·C]`` int64, the slot of each place, −1 for a free one. Places of a destination are sorted by expert.
        inverse: ``[T·K]`` int64, the place of each slot, −1 for one that was left out.
        counts: ``[E]`` int64, packed rows of each expert.
        dropped: ``[E]`` int64, rows of each expert that found no room; they sum to zero if nothing was lost.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor
    dropped: Tensor


def pack_slots(indices: Tensor, experts: int, destinations: int, capacity: int, kernels: Kernels | None) -> Packing:
    """Places for the slots of ``indices [T, K]``.

    >>> order, inverse, counts, dropped = pack_slots(torch.tensor([[0], [0], [1], [0]]), 2, 2, 2, None)
    >>> order.view(2, 2).tolist(), inverse.tolist(), dropped.tolist()
    ([[0, 1], [2, -1]], [0, 1, 2, -1], [1, 0])

    Args:
        indices: ``[T, K]`` int64, expert of each slot.
        experts: E.
        destinations: D, which divides E: destination d has experts ``d·E/D`` to ``(d+1)·E/D − 1``.
        capacity: C, rows of each destination.
        kernels: What it runs by; its twin without any.

    Raises:
        ValueError: D does not divide E; C is negative.
    """
    if destinations < 1 or experts % destinations:
        allowed = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ValueError(f"{experts} experts for destinations={destinations}; allowed: {allowed}")
    if capacity < 0:
        raise ValueError(f"capacity={capacity}; allowed: 0 and more")
    slots: Slots = run(kernels, place_slots, indices, experts)
    by_destination = slots.counts.view(destinations, -1)
    before = by_destination.cumsum(1) - by_destination  # rows of a destination in front of an expert's
    counts = torch.minimum((capacity - before).clamp_(min=0), by_destination).view(-1)
    args = (slots.order, slots.inverse, slots.counts, destinations, capacity)
    order, inverse = run(kernels, pack_places, *args)
    return Packing(order, inverse, counts, slots.counts - counts)


def pack_places(
    order: Tensor, inverse: Tensor, counts: Tensor, destinations: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """The maps of a :class:`Packing`, from those of :class:`Slots`."""
    ends = counts.view(destinations, -1).sum(1).cumsum(0)
    row = torch.arange(len(order), device=order.device)
    destination = torch.searchsorted(ends, row, right=True).clamp_(max=destinations - 1)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    within = row - starts[destination]
    lost = (within >= capacity) | (order < 0)
    place = (destination * capacity + within).masked_fill_(lost, -1)
    rows = destinations * capacity
    packed = torch.full((rows + 1,), -1, dtype=torch.int64, device=order.device)  # the last takes what has no place
    packed[place.masked_fill(lost, rows)] = order
    placed = torch.cat([place, place.new_full((1,), -1)])  # an inverse of −1 stays
    return packed[:rows], placed[inverse]
