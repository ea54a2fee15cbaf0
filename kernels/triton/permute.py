"""Tokens as rows in the order of their experts: a token is read once, its K rows are written."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.permute import carrying, opened
from overlap1f1b.kernels.triton.launch import launch, tile
from overlap1f1b.kernels.triton.take import take_rows, taken


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
    grid = (triton.cdiv(T, BT), max(triton.cdiv(H, BH), 1))
    sizes = {"K": top_k, "WEIGHTED": weights is not None, "BT": BT, "BH": BH}
    args = (tokens, tokens if weights is None else weights, inverse, rows, factors)
    launch(_spread, grid, tokens, *args, T, H, rows.stride(0), factors.stride(0), **sizes)


@triton.jit
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
    # Read once and never again: the cache is left to what is written, which the exchange reads next.
    value = tl.load(
        tokens + token[:, None] * H + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
    )
    for k in tl.static_range(K):
        row = tl.load(inverse + token * K + k, mask=here, other=-1)
        there = row >= 0  # of a slot that names no expert nothing is written
        tl.store(rows + row[:, None] * STRIDE + column[None, :], value, mask=inside & there[:, None])
        if WEIGHTED and tl.program_id(1) == 0:
            weight = tl.load(weights + token * K + k, mask=there, other=0.0)
            tl.store(factors + row * FACTOR_STRIDE, weight, mask=there)
