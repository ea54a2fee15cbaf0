"""An optimizer in a checkpoint: states of parameters and numbers of parameter groups, by the parameters' names.

    table = Table.merged(listed)  # of all ranks
    set_groups(optimizer, table.chosen(optimizer, names))

Large tensors of a state are DCP's; the table has tensors of the whole shape on the meta device in their place. In
another layout a rank holds other parameters of a group, or none. So a group gets the numbers that its own parameters
were saved with. A group without parameters gets the numbers of its position in the list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overlap1f1b.checkpoint.folder import first_difference

Numbers = dict[str, Any]
State = dict[str, Any]

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


def is_large(value: object) -> bool:
    """Return whether a value in a table stands for a tensor that DCP stores."""
    return isinstance(value, Tensor) and value.is_meta


class Listed(NamedTuple):
    """What one rank's optimizer has."""

    slice: int  # number of the rank among those that share the experts
    state: dict[str, State]  # by parameter; those without an update have none
    groups: list[tuple[Numbers, list[str]]]  # numbers of each group, and the names of its parameters


class Table(NamedTuple):
    """What the optimizers of all ranks have.

    Args:
        state: State of each parameter; if ranks differ, of the rank with the most updates.
        numbers: Numbers of each parameter's group; parameters of one group share one dictionary.
        places: Numbers of each position in the list of groups; None if ranks had different numbers of groups.
    """

    state: dict[str, State]
    numbers: dict[str, Numbers]
    places: list[Numbers] | None

    @classmethod
    def merged(cls, ranks: Sequence[Listed]) -> Table:
        """Return the table of all ranks."""
        state: dict[str, State] = {}
        for name, own in (entry for rank in ranks for entry in rank.state.items()):
            if name not in state or _updates(own) > _updates(state[name]):
                state[name] = own
        numbers = {name: own for rank in reversed(ranks) for own, names in rank.groups for name in names}
        places = None
        if len({len(rank.groups) for rank in ranks}) == 1:
            columns = zip(*(rank.groups for rank in ranks), strict=True)
            places = [next((own for own, names in column if names), column[0][0]) for column in columns]
        return cls(state, numbers, places)

    def check_count(self, here: Sequence[int]) -> None:
        """Raise ValueError if the ranks all have one number of groups, but another was stored."""
        if self.places is not None and len(set(here)) == 1 and here[0] != len(self.places):
            raise ValueError(
                f"the optimizer has {here[0]} parameter groups, the checkpoint has {len(self.places)}; "
                "allowed: the same groups as it was saved with"
            )

    def chosen(self, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> list[Numbers]:
        """Return the numbers to set in each group; none for a group without stored numbers."""
        found = []
        for place, group in enumerate(optimizer.param_groups):
            mine = [(name, self.numbers[name]) for p in group["params"] if (name := names[p]) in self.numbers]
            for name, own in mine[1:]:
                if own is not mine[0][1] and (key := first_difference(mine[0][1], own)) is not None:
                    raise ValueError(
                        f"group {place} of the optimizer has {mine[0][0]} and {name}, for which the checkpoint has "
                        f"{key}={mine[0][1].get(key)} and {key}={own.get(key)}; "
                        "allowed: the same groups as it was saved with"
                    )
            by_place = self.places if self.places and len(self.places) == len(optimizer.param_groups) else None
            found.append(mine[0][1] if mine else by_place[place] if by_place else {})
        return found


def _updates(state: State) -> float:
    return 1.0 if is_large(step := state.get("step", 1)) else float(step)


def numbers_of(group: Mapping[str, Any]) -> Numbers:
    """Return what can be stored of a parameter group: not a function, for example, which the loading one has too."""
    found: Numbers = {}
    for key, value in group.items():
        with suppress(TypeError):
            if key not in _NOT_STORED:
                found[key] = plain(value)
    return found


def set_groups(optimizer: torch.optim.Optimizer, numbers: Sequence[Numbers]) -> None:
    """Set the groups' numbers. A tensor is filled in place, since a captured graph may read it."""
    for group, new in zip(optimizer.param_groups, numbers, strict=True):
        for key, value in new.items():
            group[key] = _set(group[key], value) if key in group else value


@torch.no_grad()
def _set(here: Any, value: Any) -> Any:
    if isinstance(here, Tensor):
        return here.copy_(torch.as_tensor(value)) if here.ndim == 0 else here
    if isinstance(here, tuple | list) and isinstance(value, tuple | list) and len(here) == len(value):
        return type(value)(_set(*pair) for pair in zip(here, value, strict=True))
    return value.item() if isinstance(value, Tensor) and isinstance(here, Real) else value
