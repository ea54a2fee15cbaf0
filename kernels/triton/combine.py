"""The sum of a token's K rows, in registers and in the order of k, and its backward."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.triton.launch import launch, tile


def sum_rows(rows: Tensor, inverse: Tensor, top_k: int, weights: Tensor | None = None, partial: bool = False) -> Tensor:
    rows = rows.contiguous()
    T, H = inverse.shape[0] // top_k, rows.shape[1]
    out = rows.new_empty(T, H)
    BT, BH = tile(H)
    grid = (triton.cdiv(T, BT), triton.cdiv(H, BH))
    factors = out if weights is None else weights.contiguous()
    sizes = {"K": top_k, "WEIGHTED": weights is not None, "BT": BT, "BH": BH}
    launch(_sum, grid, rows, rows, inverse, factors, out, T, H, **sizes)
    return out


def spread_grad(
    grad: Tensor, rows: Tensor, order: Tensor, inverse: Tensor, weights: Tensor, partial: bool = False
) -> tuple[Tensor, Tensor]:
    grad, rows, weights = grad.contiguous(), rows.contiguous(), weights.contiguous()
    (T, K), H = weights.shape, rows.shape[1]
    grad_rows = (rows.new_zeros if partial else rows.new_empty)(rows.shape)
    grad_weights = weights.new_empty(weights.shape)
    BT, BH = tile(H)
    sizes = {"K": K, "WIDE": triton.next_power_of_2(K), "BT": BT, "BH": BH}
    args = (grad, rows, inverse, weights, grad_rows, grad_weights, T, H)
    launch(_spread_grad, (triton.cdiv(T, BT),), rows, *args, **sizes)
    return grad_rows, grad_weights


@triton.jit
def _sum(
    rows,
    inverse,
    weights,
    out,
    T,
    H,
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
        # A row is read once: the cache is better used for what comes next.
        value = tl.load(
            rows + row[:, None] * H + column[None, :], mask=there, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * K + k, mask=here, other=0.0).to(tl.float32)[:, None]
        total += value
    tl.store(
        out + token[:, None] * H + column[None, :], total.to(out.dtype.element_ty), mask=here[:, None] & across
    )


@triton.jit
def _spread_grad(
    grad,
    rows,
    inverse,
    weights,
    grad_rows,
    grad_weights,
    T,
    H,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    here, choice = token < T, tl.arange(0, WIDE)
    dots = tl.zeros([BT, WIDE], dtype=tl.float32)
    for first in range(0, H, BH):
        column = first + tl.arange(0, BH)
        across = (column < H)[None, :]
        g = tl.load(grad + token[:, None] * H + column[None, :], mask=here[:, None] & across, other=0.0).to(tl.float32)
        for k in tl.static_range(K):
            row = tl.load(inverse + token * K + k, mask=here, other=-1)
            weight = tl.load(weights + token * K + k, mask=here, other=0.0)
            # The twin rounds the weight to the rows' dtype before it multiplies.
            weight = weight.to(rows.dtype.element_ty).to(tl.float32)
            there = (row >= 0)[:, None] & across
            place = row[:, None] * H + column[None, :]
            x = tl.load(rows + place, mask=there, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dots += tl.where(choice[None, :] == k, tl.sum(g * x, 1)[:, None], 0.0)
            tl.store(grad_rows + place, (g * weight[:, None]).to(grad_rows.dtype.element_ty), mask=there)
    place = token[:, None] * K + choice[None, :]
    tl.store(grad_weights + place, dots.to(grad_weights.dtype.element_ty), mask=here[:, None] & (choice < K)[None, :])
