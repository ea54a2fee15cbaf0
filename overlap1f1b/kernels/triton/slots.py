"""Places of rows to send, and of received choices sorted by expert, computed on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.slots import Places, Slots
from overlap1f1b.kernels.triton.launch import interpreted, kernel, wide

CELLS = 16_384  # of a program: slots times experts, or slots times slots
COUNTED_CELLS = 4096  # of a program: tokens times numbers to send
PLACED_CELLS = 1024  # of a program: tokens times ranks


def place_rows(indices: Tensor, experts: int, ranks: int, room: int | None = None, choices: int = 0) -> Places:
    """As :func:`overlap1f1b.kernels.slots.place_rows`, by three kernels: count, offsets, places."""
    indices = indices.contiguous()
    (T, K), local = indices.shape, experts // ranks
    columns = ranks * (1 + local)  # of the counts: for each rank the rows, then the choices of its experts
    WIDE_C, WIDE_R, WIDE_L = wide(columns), wide(ranks), wide(local)
    BT = 512 if interpreted() else max(min(COUNTED_CELLS // WIDE_C, PLACED_CELLS // WIDE_R, 128), 16)
    blocks = -(-T // BT)
    before = indices.new_empty(blocks, columns, dtype=torch.int32)
    counts, ends = indices.new_empty(ranks, 1 + local), indices.new_empty(columns, dtype=torch.int32)
    _count_rows((blocks, 1), (indices, before), (T,), (K, experts, local, columns, BT, WIDE_C), num_warps=8)
    _offsets((1, 1), (before, counts, ends), (blocks,), (columns, max(CELLS // 2 // WIDE_C, 1), WIDE_C), num_warps=8)
    limited = room is not None
    order = indices.new_full((ranks * room if room is not None else T * min(K, ranks),), -1)
    spots, inverse = indices.new_empty(T, K), indices.new_empty(T * K)
    constants = K, experts, ranks, local, columns, limited, BT, WIDE_R, WIDE_L
    numbers = (T, room or 0, choices)
    _place_rows((blocks, 1), (indices, before, counts, order, spots, inverse), numbers, constants, num_warps=4)
    return Places(order, spots, inverse, counts)


@triton.jit
def _rank_of(expert, experts: tl.constexpr, local: tl.constexpr):
    """Return the rank of each expert, −1 for an index that names none."""
    return tl.where((expert >= 0) & (expert < experts), expert // local, -1)


@kernel("T")
def _count_rows(indices, before, T, K, EXPERTS, LOCAL, COLUMNS, BT, WIDE_C):
    """Compute a row of the histogram: how many rows and choices a block's tokens have for each rank and expert."""
    block = tl.program_id(0)
    token = block.to(tl.int64) * BT + tl.arange(0, BT)
    here = token < T
    every = tl.arange(0, WIDE_C)
    count = tl.zeros([BT, WIDE_C], dtype=tl.int32)
    for k in tl.static_range(K):
        expert = tl.load(indices + token * K + k, mask=here, other=-1)
        rank = _rank_of(expert, EXPERTS, LOCAL)
        first = rank >= 0
        for j in tl.static_range(K):
            if j < k:
                other = tl.load(indices + token * K + j, mask=here, other=-1)
                first &= _rank_of(other, EXPERTS, LOCAL) != rank
        column = rank * (1 + LOCAL)
        chosen = (column + 1 + expert % LOCAL)[:, None] == every[None, :]
        count += (chosen & (rank >= 0)[:, None]).to(tl.int32)
        count += ((column[:, None] == every[None, :]) & first[:, None]).to(tl.int32)
    tl.store(before + block.to(tl.int64) * COLUMNS + every, tl.sum(count, 0), mask=every < COLUMNS)


@kernel("blocks")
def _offsets(before, counts, ends, blocks, COLUMNS, ROWS, WIDE):
    """Turn a histogram, in place, into the counts before each block; compute the columns' counts and their ends."""
    every = tl.arange(0, WIDE)
    total = tl.zeros([WIDE], dtype=tl.int32)
    for first in range(0, blocks, ROWS):
        block = first + tl.arange(0, ROWS)
        place = before + block.to(tl.int64)[:, None] * COLUMNS + every[None, :]
        inside = (block < blocks)[:, None] & (every < COLUMNS)[None, :]
        here = tl.load(place, mask=inside, other=0)
        tl.store(place, total[None, :] + tl.cumsum(here, 0) - here, mask=inside)
        total += tl.sum(here, 0)
    tl.store(counts + every, total.to(tl.int64), mask=every < COLUMNS)
    tl.store(ends + every, tl.cumsum(total, 0), mask=every < COLUMNS)


