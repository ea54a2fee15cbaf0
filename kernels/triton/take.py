"""Rows by their number, row by row of what is written."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.triton.launch import TILE, launch, tile


def take_rows(rows: Tensor, index: Tensor, partial: bool = False) -> Tensor:
    return taken(rows, index, 1)


def taken(rows: Tensor, index: Tensor, divisor: int, out: Tensor | None = None) -> Tensor:
    """``rows[index // divisor]``, zeros where the index is −1; ``out`` may be a part of longer rows."""
    rows, index = rows.contiguous(), index.contiguous()
    out = rows.new_empty(index.shape[0], rows.shape[1]) if out is None else out
    BR, BH = tile(rows.shape[1], 2 * TILE)
    grid = (triton.cdiv(out.shape[0], BR), triton.cdiv(out.shape[1], BH))
    launch(_take, grid, rows, rows, index, out, *out.shape, out.stride(0), DIVISOR=divisor, BR=BR, BH=BH)
    return out


def put_rows(rows: Tensor, index: Tensor) -> Tensor:
    rows, index = rows.contiguous(), index.contiguous()
    out = rows.new_empty(rows.shape)
    BR, BH = tile(rows.shape[1], 2 * TILE)
    grid = (triton.cdiv(rows.shape[0], BR), triton.cdiv(rows.shape[1], BH))
    launch(_put, grid, rows, rows, index, out, rows.shape[0], rows.shape[1], BR=BR, BH=BH)
    return out


@triton.jit
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


@triton.jit
def _put(rows, index, out, count, width: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    here, across = row < count, column < width
    target = tl.load(index + row, mask=here, other=0)
    inside = here[:, None] & across[None, :]
    value = tl.load(rows + row[:, None] * width + column[None, :], mask=inside, other=0.0)
    tl.store(out + target[:, None] * width + column[None, :], value, mask=inside)
