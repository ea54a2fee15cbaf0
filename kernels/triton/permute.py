"""Rows moved by number: token by token, each read once for its K rows, or row by row of the result."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.permute import carrying, opened
from overlap1f1b.kernels.triton.launch import TILE, kernel, tile


def spread_rows(tokens: Tensor, order: Tensor, inverse: Tensor, top_k: int, partial: bool = False) -> Tensor:
    if partial:  # every row has to be written, padding too: row by row
        return taken(tokens, order, top_k)
    rows = tokens.new_empty(tokens.shape[0] * top_k, tokens.shape[1])
    _spread_all(tokens, None, inverse, top_k, rows, rows)
    return rows


def spread_weighted(tokens: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, partial: bool = False) -> Tensor:
    H, K = tokens.shape[1], weights.shape[1]
    carried = carrying(tokens, len(order), H)
    rows, factors = opened(carried, H, weights.dtype)
    if partial:
        taken(tokens, order, K, rows)
        factors.copy_(take_rows(weights.reshape(-1, 1), order).squeeze(1))
    else:
        _spread_all(tokens, weights.contiguous(), inverse, K, rows, factors)
    return carried


def _spread_all(
    tokens: Tensor, weights: Tensor | None, inverse: Tensor, top_k: int, rows: Tensor, factors: Tensor
) -> None:
    tokens = tokens.contiguous()
    T, H = tokens.shape
    BT, BH = tile(H)
    tensors = tokens, tokens if weights is None else weights, inverse, rows, factors
    constants = H, rows.stride(0), factors.stride(0), top_k, weights is not None, BT, BH
    _spread((-(-T // BT), max(-(-H // BH), 1)), tensors, (T,), constants)


@kernel("T")
def _spread(
    tokens,
    weights,
    inverse,
    rows,
    factors,
    T,
    H: tl.constexpr,
    STRIDE: tl.constexpr,
    FACTOR_STRIDE: tl.constexpr,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    here = token < T
    inside = here[:, None] & (column < H)[None, :]
    # A token is read only once: the cache is left to the written rows, which the exchange reads next.
    value = tl.load(
        tokens + token[:, None] * H + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
    )
    for k in tl.static_range(K):
        row = tl.load(inverse + token * K + k, mask=here, other=-1)
        there = row >= 0  # a slot that names no expert writes nothing
        tl.store(rows + row[:, None] * STRIDE + column[None, :], value, mask=inside & there[:, None])
        if WEIGHTED and tl.program_id(1) == 0:
            weight = tl.load(weights + token * K + k, mask=there, other=0.0)
            tl.store(factors + row * FACTOR_STRIDE, weight, mask=there)


def take_rows(rows: Tensor, index: Tensor, partial: bool = False) -> Tensor:
    return taken(rows, index, 1)


def taken(rows: Tensor, index: Tensor, divisor: int, out: Tensor | None = None) -> Tensor:
    """Return ``rows[index // divisor]``, with zeros for an index of −1; ``out`` may be a part of longer rows."""
    rows, index = rows.contiguous(), index.contiguous()
    out = rows.new_empty(index.shape[0], rows.shape[1]) if out is None else out
    R, H = out.shape
    BR, BH = tile(H, 2 * TILE)
    _take((-(-R // BR), -(-H // BH)), (rows, index, out), (R,), (H, out.stride(0), divisor, BR, BH))
    return out


@kernel("count")
def _take(
    rows,
    index,
    out,
    count,
    width: tl.constexpr,
    STRIDE: tl.constexpr,
    DIVISOR: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    here, across = row < count, column < width
    source = tl.load(index + row, mask=here, other=-1)
    there = (source >= 0)[:, None] & across[None, :]
    source = tl.where(source >= 0, source, 0) // DIVISOR
    value = tl.load(rows + source[:, None] * width + column[None, :], mask=there, other=0.0)
    tl.store(out + row[:, None] * STRIDE + column[None, :], value, mask=here[:, None] & across[None, :])
