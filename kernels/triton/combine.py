"""Sum of a token's K rows, in registers and in the order of k, and its backward."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.triton.launch import SUMMED, TILE, beside, kernel, tile


def sum_rows(rows: Tensor, inverse: Tensor, top_k: int, weights: Tensor | None = None, partial: bool = False) -> Tensor:
    rows = beside(rows)
    T, H = inverse.shape[0] // top_k, rows.shape[1]
    out = rows.new_empty(T, H)
    BT, BH = tile(H)
    tensors = rows, inverse, out if weights is None else weights.contiguous(), out
    _sum((-(-T // BT), -(-H // BH)), tensors, (T,), (H, rows.stride(0), top_k, weights is not None, BT, BH))
    return out


def spread_grad(
    grad: Tensor, rows: Tensor, order: Tensor, inverse: Tensor, weights: Tensor, partial: bool = False
) -> tuple[Tensor, Tensor]:
    grad, rows, weights = grad.contiguous(), rows.contiguous(), weights.contiguous()
    (T, K), H = weights.shape, rows.shape[1]
    grad_rows = (rows.new_zeros if partial else rows.new_empty)(rows.shape)
    grad_weights = weights.new_empty(weights.shape)
    BS, BH = tile(H, 2 * TILE, SUMMED)
    tensors = grad, rows, inverse, weights, grad_rows, grad_weights
    _spread_grad((-(-T * K // BS), 1), tensors, (T * K,), (H, K, BS, BH))
    return grad_rows, grad_weights


@kernel("T")
def _sum(
    rows,
    inverse,
    weights,
    out,
    T,
    H: tl.constexpr,
    STRIDE: tl.constexpr,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    here, across = token < T, (column < H)[None, :]
    total = tl.zeros([BT, BH], dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(inverse + token * K + k, mask=here, other=-1)
        there = (row >= 0)[:, None] & across
        # A row is read only once, so it should not fill the cache.
        value = tl.load(
            rows + row[:, None] * STRIDE + column[None, :], mask=there, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * K + k, mask=here, other=0.0).to(tl.float32)[:, None]
        total += value
    tl.store(out + token[:, None] * H + column[None, :], total.to(out.dtype.element_ty), mask=here[:, None] & across)


@kernel("slots")
def _spread_grad(
    grad,
    rows,
    inverse,
    weights,
    grad_rows,
    grad_weights,
    slots,
    H: tl.constexpr,
    K: tl.constexpr,
    BS: tl.constexpr,
    BH: tl.constexpr,
):
    # Slot by slot, each warp handles one row at a time, so that no load waits for a sum over warps. The gradient of a
    # token is read from memory once, and K − 1 times from the cache.
    slot = tl.program_id(0).to(tl.int64) * BS + tl.arange(0, BS)
    here = slot < slots
    row = tl.load(inverse + slot, mask=here, other=-1)
    # The twin rounds the weight to the rows' dtype before it multiplies.
    weight = tl.load(weights + slot, mask=here, other=0.0).to(rows.dtype.element_ty).to(tl.float32)[:, None]
    there = row >= 0
    products = tl.zeros([BS, BH], dtype=tl.float32)
    for first in range(0, H, BH):
        column = first + tl.arange(0, BH)
        inside = there[:, None] & (column < H)[None, :]
        place = row[:, None] * H + column[None, :]
        g = tl.load(grad + (slot // K)[:, None] * H + column[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.load(rows + place, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        products += g * x
        tl.store(grad_rows + place, (g * weight).to(grad_rows.dtype.element_ty), mask=inside)
    tl.store(grad_weights + slot, tl.sum(products, 1).to(grad_weights.dtype.element_ty), mask=here)
