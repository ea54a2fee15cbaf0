"""Positions of slots sorted by expert, and in equal room for every destination, computed on the device."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.slots import Groups, Slots
from overlap1f1b.kernels.triton.launch import interpreted, kernel, wide

CELLS = 16_384  # of a program: slots times experts, or slots times slots
PACKED_CELLS = 2048  # of a program: rows times destinations
GROUPED_CELLS = 4096  # of a program: rows times sources times experts


def place_slots(indices: Tensor, experts: int) -> Slots:
    flat = indices.reshape(-1)
    slots, WIDE = len(flat), wide(experts)
    # One program counts BLOCK slots, a row of the histogram, and ranks them by BLOCK² comparisons.
    BLOCK = 1024 if interpreted() else max(min(CELLS // WIDE, 128), 16)
    blocks = -(-slots // BLOCK)
    before = flat.new_empty(blocks, experts, dtype=torch.int32)
    counts, starts, order, inverse = (flat.new_empty(size) for size in (experts, experts, slots, slots))
    _count((blocks, 1), (flat, before), (slots,), (experts, BLOCK, WIDE), num_warps=8)
    rows = max(CELLS // 2 // WIDE, 1)
    _offsets((1, 1), (before, counts, starts), (blocks,), (experts, rows, WIDE), num_warps=8)
    tensors = flat, before, counts, starts, order, inverse
    _place((blocks, 1), tensors, (slots,), (experts, BLOCK), num_warps=8)
    return Slots(order, inverse, counts)


@kernel("slots")
def _count(indices, before, slots, experts: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Compute a row of the histogram: how many of a block's slots chose each expert."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(indices + slot, mask=slot < slots, other=-1)
    every = tl.arange(0, WIDE)
    count = tl.sum((expert[:, None] == every[None, :]).to(tl.int32), 0)
    tl.store(before + block.to(tl.int64) * experts + every, count, mask=every < experts)


@kernel("blocks")
def _offsets(before, counts, starts, blocks, experts: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Turn the histogram, in place, into the counts before each block; then compute experts' counts and first rows."""
    every = tl.arange(0, WIDE)
    total = tl.zeros([WIDE], dtype=tl.int32)
    for first in range(0, blocks, ROWS):
        block = first + tl.arange(0, ROWS)
        place = before + block.to(tl.int64)[:, None] * experts + every[None, :]
        inside = (block < blocks)[:, None] & (every < experts)[None, :]
        here = tl.load(place, mask=inside, other=0)
        tl.store(place, total[None, :] + tl.cumsum(here, 0) - here, mask=inside)
        total += tl.sum(here, 0)
    tl.store(counts + every, total.to(tl.int64), mask=every < experts)
    tl.store(starts + every, (tl.cumsum(total, 0) - total).to(tl.int64), mask=every < experts)


@kernel("slots")
def _place(indices, before, counts, starts, order, inverse, slots, experts: tl.constexpr, BLOCK: tl.constexpr):
    """Compute each slot's row: its expert's first row, plus earlier blocks' slots, plus earlier slots of this block."""
    block = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    slot = block * BLOCK + offset
    here = slot < slots
    expert = tl.load(indices + slot, mask=here, other=-1)
    earlier = (expert[:, None] == expert[None, :]) & (offset[None, :] < offset[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    valid = (expert >= 0) & (expert < experts)
    start = tl.load(starts + expert, mask=valid, other=0)
    ahead = tl.load(before + block.to(tl.int64) * experts + expert, mask=valid, other=0)
    row = tl.where(valid, start + ahead + rank, -1)
    tl.store(inverse + slot, row, mask=here)
    tl.store(order + row, slot.to(tl.int64), mask=valid)
    # Where slots name no expert, the last rows have no slot.
    rows = tl.load(starts + experts - 1) + tl.load(counts + experts - 1)
    tl.store(order + slot, tl.full([BLOCK], -1, dtype=tl.int64), mask=here & (slot >= rows))


def pack_places(
    order: Tensor, inverse: Tensor, counts: Tensor, destinations: int, capacity: int
) -> tuple[Tensor, Tensor]:
    ends = counts.view(destinations, -1).sum(1).cumsum(0)
    packed = torch.full((destinations * capacity,), -1, dtype=torch.int64, device=order.device)
    placed = torch.full_like(inverse, -1)
    WIDE = wide(destinations)
    BLOCK = 4096 if interpreted() else max(PACKED_CELLS // WIDE, 16)
    grid, numbers = (-(-len(order) // BLOCK), 1), (len(order), capacity)
    _pack(grid, (order, ends, packed, placed), numbers, (destinations, BLOCK, WIDE))
    return packed, placed


@kernel("rows", "capacity")
def _pack(
    order,
    ends,
    packed,
    placed,
    rows,
    capacity,
    destinations: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
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


def group_places(arrived: Tensor, rows: int, padded: bool = False) -> Groups:
    arrived = arrived.contiguous()
    ranks, local = arrived.shape
    order, inverse, ends = arrived.new_empty(rows), arrived.new_empty(rows), arrived.new_empty(local, dtype=torch.int32)
    WIDE_R, WIDE_L = max(wide(ranks), 8), max(wide(local), 16)  # a number for each thread at least
    BLOCK = max((1 << 19 if interpreted() else GROUPED_CELLS) // (WIDE_R * WIDE_L), 16)
    constants = ranks, local, padded, BLOCK, WIDE_R, WIDE_L
    _group((max(-(-rows // BLOCK), 1), 1), (arrived, order, inverse, ends), (rows,), constants)
    return Groups(order, inverse, ends)


@kernel("rows")
def _group(
    arrived,
    order,
    inverse,
    ends,
    rows,
    ranks: tl.constexpr,
    local: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE_R: tl.constexpr,
    WIDE_L: tl.constexpr,
):
    source, expert = tl.arange(0, WIDE_R)[:, None], tl.arange(0, WIDE_L)[None, :]
    real = (source < ranks) & (expert < local)
    size = tl.load(arrived + source * local + expert, mask=real, other=0).to(tl.int32)
    # Where the rows of each (source, expert) begin among received rows, and where they start among grouped ones.
    if PADDED:
        begin = source * (rows // ranks) + tl.cumsum(size, 1) - size
    else:
        flat = tl.reshape(size, [WIDE_R * WIDE_L])
        begin = tl.reshape(tl.cumsum(flat, 0) - flat, [WIDE_R, WIDE_L])
    total = tl.sum(size, 0)
    end = tl.cumsum(total, 0)
    start = (end - total)[None, :] + tl.cumsum(size, 0) - size
    if tl.program_id(0) == 0:
        every = tl.arange(0, WIDE_L)
        tl.store(ends + every, end, mask=every < local)
    size = tl.reshape(size, [1, WIDE_R * WIDE_L])
    begin = tl.reshape(begin, [1, WIDE_R * WIDE_L])
    start = tl.reshape(start, [1, WIDE_R * WIDE_L])
    # Each row is in one part at most, so that sums over all parts find it.
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grouped = (row[:, None] >= start) & (row[:, None] < start + size)
    received = (row[:, None] >= begin) & (row[:, None] < begin + size)
    place = row + tl.sum(tl.where(grouped, begin - start, 0), 1)
    back = row + tl.sum(tl.where(received, start - begin, 0), 1)
    there = tl.sum(grouped.to(tl.int32), 1) > 0
    came = tl.sum(received.to(tl.int32), 1) > 0
    tl.store(order + row, tl.where(there, place, -1).to(tl.int64), mask=row < rows)
    tl.store(inverse + row, tl.where(came, back, -1).to(tl.int64), mask=row < rows)