@kernel("T", "room", "choices")
def _place_rows(
    indices, before, counts, order, spots, inverse, T, room, choices,
    K, EXPERTS, RANKS, LOCAL, COLUMNS, LIMITED, BT, WIDE_R, WIDE_L,
):  # fmt: skip
    """Compute a (token, rank)'s row: the rank's first row, plus earlier blocks' rows, plus those of this block."""
    block = tl.program_id(0).to(tl.int64)
    token = block * BT + tl.arange(0, BT)
    here = token < T
    every = tl.arange(0, WIDE_R)
    real = every < RANKS
    chosen = tl.zeros([BT, WIDE_R], dtype=tl.int32)
    for k in tl.static_range(K):
        expert = tl.load(indices + token * K + k, mask=here, other=-1)
        chosen += (_rank_of(expert, EXPERTS, LOCAL)[:, None] == every[None, :]).to(tl.int32)
    there = (chosen > 0).to(tl.int32)
    ahead = before + block * COLUMNS + every * (1 + LOCAL)
    row = tl.load(ahead, mask=real, other=0)[None, :] + tl.cumsum(there, 0) - there
    if LIMITED:
        start = (every * room).to(tl.int64)
        expert = tl.arange(0, WIDE_L)
        parts = tl.load(ahead[:, None] + 1 + expert[None, :], mask=real[:, None] & (expert < LOCAL)[None, :], other=0)
        choice = tl.sum(parts, 1)[None, :] + tl.cumsum(chosen, 0) - chosen
    else:
        rows = tl.load(counts + every * (1 + LOCAL), mask=real, other=0)
        start = tl.cumsum(rows, 0) - rows
    for k in tl.static_range(K):
        expert = tl.load(indices + token * K + k, mask=here, other=-1)
        rank = _rank_of(expert, EXPERTS, LOCAL)
        within = tl.zeros([BT], dtype=tl.int32)
        for j in tl.static_range(K):
            if j < k:
                other = tl.load(indices + token * K + j, mask=here, other=-1)
                within += (_rank_of(other, EXPERTS, LOCAL) == rank).to(tl.int32)
        mine = rank[:, None] == every[None, :]
        kept = rank >= 0
        place = tl.sum(tl.where(mine, row, 0), 1)
        if LIMITED:
            kept &= (place < room) & (tl.sum(tl.where(mine, choice, 0), 1) + within < choices)
        place = place + tl.sum(tl.where(mine, start[None, :], 0), 1)
        slot = token * K + k
        first = kept & (within == 0)
        tl.store(spots + slot, tl.where(kept, place * K + within, -1), mask=here)
        tl.store(inverse + slot, tl.where(first, place, -1), mask=here)
        tl.store(order + place, token, mask=here & first)


def place_slots(chosen: Tensor, experts: int, choices: int) -> Slots:
    """As :func:`overlap1f1b.kernels.slots.place_slots`, by three kernels: count, offsets, places."""
    chosen = chosen if chosen.stride(1) == 1 else chosen.contiguous()
    M = chosen.shape[1]
    slots, WIDE = chosen.numel(), wide(experts)
    # One program counts BLOCK slots, a row of the histogram, and ranks them by BLOCK² comparisons.
    BLOCK = 1024 if interpreted() else max(min(CELLS // WIDE, 128), 16)
    blocks = -(-slots // BLOCK)
    before = chosen.new_empty(blocks, experts, dtype=torch.int32)
    ends = chosen.new_empty(experts, dtype=torch.int32)
    order = chosen.new_empty(choices, dtype=torch.int64)
    inverse = chosen.new_empty(slots, dtype=torch.int64)
    counts = chosen.new_empty(experts, dtype=torch.int64)
    _count((blocks, 1), (chosen, before), (slots,), (M, chosen.stride(0), experts, BLOCK, WIDE), num_warps=8)
    _offsets((1, 1), (before, counts, ends), (blocks,), (experts, max(CELLS // 2 // WIDE, 1), WIDE), num_warps=8)
    constants = M, chosen.stride(0), experts, BLOCK
    _place((blocks, 1), (chosen, before, ends, order, inverse), (slots, choices), constants, num_warps=8)
    return Slots(order, inverse, ends)


@kernel("slots")
def _count(chosen, before, slots, M, STRIDE, EXPERTS, BLOCK, WIDE):
    """Compute a row of the histogram: how many of a block's slots chose each expert."""
    block = tl.program_id(0)
    slot = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(chosen + slot // M * STRIDE + slot % M, mask=slot < slots, other=0).to(tl.int32) - 1
    every = tl.arange(0, WIDE)
    count = tl.sum((expert[:, None] == every[None, :]).to(tl.int32), 0)
    tl.store(before + block.to(tl.int64) * EXPERTS + every, count, mask=every < EXPERTS)


@kernel("slots", "choices")
def _place(chosen, before, ends, order, inverse, slots, choices, M, STRIDE, EXPERTS, BLOCK):
    """Compute each slot's row: its expert's first row, plus earlier blocks' slots, plus earlier slots of this block."""
    block = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    slot = block.to(tl.int64) * BLOCK + offset
    here = slot < slots
    expert = tl.load(chosen + slot // M * STRIDE + slot % M, mask=here, other=0).to(tl.int32) - 1
    earlier = (expert[:, None] == expert[None, :]) & (offset[None, :] < offset[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    valid = (expert >= 0) & (expert < EXPERTS)
    start = tl.load(ends + expert - 1, mask=valid & (expert > 0), other=0)
    ahead = tl.load(before + block.to(tl.int64) * EXPERTS + expert, mask=valid, other=0)
    row = tl.where(valid, start + ahead + rank, -1).to(tl.int64)
    tl.store(inverse + slot, row, mask=here)
    tl.store(order + row, slot, mask=valid & (row < choices))
    # The last rows may have no slot.
    rows = tl.load(ends + EXPERTS - 1)
    tl.store(order + slot, tl.full([BLOCK], -1, dtype=tl.int64), mask=(slot < choices) & (slot >= rows))
