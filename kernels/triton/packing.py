"""Places of slots in equal room for every destination, on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.triton.launch import interpreted, launch

CELLS = 2048  # rows times destinations of a program


def pack_places(
    order: Tensor, inverse: Tensor, counts: Tensor, destinations: int, capacity: int
) -> tuple[Tensor, Tensor]:
    ends = counts.view(destinations, -1).sum(1).cumsum(0)
    packed = torch.full((destinations * capacity,), -1, dtype=torch.int64, device=order.device)
    placed = torch.full_like(inverse, -1)
    wide = triton.next_power_of_2(destinations)
    BLOCK = 4096 if interpreted() else max(CELLS // wide, 16)
    grid = (triton.cdiv(len(order), BLOCK),)
    launch(_pack, grid, order, order, ends, packed, placed, len(order), destinations, capacity, BLOCK=BLOCK, WIDE=wide)
    return packed, placed


@triton.jit
def _pack(order, ends, packed, placed, rows, destinations, capacity, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(order + row, mask=row < rows, other=-1)
    every = tl.arange(0, WIDE)
    end = tl.load(ends + every, mask=every < destinations, other=0x7FFFFFFFFFFFFFFF)
    behind = end[None, :] <= row[:, None]
    destination = tl.sum(behind.to(tl.int64), 1)  # destinations that end before this row
    start = tl.max(tl.where(behind, end[None, :], 0), 1)
    within = row - start
    kept = (slot >= 0) & (within < capacity)
    place = destination * capacity + within
    tl.store(packed + place, slot, mask=kept)
    tl.store(placed + slot, place, mask=kept)
