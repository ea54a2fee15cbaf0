"""A batch cut into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from overlap1f1b.engine.microbatch import Tensors, tensors

Batch = Tensor | tuple[Tensor, ...] | Sequence[Tensor | tuple[Tensor, ...]]
"""A tensor or a tuple of several, to be cut along the first dimension; or a list of either, one a microbatch."""


def cut(batch: Batch | None, count: int, name: str) -> Callable[[int], Tensors]:
    """What gives the tensors of a microbatch by its number.

    >>> part = cut(torch.arange(4), 2, "inputs")
    >>> part(0)[0].tolist(), part(1)[0].tolist()
    ([0, 1], [2, 3])

    Args:
        batch: What to cut; a list has one entry a microbatch, of any sizes.
        count: Microbatches.
        name: What it is, for messages.

    Raises:
        ValueError: Nothing, or a batch that cannot be cut into that many equal parts.
    """
    if batch is None:
        raise ValueError(f"no {name} on a rank that needs them; allowed: this rank's batch")
    if isinstance(batch, list):
        if len(batch) != count:
            raise ValueError(f"{name}: {len(batch)} microbatches for a program of {count}; allowed: as many")
        return [tensors(_checked(part, name)) for part in batch].__getitem__
    whole = tensors(_checked(batch, name))
    if not whole:
        raise ValueError(f"{name}: no tensor; allowed: at least one")
    sized = [(tensor, _size_of_part(tensor, count, name)) for tensor in whole]
    return lambda index: tuple([tensor.narrow(0, index * size, size) for tensor, size in sized])


def _size_of_part(tensor: Tensor, count: int, name: str) -> int:
    size = tensor.shape[0] if tensor.dim() else 0
    if size == 0 or size % count:
        raise ValueError(f"{name}: a batch of {size} cannot be cut into {count} microbatches; allowed: a multiple")
    return size // count


def _checked(value: Any, name: str) -> Tensor | tuple[Tensor, ...]:
    if isinstance(value, Tensor) or (isinstance(value, tuple) and all(isinstance(t, Tensor) for t in value)):
        return value
    raise ValueError(f"{name} of type {type(value).__name__}; allowed: a tensor, a tuple of tensors, a list of either")
