"""Values that a forward changes in place: lists, sets, tensors that are no buffers, NumPy's arrays.

A second forward of a microbatch changes copies of them, so that a counter counts the microbatch once.
"""

from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from copy import copy
from typing import Any

from torch import Tensor

from overlap1f1b.cut.bits import is_plain
from overlap1f1b.cut.buffers import version_of
from overlap1f1b.cut.replacement import Replacement

_SEVERAL = (list, set, deque)


def contents_of(value: Any) -> Any:
    """Return what tells whether a value has changed in place, by ``==``; None for a value that cannot."""
    if isinstance(value, Tensor):
        return None if value.requires_grad else version_of(value)
    if isinstance(value, _SEVERAL):
        return [(id(part), contents_of(part)) for part in value]
    return value.tobytes() if _is_array(value) else None


def copies_of(places: Iterable[tuple[MutableMapping[Any, Any], Any]]) -> Iterator[Replacement]:
    """Yield a copy of what each place holds; places that share a value share its copy."""
    made: dict[int, tuple[Any, Any]] = {}
    for table, name in places:
        if (value := table.get(name)) is not None:
            yield table, name, _copied(value, made)


def _copied(value: Any, made: dict[int, tuple[Any, Any]]) -> Any:
    """Return a copy of what can change in place; ``made`` has what was copied before, with its copy."""
    if id(value) not in made:
        made[id(value)] = value, value  # of a list that holds itself
        new = value
        if isinstance(value, Tensor):
            new = value.clone() if not value.requires_grad and is_plain(value) else value
        elif isinstance(value, _SEVERAL):
            parts = [_copied(part, made) for part in value]
            new = copy(value)
            new.clear()
            (new.update if isinstance(new, set) else new.extend)(parts)
        elif _is_array(value):
            new = value.copy()
        made[id(value)] = value, new
    return made[id(value)][1]


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and bool(getattr(value, "shape", ()))
