"""Rows in eight bits: e4m3 elements, and scales, of a row (fp8) or of each 32 elements (mxfp8, OCP's MX formats).

A scale is a power of two, the least by which the largest element is at most 448. So a scale rounds nothing: an
element is rounded once, to four significant bits, and a row that was quantized before is quantized to the same values.
An element errs by at most 2⁻⁴ of itself, or 2⁻¹⁷ of its row's largest. Weights are quantized along the same dimension.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.permute import Layout

FLOAT8 = torch.float8_e4m3fn
BLOCK = 32
"""Elements with one scale in mxfp8."""
Precision = Literal["fp8", "mxfp8"]
FITS: dict[Precision, int] = {"fp8": 16, "mxfp8": BLOCK}
"""Sizes of weights whose products have eight bits are multiples of it."""


class Quantized(NamedTuple):
    """Values ``[…, A]`` in e4m3 and scales, of a row ``[…]`` or of its blocks ``[…, A / 32]``."""

    values: Tensor
    scales: Tensor


def quantize_rows(rows: Tensor) -> Quantized:
    """Return the quantized rows ``[…, A]``, of any strides; the scale of a row that is not finite is infinite.

    >>> values, scales = quantize_rows(torch.tensor([[448.0, -1.06], [7.0, 0.25]]))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, -1.0], [448.0, 16.0]], [1.0, 0.015625])
    """
    wide = rows.float()
    # 448 is 1.75 · 2⁸: the exponent of the largest element, one more where its significand is above 1.75.
    exponent = (wide.abs().amax(-1).view(torch.int32).clamp(max=0x7F800000) + 0x1FFFFF) >> 23
    exponent = torch.where(exponent == 255, exponent, (exponent - 8).clamp_(min=1))
    scales, inverse = ((bits << 23).view(torch.float32) for bits in (exponent, 254 - exponent))
    return Quantized((wide * inverse.unsqueeze(-1)).to(FLOAT8).contiguous(), scales)


def quantize(rows: Tensor, precision: Precision, kernels: Kernels) -> Quantized:
    """Return the quantized rows ``[…, A]``, with a scale for a row or for each block of 32 elements."""
    if precision == "fp8":
        found: Quantized = kernels(quantize_rows, rows)
        return found
    values, scales = kernels(quantize_rows, rearrange(rows, "... (n block) -> (... n) block", block=BLOCK))
    return Quantized(values.view(rows.shape), scales.view(*rows.shape[:-1], rows.shape[-1] // BLOCK))


def dequantized(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the quantized numbers ``[…, A]`` in ``dtype``."""
    values, scales = quantized.values.to(dtype), quantized.scales.float().unsqueeze(-1)
    if scales.dim() == values.dim():
        return values.mul_(scales)
    return rearrange(values, "... (n block) -> ... n block", block=BLOCK).mul_(scales).flatten(-2)


def check_device(tensor: Tensor) -> None:
    """Raise ValueError if a tensor is on a GPU for which torch has no grouped product with a scale a row."""
    if tensor.is_cuda and (found := torch.cuda.get_device_capability(tensor.device))[0] != 9:
        raise ValueError(
            f"precision='fp8' on a GPU of compute capability {found[0]}.{found[1]}; allowed: 9.0, or 'mxfp8', whose "
            "products are in bfloat16"
        )


def scale_bytes(hidden: int, precision: Precision) -> int:
    """Return the bytes of a row's scales, an even number: float32, or a byte (e8m0) for each block."""
    return 4 if precision == "fp8" else 2 * -(-hidden // (2 * BLOCK))


def narrow_rows(packed: Tensor, layout: Layout, narrow: Layout, precision: Precision, kernels: Kernels) -> Tensor:
    """Return packed rows ``[R, W]`` with their elements quantized, and the scales behind them."""
    (rows, *carried), out = layout.opened(packed), packed.new_zeros(len(packed), narrow.width)
    (values, scales), narrowed = _quantized_of(out, narrow, precision), narrow.opened(out)[1:]
    quantized = quantize(rows, precision, kernels)
    values.copy_(quantized.values)
    scales.copy_(quantized.scales)
    _carry(carried, narrowed, layout.choices)
    return out


def widen_rows(packed: Tensor, layout: Layout, narrow: Layout, precision: Precision) -> Tensor:
    """Return what :func:`narrow_rows` was given, with its elements rounded."""
    out = packed.new_zeros(len(packed), layout.width)
    rows, *carried = layout.opened(out)
    rows.copy_(dequantized(_quantized_of(packed, narrow, precision), packed.dtype))
    _carry(narrow.opened(packed)[1:], carried, layout.choices)
    return out


def _quantized_of(packed: Tensor, narrow: Layout, precision: Precision) -> Quantized:
    hidden = narrow.hidden
    if precision == "fp8":
        scales = packed.view(torch.float32)[:, hidden // 4]
    else:
        scales = packed.view(torch.float8_e8m0fnu)[:, hidden : hidden + hidden // BLOCK]
    return Quantized(packed.view(FLOAT8)[:, :hidden], scales)


def _carry(source: Sequence[Tensor], target: Sequence[Tensor], choices: int) -> None:
    for here, there in zip(source, target, strict=True):
        there[:, :choices] = here[:, :choices]
