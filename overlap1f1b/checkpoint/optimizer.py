"""An optimizer in a checkpoint: entries of parameters and numbers of parameter groups, by the parameters' names.

    table = OptimizerTable.merged(tables)  # of all ranks
    fill(optimizer, entries, table.chosen(optimizer, names))

Large tensors of an optimizer's state are DCP's; the table has tensors of the whole shape on the meta device in their
place. In another layout a rank holds other parameters of a group, or none. So a group gets the numbers that its own
parameters were saved with. A group without parameters gets the numbers of its position in the list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Numbers = dict[str, Any]
Entries = dict[str, Any]
"""Optimizer state of one parameter, such as ``exp_avg``."""

# The optimizer that loads decides on its parameters and on how a step is computed.
_NOT_STORED = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def plain(value: Any) -> Any:
    """Return a value of Python's own types, or a tensor of one number on the CPU; a TypeError for others."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor) and value.numel() <= 1:
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    raise TypeError(type(value).__name__)


def numbers_of(group: Mapping[str, Any]) -> Numbers:
    """Return what can be stored of a parameter group: not a function, for example, which the loading one has too."""
    found: Numbers = {}
    for key, value in group.items():
        with suppress(TypeError):
            if key not in _NOT_STORED:
                found[key] = plain(value)
    return found


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimizer's class and its package, whose modules may change: ``torch.AdamW``."""
    kind = type(optimizer)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def is_large(value: object) -> bool:
    """Return whether a value in a table stands for a tensor that DCP stores."""
    return isinstance(value, Tensor) and value.is_meta


class OptimizerTable(NamedTuple):
    """What the optimizer of one rank has, or those of all ranks.

    Args:
        entries: Those of each parameter that has been updated; if ranks differ, of the rank with the most updates.
        numbers: Numbers of each parameter's group; parameters of one group share one dictionary.
        groups: Numbers of each group of the first rank; None if ranks have different numbers of groups.
        classes: Class of the optimizer of each parameter, see :func:`class_of`.
    """

    entries: dict[str, Entries]
    numbers: dict[str, Numbers]
    groups: list[Numbers] | None
    classes: dict[str, str]

    @classmethod
    def merged(cls, ranks: Sequence[OptimizerTable]) -> OptimizerTable:
        """Return the table of all ranks."""
        entries: dict[str, Entries] = {}
        for name, own in (pair for rank in ranks for pair in rank.entries.items()):
            if name not in entries or _updates(own) > _updates(entries[name]):
                entries[name] = own
        numbers = {name: own for rank in reversed(ranks) for name, own in rank.numbers.items()}
        same = len({len(rank.groups or ()) for rank in ranks}) == 1
        classes = {name: own for rank in ranks for name, own in rank.classes.items()}
        return cls(entries, numbers, ranks[0].groups if same else None, classes)

    def chosen(self, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> list[Numbers]:
        """Return the numbers to set in each group of an optimizer, whose parameters have ``names``.

        Raises:
            ValueError: A parameter was saved by an optimizer of another class, or those of a group in several groups.
        """
        groups, here = optimizer.param_groups, class_of(optimizer)
        if other := next((there for name in names.values() if (there := self.classes.get(name, here)) != here), None):
            raise ValueError(f"the optimizer is a {here}; allowed: {other}, as it was saved with")
        by_place = self.groups if self.groups and len(self.groups) == len(groups) else [Numbers() for _ in groups]
        found = []
        for place, group in enumerate(groups):
            mine = [(name, self.numbers[name]) for p in group["params"] if (name := names[p]) in self.numbers]
            for name, own in mine[1:]:
                if own is not mine[0][1] and (key := first_difference(mine[0][1], own)) is not None:
                    raise ValueError(
                        f"group {place} of the optimizer has {mine[0][0]} and {name}, for which the checkpoint has "
                        f"{key}={mine[0][1].get(key)} and {key}={own.get(key)}; "
                        "allowed: the same groups as it was saved with"
                    )
            found.append(mine[0][1] if mine else by_place[place])
        return found


def _updates(entries: Entries) -> float:
    return 1.0 if is_large(step := entries.get("step", 1)) else float(step)


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first key that only one of two mappings has, or with another value."""
    return next((k for k in {**one, **other} if k not in one or k not in other or one[k] != other[k]), None)


def fill(optimizer: torch.optim.Optimizer, state: Mapping[int, Entries], numbers: Sequence[Numbers]) -> None:
    """Set the entries of parameters, by their numbers, and the numbers of groups.

    A tensor of a group is filled in place, since a captured graph may read it.
    """
    own = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for group, before, new in zip(optimizer.param_groups, own, numbers, strict=True):
        group.update(before)  # without the copies that load_state_dict has made
        for key, value in new.items():
            group[key] = _set(group[key], value) if key in group else value


@torch.no_grad()
def _set(here: Any, value: Any) -> Any:
    if isinstance(here, Tensor):
        return here.copy_(torch.as_tensor(value)) if here.ndim == 0 else here
    if isinstance(here, tuple | list) and isinstance(value, tuple | list) and len(here) == len(value):
        return type(value)(_set(*pair) for pair in zip(here, value, strict=True))
    return value.item() if isinstance(value, Tensor) and isinstance(here, Real) else value
