"""The numbers of an optimizer's parameter groups, as JSON, by the names of the parameters that they hold for.

    stored = described([groups_of(optimizer, names) for each rank])
    set_groups(optimizer, chosen(optimizer, names, stored))

Ranks of another layout hold other parameters of a group, and a group may have none on one of them: so a group takes the
numbers of its own parameters, and only one without a parameter those of its place among the groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

Json = Any
Numbers = dict[str, Json]

# Which parameters there are, and how a step is computed: both are the business of the optimizer that loads.
_NOT_STORED = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def encoded(value: object) -> Json:
    """A number, a string, None, a tensor of no dimension, or a list or tuple of such, as JSON that tells them apart.

    Raises:
        TypeError: Anything else.
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
    """The value that :func:`encoded` was given.

    Raises:
        ValueError: JSON that it does not give.
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


def groups_of(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> list[tuple[Numbers, tuple[str, ...]]]:
    """Of each group what can be stored, and the names of its parameters."""
    found = []
    for group in optimizer.param_groups:
        numbers: Numbers = {}
        for key, value in group.items():
            if key not in _NOT_STORED:
                try:
                    numbers[key] = encoded(value)
                except TypeError:  # a function, say, which the loading optimizer has as well
                    continue
        found.append((numbers, tuple(names[parameter] for parameter in group["params"])))
    return found


def described(ranks: Sequence[Sequence[tuple[Numbers, tuple[str, ...]]]]) -> Json:
    """The groups of all ranks: each numbers once, which parameter has which, and which stand in which place."""
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


def chosen(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], stored: Json
) -> list[dict[str, Any] | None]:
    """For each group the numbers to set; None where the checkpoint says nothing of it.

    Raises:
        ValueError: One group here has parameters with different numbers there; or content that ``described`` does not
            give.
    """
    try:
        table = [{str(key): decoded(value) for key, value in dict(numbers).items()} for numbers in stored["groups"]]
        of, places = {str(name): table[place] for name, place in stored["of"].items()}, stored["places"]
        by_place = None if places is None else [table[place] for place in places]
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        raise ValueError(f"the groups of its optimizer cannot be read ({type(error).__name__})") from None
    found: list[dict[str, Any] | None] = []
    for number, group in enumerate(optimizer.param_groups):
        mine = [(name, of[name]) for parameter in group["params"] if (name := names[parameter]) in of]
        for name, numbers in mine[1:]:
            first = mine[0][1]
            differing = (k for k in first | numbers if k not in first or k not in numbers or first[k] != numbers[k])
            if numbers is not first and (key := next(differing, None)) is not None:
                raise ValueError(
                    f"group {number} of the optimizer has {mine[0][0]} and {name}, of which the checkpoint has {key}="
                    f"{first.get(key)} and {key}={numbers.get(key)}; allowed: the same groups as it was saved with"
                )
        if mine:
            found.append(mine[0][1])
        else:
            found.append(by_place[number] if by_place and len(by_place) == len(optimizer.param_groups) else None)
    return found


def check_count(here: Sequence[int], stored: Json) -> None:
    """Refuses another number of groups, where all ranks have the same.

    Raises:
        ValueError: It is another.
    """
    places = stored["places"]
    if places is not None and len(set(here)) == 1 and here[0] != len(places):
        raise ValueError(
            f"the optimizer has {here[0]} parameter groups, the checkpoint has {len(places)}; "
            "allowed: the same groups as it was saved with"
        )


def set_groups(optimizer: torch.optim.Optimizer, numbers: Sequence[Mapping[str, Any] | None]) -> None:
    """Sets them; a tensor stays the same tensor, which a captured graph may read."""
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
