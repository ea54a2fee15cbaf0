"""A batch cut into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from overlap1f1b.engine.microbatch import OptionalTensors, Tensors, absent

Part = Tensor | tuple[Tensor | None, ...] | Mapping[str, Tensor | None]
Batch = Part | Sequence[Part]
"""A tensor or several, to be cut along the first dimension; or a list of such, one a microbatch.

Several are a tuple, or, where the model's first block names its inputs, a mapping by these names; then None stands for
one that is not given.
"""


def cut(batch: Batch | None, count: int, name: str, names: Sequence[str] = ()) -> Callable[[int], Tensors]:
    """What gives the tensors of a microbatch by its number.

    >>> part = cut(torch.arange(4), 2, "inputs")
    >>> part(0)[0].tolist(), part(1)[0].tolist()
    ([0, 1], [2, 3])

    Args:
        batch: What to cut; a list has one entry a microbatch, of any sizes.
        count: Microbatches.
        name: What it is, for messages.
        names: Of its tensors in order, where they have any.

    Raises:
        ValueError: Nothing, other names, or a batch that cannot be cut into that many equal parts.
    """
    if batch is None:
        raise ValueError(f"no {name} on a rank that needs them; allowed: this rank's batch")
    if isinstance(batch, list):
        if len(batch) != count:
            raise ValueError(f"{name}: {len(batch)} microbatches for a program of {count}; allowed: as many")
        return [_filled(_checked(part, name, names)) for part in batch].__getitem__
    whole = _checked(batch, name, names)
    if not any(tensor is not None for tensor in whole):
        raise ValueError(f"{name}: no tensor; allowed: at least one")
    sized = [(tensor, 0 if tensor is None else _size_of_part(tensor, count, name)) for tensor in whole]
    return lambda index: _filled(
        [None if tensor is None else tensor.narrow(0, index * size, size) for tensor, size in sized]
    )


def _size_of_part(tensor: Tensor, count: int, name: str) -> int:
    size = tensor.shape[0] if tensor.dim() else 0
    if size == 0 or size % count:
        raise ValueError(f"{name}: a batch of {size} cannot be cut into {count} microbatches; allowed: a multiple")
    return size // count


def _filled(given: Sequence[Tensor | None]) -> Tensors:
    """With something in the place of what is not given: what passes between blocks and stages are tensors."""
    like = next((tensor for tensor in given if tensor is not None), None)
    return tuple([absent(like) if tensor is None else tensor for tensor in given])


def _checked(value: Any, name: str, names: Sequence[str]) -> OptionalTensors:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, Mapping) and names:
        if set(value) != set(names):
            raise ValueError(
                f"{name} named {', '.join(map(str, value)) or 'nothing'}; "
                f"allowed: exactly {', '.join(names)}, None for one that is not given"
            )
        strange = [label for label in names if not isinstance(value[label], Tensor | None)]
        if strange:
            kind = type(value[strange[0]]).__name__
            raise ValueError(f"{name}: {strange[0]} of type {kind}; allowed: a tensor, or None where it is not given")
        return tuple(value[label] for label in names)
    kinds = (Tensor, type(None)) if names else (Tensor,)
    if isinstance(value, tuple) and all(isinstance(part, kinds) for part in value):
        return value
    found = type(value).__name__
    if isinstance(value, tuple):
        found += f" of {', '.join(type(part).__name__ for part in value)}"
    if names:
        allowed = f"a tensor, a tuple or a dict of {', '.join(names)}, a list of such, None for one that is not given"
    else:
        allowed = "a tensor, a tuple of tensors, a list of either"
    raise ValueError(f"{name} of type {found}; allowed: {allowed}")
