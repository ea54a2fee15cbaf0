"""How kernels are launched: tiles, grids, devices."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

TILE = 2048
"""Elements of a program: with 128 threads 16 each, two loads of 16 bytes in bfloat16."""
SUMMED = 512
"""Columns of a program that sums along rows: a row is then one warp's, whose sum needs no shared memory."""
INTERPRETED_TILE = 1 << 16
"""The interpreter takes about a millisecond for a program, whatever its size."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def tile(width: int, elements: int = TILE, most: int = TILE) -> tuple[int, int]:
    """Rows and columns of a program for rows of this width: powers of two.

    Columns are those that leave least of the last block empty, the more the better: 2,048 for 2,048, 1,024 for 7,168,
    128 for 257; rows make up the rest. Where a program sums along its rows, ``most`` is :data:`SUMMED`.
    """
    most = min(triton.next_power_of_2(max(width, 1)), most)
    candidates = [columns for columns in (most, most // 2, most // 4, most // 8) if columns >= min(most, 128)]
    columns = min(candidates, key=lambda c: (triton.cdiv(width, c) * c, -c))
    return max((INTERPRETED_TILE if interpreted() else elements) // columns, 1), columns


def beside(rows: Tensor) -> Tensor:
    """Rows whose elements lie side by side, though there may be others between two rows."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **options: Any) -> None:
    """Runs a kernel on the device of ``like``; nothing where the grid is empty."""
    if 0 in grid:
        return
    with torch.cuda.device_of(like):
        kernel[grid](*args, **options)
