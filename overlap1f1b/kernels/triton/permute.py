"""Rows moved by number: row by row of the result, or each read once for all of its choices."""

import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.permute import Layout
from overlap1f1b.kernels.triton.launch import TILE, beside, kernel, tile, wide


def pack_rows(
    tokens: Tensor,
    indices: Tensor,
    weights: Tensor,
    order: Tensor | None,
    spots: Tensor | None,
    local: int,
    layout: Layout,
    partial: bool = True,
) -> Tensor:
    """As :func:`overlap1f1b.kernels.permute.pack_rows`, by one kernel."""
    tokens, indices, weights = beside(tokens), indices.contiguous(), weights.contiguous()
    (T, K), M, H = indices.shape, layout.choices, layout.hidden
    packed = tokens.new_empty(T if order is None else len(order), layout.width)
    rows, factors, chosen = layout.opened(packed)
    R, lanes = chosen.shape
    BR, BH = tile(H)
    places = (indices, indices) if order is None or spots is None else (order, spots)
    tensors = tokens, indices, weights, *places, rows, factors, chosen
    strides = tokens.stride(0), rows.stride(0), factors.stride(0), chosen.stride(0)
    constants = H, *strides, K, M, local, lanes, order is None, BR, BH, wide(M), wide(lanes)
    _pack((-(-R // BR), max(-(-H // BH), 1)), tensors, (R,), constants)
    return packed


@kernel("R")
def _pack(
    tokens, indices, weights, order, spots, rows, factors, chosen, R,
    H, TOKEN_STRIDE, STRIDE, FACTOR_STRIDE, LANE_STRIDE, K, M, LOCAL, LANES, WHOLE, BR, BH, WIDE_M, WIDE_LANES,
):  # fmt: skip
    """Write rows to send, and beside them the experts and weights of their choices."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    here, across = row < R, (column < H)[None, :]
    token = row
    if not WHOLE:
        token = tl.load(order + row, mask=here, other=-1)
    there = here & (token >= 0)
    value = tl.load(tokens + token[:, None] * TOKEN_STRIDE + column[None, :], mask=there[:, None] & across, other=0.0)
    tl.store(rows + row[:, None] * STRIDE + column[None, :], value, mask=here[:, None] & across)
    if tl.program_id(1) == 0:
        lane, choice = tl.arange(0, WIDE_LANES), tl.arange(0, WIDE_M)
        numbers = tl.zeros([BR, WIDE_LANES], dtype=tl.int16)
        values = tl.zeros([BR, WIDE_M], dtype=weights.dtype.element_ty)
        for k in tl.static_range(K):
            slot = token * K + k
            expert = tl.load(indices + slot, mask=there, other=-1)
            weight = tl.load(weights + slot, mask=there, other=0.0)
            if WHOLE:
                mine = (expert >= 0) & (expert < LOCAL)
                place = row * 0 + k
            else:
                spot = tl.load(spots + slot, mask=there, other=-1)
                mine = (spot >= 0) & (spot // M == row)
                place = spot % M
            number = (expert % LOCAL + 1).to(tl.int16)
            numbers = tl.where(mine[:, None] & (place[:, None] == lane[None, :]), number[:, None], numbers)
            values = tl.where(mine[:, None] & (place[:, None] == choice[None, :]), weight[:, None], values)
        lanes, choices = here[:, None] & (lane < LANES)[None, :], here[:, None] & (choice < M)[None, :]
        tl.store(chosen + row[:, None] * LANE_STRIDE + lane[None, :], numbers, mask=lanes)
        tl.store(factors + row[:, None] * FACTOR_STRIDE + choice[None, :], values, mask=choices)


def expand_rows(packed: Tensor, order: Tensor, inverse: Tensor, layout: Layout, padded: bool) -> tuple[Tensor, Tensor]:
    rows, weights, _ = layout.opened(packed)
    factors = weights.new_empty(len(order))
    return _expanded(rows, order, inverse, layout.choices, padded, (weights, factors)), factors


def spread_rows(rows: Tensor, order: Tensor, inverse: Tensor, width: int, padded: bool) -> Tensor:
    return _expanded(rows, order, inverse, width, padded, None)


def _expanded(
    rows: Tensor, order: Tensor, inverse: Tensor, width: int, padded: bool, weights: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return a row for each choice; of weights ``[R, K]`` write the weight of each choice to the second."""
    rows, out = beside(rows), rows.new_empty(len(order), rows.shape[1])
    source, factors = weights or (out, out)
    if padded:  # every row has to be written, padding too: row by row
        _taken(rows, order, width, out)
        if weights is not None:
            _taken(source, order, 1, factors.unsqueeze(1), width)
        return out
    R, H = rows.shape
    BR, BH = tile(H)
    constants = H, rows.stride(0), source.stride(0), width, weights is not None, BR, BH
    _spread((-(-R // BR), max(-(-H // BH), 1)), (rows, source, inverse, out, factors), (R,), constants)
    return out


@kernel("R")
def _spread(rows, weights, inverse, out, factors, R, H, STRIDE, FACTOR_STRIDE, M, WEIGHTED, BR, BH):
    """Write each row to the places of its choices, and each choice's weight."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    here = row < R
    inside = here[:, None] & (column < H)[None, :]
    # A row is read only once: the cache is left to the written rows, which a product reads next.
    read = rows + row[:, None] * STRIDE + column[None, :]
    value = tl.load(read, mask=inside, other=0.0, eviction_policy="evict_first")
    for m in tl.static_range(M):
        place = tl.load(inverse + row * M + m, mask=here, other=-1)
        there = place >= 0
        tl.store(out + place[:, None] * H + column[None, :], value, mask=inside & there[:, None])
        if WEIGHTED and tl.program_id(1) == 0:
            tl.store(factors + place, tl.load(weights + row * FACTOR_STRIDE + m, mask=there, other=0.0), mask=there)


def take_rows(rows: Tensor, index: Tensor, partial: bool = False) -> Tensor:
    out = rows.new_empty(index.shape[0], rows.shape[1])
    _taken(rows, index, 1, out)
    return out


def _taken(rows: Tensor, index: Tensor, divisor: int, out: Tensor, width: int = 1) -> None:
    """Write ``rows[index // divisor]``, with zeros for an index of −1; or of ``[N, width]`` single elements."""
    rows, index = beside(rows), index.contiguous()
    R, H = out.shape
    BR, BH = tile(H, 2 * TILE)
    constants = H, rows.stride(0), divisor, width, BR, BH
    _take((-(-R // BR), -(-H // BH)), (rows, index, out), (R,), constants)


@kernel("count")
def _take(rows, index, out, count, H, STRIDE, DIVISOR, WIDTH, BR, BH):
    """Write rows, or single elements, by their numbers."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    here, across = row < count, column < H
    source = tl.load(index + row, mask=here, other=-1)
    there = (source >= 0)[:, None] & across[None, :]
    source = tl.where(source >= 0, source, 0) // DIVISOR
    place = source // WIDTH * STRIDE + source % WIDTH
    value = tl.load(rows + place[:, None] + column[None, :], mask=there, other=0.0)
    tl.store(out + row[:, None] * H + column[None, :], value, mask=here[:, None] & across[None, :])
