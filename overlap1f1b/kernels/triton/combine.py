"""Sums of rows, in registers and in order, and their backwards; what rows carry is moved beside them."""

import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.permute import Layout
from overlap1f1b.kernels.triton.launch import SUMMED, TILE, beside, kernel, tile, wide


def sum_rows(rows: Tensor, inverse: Tensor, width: int, weights: Tensor | None = None, partial: bool = True) -> Tensor:
    out = rows.new_empty(len(inverse) // width, rows.shape[1])
    _sums(rows, inverse, width, out, weights)
    return out


def pack_grads(rows: Tensor, weights: Tensor, inverse: Tensor, layout: Layout, partial: bool = True) -> Tensor:
    packed = rows.new_empty(len(inverse) // layout.choices, layout.width)
    of_rows, of_weights, between = layout.opened(packed)
    _sums(rows, inverse, layout.choices, of_rows, None, (weights.contiguous(), of_weights, between))
    return packed


def open_grads(packed: Tensor, inverse: Tensor, spots: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    rows, weights, _ = layout.opened(packed)
    out, of_weights = packed.new_empty(len(spots), layout.hidden), weights.new_empty(spots.shape)
    _sums(rows, inverse, spots.shape[1], out, None, (weights, of_weights, spots), layout.choices)
    return out, of_weights


def _sums(
    rows: Tensor,
    inverse: Tensor,
    width: int,
    out: Tensor,
    weights: Tensor | None,
    moved: tuple[Tensor, Tensor, Tensor] | None = None,
    opened: int = 0,
) -> None:
    """Write sums, and move weights' gradients beside them: into packed rows, or out of rows of ``opened`` choices."""
    rows = beside(rows)
    (R, H), (BR, BH) = out.shape, tile(out.shape[1])
    source, target, between = (rows, rows, inverse) if moved is None else moved
    packs = moved is not None and not opened
    lanes = between.shape[1] if packs else 0
    strides = rows.stride(0), out.stride(0), source.stride(0) if opened else 0, target.stride(0), between.stride(0)
    flags = weights is not None, packs, opened
    constants = H, *strides, width, *flags, lanes, BR, BH, wide(width), wide(max(lanes, 1))
    tensors = rows, inverse, rows if weights is None else weights.contiguous(), source, out, target, between
    _sum((-(-R // BR), max(-(-H // BH), 1)), tensors, (R,), constants)


def spread_grad(
    grad: Tensor, rows: Tensor, order: Tensor, inverse: Tensor, weights: Tensor, padded: bool = False
) -> tuple[Tensor, Tensor]:
    """As :func:`overlap1f1b.kernels.combine.spread_grad`, by one kernel."""
    grad, rows, weights = beside(grad), rows.contiguous(), weights.contiguous()
    H, spots = rows.shape[1], len(inverse)
    grad_rows = (rows.new_zeros if padded else rows.new_empty)(rows.shape)
    grad_weights = (weights.new_zeros if padded else weights.new_empty)(weights.shape)
    BS, BH = tile(H, 2 * TILE, SUMMED)
    tensors = grad, rows, inverse, weights, grad_rows, grad_weights
    constants = H, grad.stride(0), spots // max(len(grad), 1), BS, BH
    _spread_grad((-(-spots // BS), 1), tensors, (spots,), constants)
    return grad_rows, grad_weights


@kernel("R")
def _sum(
    rows, inverse, weights, source, out, target, between, R,
    H, STRIDE, OUT_STRIDE, SOURCE_STRIDE, TARGET_STRIDE, LANE_STRIDE, M, WEIGHTED, PACKS, OPENED, LANES, BR, BH,
    WIDE_M, WIDE_LANES,
):  # fmt: skip
    """Sum each row's M rows in order, and move what is carried beside them: into packed rows, or out of opened ones."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    here, across = row < R, (column < H)[None, :]
    total = tl.zeros([BR, BH], dtype=tl.float32)
    choice = tl.arange(0, WIDE_M)
    values = tl.zeros([BR, WIDE_M], dtype=source.dtype.element_ty)
    for m in tl.static_range(M):
        place = tl.load(inverse + row * M + m, mask=here, other=-1)
        there = place >= 0
        # A row is read only once, so it should not fill the cache.
        inside, read = there[:, None] & across, rows + place[:, None] * STRIDE + column[None, :]
        value = tl.load(read, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + place, mask=there, other=0.0).to(tl.float32)[:, None]
        total += value
        if tl.program_id(1) == 0:
            if PACKS:
                moved = tl.load(source + place, mask=there, other=0.0)
                values = tl.where(choice[None, :] == m, moved[:, None], values)
            if OPENED:
                spot = tl.load(between + row * M + m, mask=here, other=-1)
                moved = tl.load(source + spot // OPENED * SOURCE_STRIDE + spot % OPENED, mask=spot >= 0, other=0.0)
                tl.store(target + row * TARGET_STRIDE + m, moved, mask=here)
    place = out + row[:, None] * OUT_STRIDE + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=here[:, None] & across)
    if PACKS and tl.program_id(1) == 0:
        carried = target + row[:, None] * TARGET_STRIDE + choice[None, :]
        tl.store(carried, values, mask=here[:, None] & (choice < M)[None, :])
        lane = tl.arange(0, WIDE_LANES)
        nothing = tl.zeros([BR, WIDE_LANES], dtype=tl.int16)
        cleared = between + row[:, None] * LANE_STRIDE + lane[None, :]
        tl.store(cleared, nothing, mask=here[:, None] & (lane < LANES)[None, :])


@kernel("spots")
def _spread_grad(grad, rows, inverse, weights, grad_rows, grad_weights, spots, H, STRIDE, M, BS, BH):
    """Compute the gradients of a sum's rows and of their weights."""
    # Spot by spot, each warp handles one row at a time, so that no load waits for a sum over warps. The gradient of a
    # sum is read from memory once, and M − 1 times from the cache.
    spot = tl.program_id(0).to(tl.int64) * BS + tl.arange(0, BS)
    row = tl.load(inverse + spot, mask=spot < spots, other=-1)
    there = row >= 0
    # The twin rounds the weight to the rows' dtype before it multiplies.
    weight = tl.load(weights + row, mask=there, other=0.0).to(rows.dtype.element_ty).to(tl.float32)[:, None]
    products = tl.zeros([BS, BH], dtype=tl.float32)
    for first in range(0, H, BH):
        column = first + tl.arange(0, BH)
        inside = there[:, None] & (column < H)[None, :]
        place = row[:, None] * H + column[None, :]
        g = tl.load(grad + (spot // M)[:, None] * STRIDE + column[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.load(rows + place, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        products += g * x
        tl.store(grad_rows + place, (g * weight).to(grad_rows.dtype.element_ty), mask=inside)
    tl.store(grad_weights + row, tl.sum(products, 1).to(grad_weights.dtype.element_ty), mask=there)
