"""One matrix product per expert over rows that are sorted by expert.

``2·R·A·C`` operations over ``R·(A + C) + E·A·C`` elements. In bfloat16 gate and up of T8192 H2048 I768 K8 E128 are 412
GFLOP and 1.3 GB, computed 417 µs at 990 TFLOP/s and 297 µs at 4.3 TB/s: bound by operations. Those of T4096 H7168 I2048
K8 E256, all experts on one device, are 1.9 TFLOP and 15.8 GB, 1.9 and 3.7 ms: bound by reading the weights, for 128
rows each. The backward has two such products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor


class ExpertRows(Sequence[int]):
    """Rows of each expert, which the host reads only if it must: on CUDA that waits for the device.

    Args:
        counts: ``[E]`` int64.
        host: The same, where the host knows them already.
        padded: Whether there are rows behind those of the experts.
    """

    def __init__(self, counts: Tensor, host: Sequence[int] | None = None, *, padded: bool = False) -> None:
        self.counts, self._host, self.padded = counts, host, padded

    @cached_property
    def ends(self) -> Tensor:
        """``[E]`` int32, the end of each expert's rows."""
        return self.counts.cumsum(0, dtype=torch.int32)

    @property
    def total(self) -> Tensor | None:
        """``[1]`` int32, where padding begins; None where there is none."""
        return self.ends[-1:] if self.padded else None

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if self._host is None:
            self._host = self.counts.tolist()
        return self._host[index]

    def __len__(self) -> int:
        return len(self.counts)


def grouped_mm(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Each expert's rows times its weight, ``rows[e] @ weight[e].T``.

    Args:
        rows: ``[R, A]``, sorted by expert.
        weight: ``[E, C, A]``, as ``nn.Linear`` lays it out.
        counts: Rows of each expert, summing to R or less; zeros are allowed.

    Returns:
        ``[R, C]``, of which rows that belong to no expert have values without meaning.
    """
    if _native(rows, weight):
        return F.grouped_mm(aligned(rows), weight.transpose(1, 2), offs=offsets(counts, rows))
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    for part, source, w in zip(_parts(out, counts), _parts(rows, counts), weight, strict=True):
        torch.mm(source, w.t(), out=part)
    return out


def grouped_mm_input_grad(grad: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Gradient ``[R, A]`` of ``rows`` from that ``[R, C]`` of the product."""
    if _native(grad, weight):
        return F.grouped_mm(aligned(grad), weight, offs=offsets(counts, grad))
    out = grad.new_empty(grad.shape[0], weight.shape[2])
    for part, source, w in zip(_parts(out, counts), _parts(grad, counts), weight, strict=True):
        torch.mm(source, w, out=part)
    return out


def grouped_mm_weight_grad(grad: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Gradient ``[E, C, A]`` of ``weight``; zero for an expert without rows."""
    if _native(grad, rows):
        product = F.grouped_mm(aligned(grad).t(), aligned(rows), offs=offsets(counts, grad))
        return product.masked_fill_((offsets(counts, grad).diff(prepend=_zero(grad)) == 0)[:, None, None], 0.0)
    out = grad.new_empty(len(counts), grad.shape[1], rows.shape[1])
    for part, g, r in zip(out, _parts(grad, counts), _parts(rows, counts), strict=True):
        torch.mm(g.t(), r, out=part)
    return out


def _parts(rows: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """The rows of each expert."""
    sizes = list(counts)
    return rows[: sum(sizes)].split(sizes)


def _zero(like: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def offsets(counts: Sequence[int], like: Tensor) -> Tensor:
    """``[E]`` int32 on the device of ``like``, the end of each expert's rows."""
    if isinstance(counts, ExpertRows):
        return counts.ends
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=like.device)


def _native(a: Tensor, b: Tensor) -> bool:
    """Whether torch's grouped product takes these and is the faster one.

    It refuses float64 and strides that are no multiple of 16 bytes; on a CPU it is a loop with more copies than ours
    (4.8 ms against 2.8 ms for float32 R1024 A256 C512 E4 on one core).
    """
    fits = all(t.shape[-1] * t.element_size() % 16 == 0 for t in (a, b))
    return a.is_cuda and a.dtype == b.dtype == torch.bfloat16 and fits and a.shape[0] > 0


def aligned(rows: Tensor) -> Tensor:
    """Rows of a multiple of 16 bytes ``[R, A]`` that begin at multiples, a part of longer ones too; else a copy."""
    step, size = rows.stride(0), rows.element_size()
    fits = rows.stride(1) == 1 and step >= rows.shape[1] and step * size % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def product_dtype(weight: Tensor) -> torch.dtype:
    """What a product with this weight is computed in here: autocast's dtype, where it is on, else the weight's."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class GroupedMM(torch.autograd.Function):
    """:func:`grouped_mm` for plain autograd; under autocast in its dtype."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.counts, ctx.dtype, ctx.rows_dtype = counts, product_dtype(weight), rows.dtype
        rows = rows.to(ctx.dtype)
        ctx.save_for_backward(rows, weight)
        return grouped_mm(rows, weight.to(ctx.dtype), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad,), (rows, weight), counts = grads, ctx.saved_tensors, ctx.counts
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = grouped_mm_weight_grad(grad, rows, counts).to(weight.dtype)
        return grouped_mm_input_grad(grad, weight.to(ctx.dtype), counts).to(ctx.rows_dtype), grad_weight, None
