"""Hyperparameters of an optimizer's parameter groups as JSON, stored by the names of the groups' parameters.

    content = describe_groups([groups_of(optimizer, names) for each rank])
    set_groups(optimizer, StoredGroups.read(content).chosen(optimizer, names))

In another layout a rank holds other parameters of a group, or none. So a group gets the numbers that its own parameters
were saved with. A group without parameters gets the numbers of its position in the list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overlap1f1b.engine.checkpoint.folder import first_difference

Json = Any
Numbers = dict[str, Json]
GroupNumbers = tuple[Numbers, tuple[str, ...]]
"""The numbers of one parameter group, and the names of its parameters."""

# The optimizer that loads decides on its parameters and on how a step is computed.
_NOT_STORED = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def encoded(value: object) -> Json:
    """Return a number, a string, None, a tensor without dimensions, or a list or tuple of these as distinct JSON.

    Raises:
        TypeError: ``value`` is something else.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return {"tensor": encoded(value.item()), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list):
        return [encoded(one) for one in value]
    if type(value) is tuple:
        return {"tuple": [encoded(one) for one in value]}
    raise TypeError(type(value).__name__)


def decoded(content: Json) -> Any:
    """Return the value that :func:`encoded` turned into ``content``.

    Raises:
        ValueError: ``content`` is not a result of :func:`encoded`.
    """
    if isinstance(content, list):
        return [decoded(one) for one in content]
    if not isinstance(content, dict):
        return content
    match content:
        case {"float": "inf" | "-inf" | "nan" as text}:
            return float(text)
        case {"tuple": list(values)}:
            return tuple(decoded(one) for one in values)
        case {"tensor": number, "dtype": str(name)} if isinstance(dtype := getattr(torch, name, None), torch.dtype):
            value = decoded(number)
            if isinstance(value, bool | int | float):
                return torch.tensor(value, dtype=dtype)
    raise ValueError("a hyperparameter is none")


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> list[GroupNumbers]:
    """Return for each group the numbers that can be stored, and the names of its parameters."""
    found = []
    for group in optimizer.param_groups:
        numbers: Numbers = {}
        for key, value in group.items():
            if key not in _NOT_STORED:
                try:
                    numbers[key] = encoded(value)
                except TypeError:  # for example a function, which the loading optimizer has too
                    continue
        found.append((numbers, tuple(names[parameter] for parameter in group["params"])))
    return found


def describe_groups(ranks: Sequence[Sequence[GroupNumbers]]) -> Json:
    """Return the groups of all ranks: the distinct sets of numbers, and the set of each parameter and each position.

    "places" is None if ranks have different numbers of groups.
    """
    table: dict[str, int] = {}

    def place(numbers: Numbers) -> int:
        return table.setdefault(json.dumps(numbers, sort_keys=True), len(table))

    of: dict[str, int] = {}
    for numbers, names in (group for groups in ranks for group in groups):
        for name in names:
            of.setdefault(name, place(numbers))
    places = None
    if len({len(groups) for groups in ranks}) == 1:
        columns = zip(*ranks, strict=True)
        places = [place(next((n for n, names in groups if names), groups[0][0])) for groups in columns]
    return {"groups": [json.loads(text) for text in table], "of": of, "places": places}


class StoredGroups(NamedTuple):
    """Hyperparameters in a checkpoint.

    Args:
        of: Numbers of each parameter, by name; parameters of one group share one dictionary.
        places: Numbers of each position in the list of groups; None if ranks had different numbers of groups.
    """

    of: dict[str, dict[str, Any]]
    places: list[dict[str, Any]] | None

    @classmethod
    def read(cls, content: Json) -> StoredGroups:
        """Parse a result of :func:`describe_groups`.

        Raises:
            ValueError: ``content`` has another form.
        """
        try:
            table = [{str(key): decoded(value) for key, value in dict(one).items()} for one in content["groups"]]
            places = content["places"]
            return cls(
                {name: table[place] for name, place in content["of"].items()},
                None if places is None else [table[place] for place in places],
            )
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"no groups of an optimizer ({type(error).__name__})") from None

    def check_count(self, here: Sequence[int]) -> None:
        """Raise ValueError if the ranks all have one number of groups, but another was stored."""
        if self.places is not None and len(set(here)) == 1 and here[0] != len(self.places):
            raise ValueError(
                f"the optimizer has {here[0]} parameter groups, the checkpoint has {len(self.places)}; "
                "allowed: the same groups as it was saved with"
            )

    def chosen(
        self, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
    ) -> list[dict[str, Any] | None]:
        """Return the numbers to set in each group; None for a group without stored numbers.

        Raises:
            ValueError: A group has parameters that were saved with different numbers.
        """
        found: list[dict[str, Any] | None] = []
        for number, group in enumerate(optimizer.param_groups):
            mine = [(name, self.of[name]) for p in group["params"] if (name := names[p]) in self.of]
            for name, numbers in mine[1:]:
                if numbers is not mine[0][1] and (key := first_difference(mine[0][1], numbers)) is not None:
                    raise ValueError(
                        f"group {number} of the optimizer has {mine[0][0]} and {name}, for which the checkpoint has "
                        f"{key}={mine[0][1].get(key)} and {key}={numbers.get(key)}; "
                        "allowed: the same groups as it was saved with"
                    )
            by_place = self.places if self.places and len(self.places) == len(optimizer.param_groups) else None
            found.append(mine[0][1] if mine else by_place[number] if by_place else None)
        return found


def set_groups(optimizer: torch.optim.Optimizer, numbers: Sequence[Mapping[str, Any] | None]) -> None:
    """Set the groups' numbers. A tensor is filled in place, since a captured graph may read it."""
    for group, new in zip(optimizer.param_groups, numbers, strict=True):
        for key, value in (new or {}).items():
            if key not in _NOT_STORED:
                group[key] = _set(group[key], value) if key in group else value


@torch.no_grad()
def _set(here: Any, value: Any) -> Any:
    if isinstance(here, Tensor):
        return here.copy_(torch.as_tensor(value)) if here.ndim == 0 else here
    if isinstance(here, tuple | list) and isinstance(value, tuple | list) and len(here) == len(value):
        return type(value)(_set(*pair) for pair in zip(here, value, strict=True))
    return value.item() if isinstance(value, Tensor) and isinstance(here, Real) else value
