"""Tiles, grids and devices of kernel launches."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

TILE = 2048
"""Number of elements of a program: 16 for each of 128 threads, that is two loads of 16 bytes in bfloat16."""
SUMMED = 512
"""Number of columns of a program that sums along rows: one warp has a whole row, and its sum needs no shared memory."""
INTERPRETED_TILE = 1 << 16
"""The interpreter takes about a millisecond for a program, whatever its size."""


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def tile(width: int, elements: int = TILE, most: int = TILE) -> tuple[int, int]:
    """Return rows and columns of a program, powers of two, for rows of this width.

    The number of columns is large and leaves little of the last block empty: 2,048 for 2,048, 1,024 for 7,168, 128 for
    257. The number of rows follows from ``elements``. If a program sums along its rows, ``most`` is :data:`SUMMED`.
    """
    most = min(triton.next_power_of_2(max(width, 1)), most)
    candidates = [columns for columns in (most, most // 2, most // 4, most // 8) if columns >= min(most, 128)]
    columns = min(candidates, key=lambda c: (triton.cdiv(width, c) * c, -c))
    return max((INTERPRETED_TILE if interpreted() else elements) // columns, 1), columns


def beside(rows: Tensor) -> Tensor:
    """Return ``rows`` with the elements of a row side by side; there may be gaps between rows."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **options: Any) -> None:
    """Run a kernel on the device of ``like``, unless the grid is empty."""
    if 0 in grid:
        return
    with torch.cuda.device_of(like):
        kernel[grid](*args, **options)
