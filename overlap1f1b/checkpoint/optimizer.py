"""Optimizers in a checkpoint: entries of parameters and numbers of parameter groups, by the parameters' names.

    table = OptimizerTable.merged(tables)  # of all ranks
    fill(optimizers, entries, table.chosen(optimizers, names))

An entry is a tensor, a number, a text, or a dict, list, tuple or set of these. Large tensors are DCP's; the table has
tensors of the whole shape on the meta device in their place. In another layout a rank holds other parameters of a
group, or none. So a group gets the numbers that its own parameters were saved with. A group without parameters gets
the numbers of its position in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One optimizer of the engine's parameters, or several, each of some of them."""
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
    if type(value) in (list, tuple, set):
        return type(value)(map(plain, value))
    raise TypeError(type(value).__name__)


def small(value: object, what: str) -> Any:
    """Return a value as :func:`plain` does; a ValueError, which says ``what`` it is, for others."""
    with suppress(TypeError):
        return plain(value)
    kind = type(value).__name__
    raise ValueError(f"{what} is of type {kind}; allowed: tensors, numbers, texts, and containers of these")


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


def mapped(value: Any, path: str, leaf: Callable[[Any, str], Any]) -> Any:
    """Return an entry with ``leaf(value, path)`` in place of all that is no dict, list or tuple.

    A path has keys and positions behind the name of the entry: ``Q.0``.
    """
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        return {key: mapped(inner, f"{path}.{key}", leaf) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(inner, f"{path}.{number}", leaf) for number, inner in enumerate(value))
    return leaf(value, path)


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
        beside: What each class's ``state_dict`` has of no parameter, such as a number of steps, as on the first rank.
    """

    entries: dict[str, Entries]
    numbers: dict[str, Numbers]
    groups: list[Numbers] | None
    classes: dict[str, str]
    beside: dict[str, Entries]

    @classmethod
    def of(
        cls,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[nn.Parameter, str],
        leaves: Mapping[nn.Parameter, Callable[[Any, str], Any]],
    ) -> OptimizerTable:
        """Return the table of a rank; ``leaves`` say for the parameters with entries what stands for a value."""
        found = cls({}, {}, groups := [], {}, {})
        for optimizer in optimizers:
            kind, whole = class_of(optimizer), optimizer.state_dict()
            rest = {key: value for key, value in whole.items() if key not in ("state", "param_groups")}
            if own_state := {key: value for key, value in whole["state"].items() if isinstance(key, str)}:
                rest["state"] = own_state
            if rest:
                found.beside[kind] = mapped(rest, f"the {kind}'s state_dict", small)
            for group in optimizer.param_groups:
                groups.append(numbers_of(group))
                for parameter in group["params"]:
                    name = names[parameter]
                    found.numbers[name], found.classes[name] = groups[-1], kind
                    for entry, value in (optimizer.state.get(parameter) or {}).items() if parameter in leaves else ():
                        found.entries.setdefault(name, {})[entry] = mapped(value, entry, leaves[parameter])
        return found

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
        return cls(entries, numbers, ranks[0].groups if same else None, classes, ranks[0].beside)

    def chosen(self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[nn.Parameter, str]) -> list[Numbers]:
        """Return the numbers of each group of optimizers whose parameters have ``names``.

        ValueError if a parameter had an optimizer of another class, or those of a group were in several groups.
        """
        for one in optimizers:
            here = class_of(one)
            for name in (names[p] for group in one.param_groups for p in group["params"]):
                if (there := self.classes.get(name, here)) != here:
                    raise ValueError(f"the optimizer is a {here}; allowed: {there}, as it was saved with")
        groups = [group for one in optimizers for group in one.param_groups]
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
    step = entries.get("step", 1)
    return float(step) if isinstance(step, int | float) or (isinstance(step, Tensor) and not is_large(step)) else 1.0


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first key that only one of two mappings has, or with another value."""
    return next((k for k in {**one, **other} if k not in one or k not in other or one[k] != other[k]), None)


def fill(
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[nn.Parameter, Entries],
    numbers: Sequence[Numbers],
    beside: Mapping[str, Entries],
) -> None:
    """Set the entries of parameters, the numbers of groups, and state beside these, by the optimizer's class.

    A tensor of a group is filled in place, since a captured graph may read it.
    """
    left = iter(numbers)
    for optimizer in optimizers:
        own = [dict(group) for group in optimizer.param_groups]
        entries = enumerate(state.get(p) for group in own for p in group["params"])
        rest = {"state": {}, **beside.get(class_of(optimizer), {})}
        rest["state"] = {number: one for number, one in entries if one} | rest["state"]
        optimizer.load_state_dict(rest | {"param_groups": optimizer.state_dict()["param_groups"]})
        for group, before in zip(optimizer.param_groups, own, strict=True):
            group.update(before)  # without the copies that load_state_dict has made
            for key, value in next(left).items():
                group[key] = _set(group[key], value) if key in group else value
            for parameter in group["params"]:  # load_state_dict casts to its dtype, and makes generators of texts
                if own_state := state.get(parameter):
                    optimizer.state[parameter] = mapped(own_state, "", partial(_placed, parameter, group))


def _placed(parameter: nn.Parameter, group: Mapping[str, Any], value: Any, path: str) -> Any:
    """Return a value where torch's optimizers have it: a number of steps on the CPU, unless a graph reads it."""
    if not isinstance(value, Tensor):
        return value
    if not path.endswith(".step"):
        return value.to(parameter.device)
    on_device = group.get("capturable") or group.get("fused")
    return value.to(parameter.device, torch.float32) if on_device else value


@torch.no_grad()
def _set(here: Any, value: Any) -> Any:
    if isinstance(here, Tensor):
        return here.copy_(torch.as_tensor(value)) if here.ndim == 0 else here
    if isinstance(here, tuple | list) and isinstance(value, tuple | list) and len(here) == len(value):
        return type(value)(_set(*pair) for pair in zip(here, value, strict=True))
    return value.item() if isinstance(value, Tensor) and isinstance(here, Real) else value
