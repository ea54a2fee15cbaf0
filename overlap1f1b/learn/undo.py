"""Take a step back: all that it changes beside its result is as before it."""

from __future__ import annotations

import contextvars
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.cut.bits import is_plain, local_part, sum_of_bits
from overlap1f1b.cut.places import KnownPlaces, places_of
from overlap1f1b.cut.replacement import ABSENT, is_table, put
from overlap1f1b.cut.stage import Stage

Restore = Callable[[], object]
Table = MutableMapping[Any, Any]


class Undo:
    """What a step changes, kept as it is now; a call puts it back.

    It keeps gradients, each an object and the name of its attribute, torch's random numbers, and the entries of tables,
    such as the attributes and buffers of modules: their values, and the contents of tensors, generators and containers
    among them. Gradients that are all zero need no copy; of others there is one in host memory.

    Of places that other code uses, too, such as a file's globals, only entries that blocks were seen to change are put
    back: threads and signals may change others.
    """

    def __init__(self, stages: Iterable[Stage], gradients: Iterable[tuple[Any, str]], tables: Iterable[Table]) -> None:
        stages, seen = list(stages), set[int]()
        known = [inside.places for stage in stages for inside in stage.inside]
        found = {number: table for places in known for number, table in places_of(places.block).items()}
        own = (table.values for table in found.values() if not table.shared)
        self._restores = [_gradient_of(owner, name) for owner, name in gradients]
        self._restores += [_entries_of(table, seen) for table in chain(own, tables)]
        self._restores += [_shared_entries_of(n, table.values, known) for n, table in found.items() if table.shared]
        self._restores += _contents_of_all((one for stage in stages for one in stage.draws.generators), seen)
        self._context = contextvars.copy_context()
        self._python = random.getstate()
        self._numpy = None if (numpy := sys.modules.get("numpy")) is None else numpy.random.get_state()

    def __call__(self, *, global_random: bool = True) -> None:
        """Put everything back, with ``global_random`` the states of Python's and NumPy's own generators, too."""
        with torch.no_grad():
            for restore in self._restores:
                restore()
        for variable, value in self._context.items():
            variable.set(value)
        if global_random:
            random.setstate(self._python)
        if global_random and self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _gradient_of(owner: Any, name: str) -> Restore:
    """Return what puts a gradient back, with the values that it has now."""
    grad = getattr(owner, name, None)
    if grad is None:
        return lambda: setattr(owner, name, None) if hasattr(owner, name) else None
    if grad.layout is not torch.strided:
        kept = grad.clone()
        return lambda: setattr(owner, name, kept.clone())
    part = local_part(grad)
    copy = part.to("cpu", copy=True) if part.any() else None

    def restore() -> None:
        setattr(owner, name, grad)
        if copy is None:
            part.zero_()
        else:
            part.copy_(copy)

    return restore


def _shared_entries_of(number: int, table: Table, known: Sequence[KnownPlaces]) -> Restore:
    """Return what puts back the entries of a table shared with others, those that forwards change."""
    before = dict(table)

    def restore() -> None:
        changed = {key for places in known for key in places.changing}
        for name, value in before.items():
            if (number, name) in changed and table.get(name, ABSENT) is not value:
                put(table, name, value)

    return restore


def _entries_of(table: Table, seen: set[int]) -> Restore:
    """Return what puts back all entries of a table, and what they hold."""
    before = dict(table)
    contents = _contents_of_all(before.values(), seen)

    def restore() -> None:
        for name in table.keys() | before.keys():
            if table.get(name, ABSENT) is not (value := before.get(name, ABSENT)):
                put(table, name, value)
        for one in contents:
            one()

    return restore


def _contents_of_all(values: Iterable[Any], seen: set[int]) -> list[Restore]:
    return [restore for value in values if (restore := _contents_of(value, seen)) is not None]


def _contents_of(value: Any, seen: set[int]) -> Restore | None:
    """Return what puts back the contents of a tensor, a generator or a container; None for anything else."""
    if id(value) in seen or isinstance(value, nn.Parameter):
        return None
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, Tensor) and not value.requires_grad and is_plain(value):
        seen.add(id(value))
        tensor = local_part(value)
        return partial(_copy_back, tensor, tensor.clone(), sum_of_bits(tensor, ordered=True))
    if is_table(value):
        seen.add(id(value))
        return _entries_of(value, seen)
    if isinstance(value, list | set | deque | tuple):
        seen.add(id(value))
        before = list(value)
        return partial(_refill, value, before, _contents_of_all(before, seen))
    return None


def _copy_back(tensor: Tensor, copy: Tensor, bits: Tensor) -> None:
    if sum_of_bits(tensor, ordered=True) != bits:
        tensor.copy_(copy)


def _refill(container: Any, before: list[Any], contents: list[Restore]) -> None:
    now = list(container)
    if len(now) != len(before) or not all(map(is_, now, before)):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(before)
    for restore in contents:
        restore()
