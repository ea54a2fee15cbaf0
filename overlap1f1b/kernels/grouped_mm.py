"""One matrix product per expert over rows that are sorted by expert, and its gradients.

``2·R·A·C`` operations over ``R·(A + C) + E·A·C`` elements: bound by operations, or with few rows an expert by reading
the weights. The backward has two such products. Triton adds a weight gradient to a float32 main gradient in one pass:
8 bytes a parameter, where a product and an addition take 12.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.fp8 import Precision, Quantized, dequantized, quantize


class ExpertRows(Sequence[int]):
    """Number of rows of each expert, from their ``ends [E]`` int32; if ``padded``, rows of no expert follow.

    On CUDA a read of the host waits for the device, so it reads only if needed, and if ``host`` does not have them.
    """

    def __init__(self, ends: Tensor, host: Sequence[int] | None = None, *, padded: bool = False) -> None:
        self.ends, self.host, self.padded = ends, host, padded

    @property
    def counts(self) -> Tensor:
        """``[E]`` int32, the numbers on the device."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))

    @property
    def total(self) -> Tensor | None:
        """``[1]`` int32, where padding begins; None without padding."""
        return self.ends[-1:] if self.padded else None

    def __getitem__(self, index: Any) -> Any:
        if self.host is None:
            self.host = [end - start for start, end in pairwise([0, *self.ends.tolist()])]
        return self.host[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __len__(self) -> int:
        return len(self.ends)


class KnownRows(list[int]):
    """:class:`ExpertRows` as a list, by which rows can be split; what the device has is not copied to it again."""

    def __init__(self, rows: ExpertRows) -> None:
        super().__init__(rows)
        self.rows = rows


def grouped_mm(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Return ``rows[e] @ weight[e].T`` of each expert, of ``rows [R, A]`` sorted by expert, and ``weight [E, C, A]``.

    The weight is rounded to the dtype of the rows. ``counts`` sum to R or less, zeros allowed; in ``[R, C]`` rows that
    belong to no expert are undefined.
    """
    weight = weight if weight.dtype is rows.dtype else weight.to(rows.dtype)
    return _product(rows, weight.transpose(1, 2), counts, native=_native(rows, weight))


class EightBits:
    """Products of quantized rows and weights, see :mod:`~overlap1f1b.kernels.fp8`; on a CPU of the same in float32.

    An expert's rows may begin anywhere for torch's kernel, since they are not the dimension that is summed. In a weight
    gradient they are, and would have to be multiples of 16: it is a product of what is not quantized.

    The kernel for scales of 32 elements is Blackwell's, on which nobody here has run it: a GPU multiplies the same
    numbers in bfloat16, which has all their bits. If it ``keeps``, a weight is quantized once, in each of its two
    layouts, for all products of this object, as of a step: what is kept has the size of the weights in bfloat16.
    """

    def __init__(self, kernels: Kernels, precision: Precision, *, keeps: bool = False) -> None:
        self._kernels, self._precision, self._keeps = kernels, precision, keeps
        self._kept: dict[tuple[int, bool], tuple[Tensor, int, Quantized]] = {}  # each with its weight, as of a version

    def grouped_mm(self, rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
        """Return :func:`grouped_mm`; the weight has any dtype, and is rounded to that of the rows before."""
        return self._product(rows, self._quantized(weight, rows.dtype, transposed=False), counts)

    def input_grad(self, grad: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
        """Return :func:`grouped_mm_input_grad`, likewise."""
        return self._product(grad, self._quantized(weight, grad.dtype, transposed=True), counts)

    def _quantized(self, weight: Tensor, dtype: torch.dtype, *, transposed: bool) -> Quantized:
        """Return a weight in eight bits, from before if it has not changed since."""
        _, version, found = self._kept.get((id(weight), transposed), (None, None, None))
        if found is not None and version == weight._version:
            return found
        cast = weight.to(dtype)
        found = quantize(cast.mT if transposed else cast, self._precision, self._kernels)
        if self._keeps and isinstance(weight, Parameter):  # another is made anew for each microbatch
            self._kept[id(weight), transposed] = weight, weight._version, found
        return found

    def _product(self, rows: Tensor, right: Quantized, counts: Sequence[int]) -> Tensor:
        """Return the products of rows with what was quantized before, in the dtype of the rows."""
        left = quantize(rows, self._precision, self._kernels)
        if not (rows.is_cuda and len(rows) and self._precision == "fp8"):
            dtype = torch.bfloat16 if rows.is_cuda else torch.float32
            a, b = (dequantized(quantized, dtype) for quantized in (left, right))
            return grouped_mm(a, b, counts).to(rows.dtype)
        product: Tensor = torch._scaled_grouped_mm(
            left.values,
            right.values.mT,
            left.scales,
            right.scales,
            offs=offsets(counts, rows),
            out_dtype=torch.bfloat16,
            # Sums of 14 bits: their error is a tenth of the operands', and exact sums take up to three times as long.
            use_fast_accum=True,
        )
        return product.to(rows.dtype)


def grouped_mm_input_grad(grad: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the gradient ``[R, A]`` of the rows from the product's ``[R, C]``; the weight is rounded to its dtype."""
    weight = weight if weight.dtype is grad.dtype else weight.to(grad.dtype)
    return _product(grad, weight, counts, native=_native(grad, weight))


def _product(rows: Tensor, right: Tensor, counts: Sequence[int], *, native: bool) -> Tensor:
    if native:
        return F.grouped_mm(aligned(rows), right, offs=offsets(counts, rows))
    out = rows.new_empty(rows.shape[0], right.shape[2])
    for part, source, of_expert in zip(_parts(out, counts), _parts(rows, counts), right, strict=True):
        torch.mm(source, of_expert, out=part)
    return out


def grouped_mm_weight_grad(grad: Tensor, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the gradient ``[E, C, A]`` of ``weight``; zero for an expert without rows."""
    if _native(grad, rows):
        ends = offsets(counts, grad)
        return _zeroed_(F.grouped_mm(aligned(grad).t(), aligned(rows), offs=ends), ends)
    out = grad.new_empty(len(counts), grad.shape[1], rows.shape[1])
    for part, g, r in zip(out, _parts(grad, counts), _parts(rows, counts), strict=True):
        torch.mm(g.t(), r, out=part)
    return out


def _parts(rows: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    sizes = list(counts)
    return rows[: sum(sizes)].split(sizes)


def _zeroed_(product: Tensor, ends: Tensor) -> Tensor:
    """Return torch's grouped weight gradients ``[E, C, A]``, zero for experts without rows.

    Hopper's kernel writes these zeros, Blackwell's leaves what was in memory (pytorch issue 172439).
    """
    if torch.cuda.get_device_capability(product.device)[0] == 9:
        return product
    none = ends.diff(prepend=ends.new_zeros(1)) == 0
    return product.masked_fill_(none[:, None, None], 0.0)


def offsets(counts: Sequence[int], like: Tensor) -> Tensor:
    """Return ``[E]`` int32 on the device of ``like``: the end of each expert's rows."""
    known = counts.rows if isinstance(counts, KnownRows) else counts
    if isinstance(known, ExpertRows):
        return known.ends
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=like.device)


def _native(a: Tensor, b: Tensor) -> bool:
    """Return whether torch's grouped product takes these operands and is faster than a loop.

    It refuses float64 and strides that are not multiples of 16 bytes. On GPUs other than Hopper and Blackwell it reads
    the offsets on the host. On a CPU it is a loop with more copies than the loop here.
    """
    fits = a.shape[-1] % 8 == b.shape[-1] % 8 == 0 < a.shape[0]
    return fits and a.dtype == b.dtype == torch.bfloat16 and _has_kernel(a)


def _has_kernel(rows: Tensor) -> bool:
    """Return whether torch has one kernel for a grouped product in bfloat16 on the device."""
    return rows.is_cuda and torch.cuda.get_device_capability(rows.device)[0] in (9, 10)


def aligned(rows: Tensor) -> Tensor:
    """Return ``rows [R, A]``, perhaps parts of longer rows, if each begins at a multiple of 16 bytes, else a copy."""
    step, size = rows.stride(0), rows.element_size()
    fits = rows.stride(1) == 1 and step >= rows.shape[1] and step * size % 16 == 0 and rows.data_ptr() % 16 == 0
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def product_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of a product with ``weight``: autocast's if it is on, else the weight's."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class GroupedMM(torch.autograd.Function):
    """:func:`grouped_mm` for plain autograd, in eight bits if asked for; under autocast in autocast's dtype."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, counts: Sequence[int], eight: EightBits | None = None
    ) -> Tensor:
        """Multiply each expert's rows by its weight, in autocast's dtype or in eight bits."""
        ctx.counts, ctx.dtype, ctx.eight = counts, rows.dtype, eight
        rows = rows.to(product_dtype(weight))
        ctx.save_for_backward(rows if weight.requires_grad else None, weight)  # frozen weights need no rows
        return (eight.grouped_mm if eight else grouped_mm)(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows and weight."""
        (grad,), (rows, weight), counts = grads, ctx.saved_tensors, ctx.counts
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = grouped_mm_weight_grad(grad, rows, counts).to(weight.dtype)
        of_rows = (ctx.eight.input_grad if ctx.eight else grouped_mm_input_grad)(grad, weight, counts)
        return of_rows.to(ctx.dtype), grad_weight, None, None


def multiplied(rows: Tensor, weight: Tensor, counts: Sequence[int], eight: EightBits | None = None) -> Tensor:
    """Return :func:`grouped_mm` with its gradients, by :class:`GroupedMM` or by the weight's own class.

    The latter does both in the backward of the rows; ValueError if it has no such product, or ``eight`` is given.
    """
    if not has_own_products(weight):
        product: Tensor = GroupedMM.apply(rows, weight, counts, eight)
        return product
    kind = type(weight).__name__
    if eight is not None:
        raise ValueError(f"a weight of {kind} in products of eight bits; allowed: precision=None, or a plain parameter")
    dtype, total = product_dtype(weight), sum(counts)
    right = weight.to(dtype).transpose(1, 2)
    if type(right) is not type(weight):
        raise ValueError(
            f"a weight of {kind}, which loses its class when it is cast or transposed; allowed: a class that keeps it, "
            "or a plain parameter"
        )
    try:  # without rows that belong to no expert: their values are undefined, and a class may look at them
        result = F.grouped_mm(rows[:total].to(dtype), right, offs=offsets(counts, rows))
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"a weight of {kind}, for which torch.nn.functional.grouped_mm fails ({error}); allowed: a class that "
            "multiplies these rows, or a plain parameter"
        ) from error
    return F.pad(result, (0, 0, 0, len(rows) - total)) if total < len(rows) else result


def has_own_products(weight: Tensor) -> bool:
    """Return whether a weight's class may multiply in a way of its own, as low-precision training of torchao does.

    Only such a product has the right gradients then. The class of a DTensor is that of its local part.
    """
    kind: Any = type(weight)
    if kind is Parameter or kind is Tensor:
        return False
    if (local := getattr(weight, "_local_tensor", None)) is not None:
        return has_own_products(local)
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or function not in _ORDINARY


_ORDINARY: tuple[Any, ...] = (Parameter.__torch_function__, Tensor.__torch_function__.__func__)  # type: ignore[attr-defined]


def add_weight_grad_(main: Tensor, grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Add ``grad[e].T @ rows[e]`` to ``main[e]``, float32 ``[E, C, A]``, for each expert with rows; return it.

    ``grad [R, C]`` and ``rows [R, A]`` are sorted by expert; ``offsets [E]``, int32 or int64 on the device, are the
    ends of their rows, later ones are ignored. On CUDA torch's grouped product rounds to bfloat16 before the addition.
    """
    low = _has_kernel(main) and main.dtype == torch.float32 and grad.dtype == torch.bfloat16
    if low and all(t.shape[1] % 8 == 0 and t.shape[0] for t in (grad, rows)):
        ends = offsets.to(torch.int32)
        product = F.grouped_mm(aligned(grad).t(), aligned(rows), offs=ends)
        return main.add_(_zeroed_(product, ends))
    for e, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
        if end > start:
            main[e].addmm_(grad[start:end].t().to(main.dtype), rows[start:end].to(main.dtype))
    return main
