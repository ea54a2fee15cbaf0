"""Sums over the bits of tensors, which tell whether two tensors are equal without keeping both."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 20  # elements, whose positions take 8 bytes each


def storage_of(tensor: Tensor) -> int:
    """Return the address of what a tensor shares with its views, as long as one of them lives."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's bits can be read: it has values, and is not sparse, nested or quantized."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.dtype is not torch.complex32


def local_part(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph; of a DTensor this rank's part."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def sum_of_bits(tensor: Tensor, *, ordered: bool = False) -> Tensor:
    """Return the sum of all elements' bits as whole numbers; if it is ``ordered``, each times its position.

    The result is an int64 ``[]`` on the tensor's device, modulo 2⁶⁴, of a DTensor this rank's; no order of sums changes
    it.
    """
    whole: Any = local_part(tensor)
    if whole.layout is not torch.strided:
        return sum_of_bits(whole.to_dense(), ordered=ordered)
    whole = torch.view_as_real(whole) if whole.is_complex() else whole
    bits: Tensor = whole.contiguous().view(_INTEGERS[whole.element_size()]).flatten()
    if not ordered:
        return bits.sum(dtype=torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), _AT_ONCE):
        part = bits[first : first + _AT_ONCE]
        total += (part * torch.arange(first + 1, first + len(part) + 1, device=bits.device)).sum()
    return total
