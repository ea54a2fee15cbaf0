"""Rows in eight bits: the largest element of each, and then its elements, which the cache still holds."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.fp8 import FLOAT8, Quantized
from overlap1f1b.kernels.triton.launch import SUMMED, interpreted, kernel, tile

SQUARE = 64
"""Rows and columns of a program whose elements lie side by side along rows in memory before, along columns after."""


def quantize_rows(rows: Tensor) -> Quantized:
    values, scales = rows.new_empty(rows.shape, dtype=FLOAT8), rows.new_empty(rows.shape[:-1], dtype=torch.float32)
    (R, A), batch = rows.shape[-2:], rows.shape[0] if rows.dim() == 3 else 1
    strides = rows.stride(0) if batch > 1 else 0, rows.stride(-2), rows.stride(-1)
    BR, BA = tile(A, most=SUMMED) if rows.stride(-1) == 1 or interpreted() else (SQUARE, SQUARE)
    _quantize((-(-R // BR), batch), (rows, values, scales), (R,), (A, *strides, R if rows.dim() == 3 else None, BR, BA))
    return Quantized(values, scales)


@kernel("R")
def _quantize(rows, values, scales, R, A, BATCH_STRIDE, ROW_STRIDE, STRIDE, SIZE, BR, BA):
    """Write each row's scale, and its elements times the inverse."""
    if SIZE is not None:  # of weights: known to the compiler, which can then read several rows at once
        R = SIZE
    row, batch = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.program_id(1).to(tl.int64)
    here, lanes = (row < R)[:, None], tl.arange(0, BA)
    source = rows + batch * BATCH_STRIDE + row[:, None] * ROW_STRIDE
    largest = tl.zeros([BR], dtype=tl.int32)
    for start in range(0, A, BA):
        column = (start + lanes)[None, :]
        value = tl.load(source + column * STRIDE, mask=here & (column < A), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
    exponent = (tl.minimum(largest, 0x7F800000) + 0x1FFFFF) >> 23
    exponent = tl.where(exponent == 255, exponent, tl.maximum(exponent - 8, 1))
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    place = batch * R + row
    tl.store(scales + place, (exponent << 23).to(tl.float32, bitcast=True), mask=row < R)
    for start in range(0, A, BA):
        column = (start + lanes)[None, :]
        inside = here & (column < A)
        value = tl.load(source + column * STRIDE, mask=inside, other=0.0).to(tl.float32) * inverse[:, None]
        tl.store(values + place[:, None] * A + column, _rounded(value).to(tl.float8e4nv), mask=inside)


@triton.jit
def _rounded(value):
    """Round to what e4m3 has, ties to even: Triton's interpreter carries no rounding into the exponent."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    near_zero = (value + 24576.0) - 24576.0  # 1.5 · 2¹⁴, whose last bit is 2⁻⁹
    return tl.where(tl.abs(value) < 0.015625, near_zero, normal)
