"""``main[e] += grad[e].T @ rows[e]``: registers hold a tile's sum over all rows of an expert, which is added once."""

import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.triton.launch import beside, interpreted, kernel, wide


def add_weight_grad_(main: Tensor, grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """As :func:`overlap1f1b.kernels.grouped_mm.add_weight_grad_`, by one kernel."""
    assert main.is_contiguous()
    grad, rows = beside(grad), beside(rows)
    E, C, A = main.shape
    low = grad.element_size() == 2
    # A tile of 128 × 256 has 85 operations a loaded byte; in float32, which tensor cores would round, it is a quarter.
    BC = min(wide(max(C, 16)), 128 if low else 64)
    BA = min(wide(max(A, 16)), 256 if low else 128)
    BR = 256 if interpreted() else 64 if low else 32
    constants = C, A, grad.stride(0), rows.stride(0), BC, BA, BR, 8, interpreted()
    grid = (-(-C // BC) * -(-A // BA), E)
    warps = 8 if BC * BA >= 16_384 else 4
    _add_weight_grad(grid, (main, grad, rows, offsets), (), constants, num_warps=warps, num_stages=3)
    return main


@kernel()
def _add_weight_grad(main, grad, rows, offsets, C, A, GRAD_STRIDE, ROW_STRIDE, BC, BA, BR, BAND, WIDEN):
    """Add a tile of an expert's ``grad.T @ rows``."""
    expert = tl.program_id(1)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    end = tl.load(offsets + expert).to(tl.int64)
    if end > start:  # without rows the main gradient is not even read
        # Bands of BAND tiles in height, so that tiles computed together share what they load.
        tiles_c, tiles_a = tl.cdiv(C, BC), tl.cdiv(A, BA)
        number = tl.program_id(0)
        band = number // (BAND * tiles_a)
        height = tl.minimum(tiles_c - band * BAND, BAND)
        within = number - band * BAND * tiles_a
        c = (band * BAND + within % height) * BC + tl.arange(0, BC)
        a = (within // height) * BA + tl.arange(0, BA)
        inside = (c < C)[:, None] & (a < A)[None, :]
        place = main + expert.to(tl.int64) * C * A + c.to(tl.int64)[:, None] * A + a[None, :]
        # The sum begins with the main gradient: adding it at the end would need twice the registers.
        total = tl.load(place, mask=inside, other=0.0)
        for first in range(0, end - start, BR):
            row = start + first + tl.arange(0, BR)
            here = (row < end)[:, None]
            g = tl.load(grad + row[:, None] * GRAD_STRIDE + c[None, :], mask=here & (c < C)[None, :], other=0.0)
            x = tl.load(rows + row[:, None] * ROW_STRIDE + a[None, :], mask=here & (a < A)[None, :], other=0.0)
            if WIDEN:  # the interpreter's product of bfloat16 is wrong
                g, x = g.to(tl.float32), x.to(tl.float32)
            total = tl.dot(tl.trans(g), x, total, input_precision="ieee")
        tl.store(place, total, mask=inside)
