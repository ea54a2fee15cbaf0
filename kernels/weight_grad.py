"""Weight gradients of a grouped product, added to a float32 main gradient.

Triton keeps the sum of an expert's rows in registers and adds it once, in float32: 8 bytes a parameter (read and write)
where a product of its own and an addition take 12 (write and read 2 each in bfloat16, read and write 4 each). For
gate and up of E128 I768 H2048, 403 M parameters: 3.2 GB against 4.8 GB, computed 750 and 1,125 µs at 4.3 TB/s. The
product itself, 2·R·C·A operations, takes longer beyond 4 · operations / bytes a second rows of an expert: 920,
computed at 990 TFLOP/s.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap1f1b.kernels.grouped_mm import aligned


def add_weight_grad_(main: Tensor, grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """``main[e] += grad[e].T @ rows[e]`` for the rows of each expert.

    Args:
        main: ``[E, C, A]`` float32, contiguous; that of an expert without rows is left as it is.
        grad: ``[R, C]``, gradient of the product, sorted by expert.
        rows: ``[R, A]``, what was multiplied, sorted by expert.
        offsets: ``[E]`` int32 or int64 on the device: where each expert's rows end. Rows from the last on are left out,
            whatever they hold.

    Returns:
        ``main``. The twin rounds the product to bfloat16 first where it runs by torch's grouped product on CUDA.
    """
    low = main.is_cuda and main.dtype == torch.float32 and grad.dtype == torch.bfloat16
    if low and all(t.shape[1] % 8 == 0 and t.shape[0] for t in (grad, rows)):
        ends = offsets.to(torch.int32)
        product = F.grouped_mm(aligned(grad).t(), aligned(rows), offs=ends)
        none = ends.diff(prepend=ends.new_zeros(1)) == 0
        return main.add_(product.masked_fill_(none[:, None, None], 0.0))  # a product of no rows is uninitialised
    for e, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
        if end > start:
            main[e].addmm_(grad[start:end].t().to(main.dtype), rows[start:end].to(main.dtype))
    return main
