"""The ranks that an engine spans: pipeline, data and expert parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
Dimension = Literal["pp", "dp", "ep"]
DIMENSIONS: tuple[Dimension, ...] = ("pp", "dp", "ep")


class Mesh:
    """This rank's place in a DeviceMesh, whose absent dimensions count as one rank.

    >>> mesh = Mesh(init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "ep")))
    >>> mesh.size("ep"), mesh.size("dp")
    (4, 1)

    Args:
        mesh: With any of the dimensions "pp", "dp" and "ep"; None for one rank.

    Raises:
        ValueError: Other dimensions.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
        if mesh is not None and (not names or not set(names) <= set(DIMENSIONS)):
            raise ValueError(
                f"mesh with dimensions {names or None} of sizes {tuple(mesh.shape)}; "
                f"allowed: any of {', '.join(map(repr, DIMENSIONS))}"
            )
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._ranks: Tensor | None = None
        if mesh is not None:
            self._groups = {name: mesh.get_group(name) for name in names if mesh[name].size() > 1}
            order = [names.index(name) for name in DIMENSIONS if name in names]
            ranks = mesh.mesh.permute(order)
            for position, name in enumerate(DIMENSIONS):
                ranks = ranks if name in names else ranks.unsqueeze(position)
            self._ranks = ranks

    def group(self, dimension: Dimension) -> dist.ProcessGroup | None:
        """The ranks along a dimension; None for one rank."""
        return self._groups.get(dimension)

    def size(self, dimension: Dimension) -> int:
        """Ranks along a dimension."""
        group = self.group(dimension)
        return 1 if group is None else group.size()

    def rank(self, dimension: Dimension) -> int:
        """This rank's number along a dimension."""
        group = self.group(dimension)
        return 0 if group is None else group.rank()

    def new_group(self, *, pp: Sequence[int], over: Sequence[Dimension]) -> dist.ProcessGroup | None:
        """A new group of the ranks of some pipeline ranks, over further dimensions; None for one rank.

        All of them must call this.
        """
        if self._ranks is None:
            return None
        at = [slice(None) if name in over else slice(self.rank(name), self.rank(name) + 1) for name in ("dp", "ep")]
        ranks: list[int] = sorted(self._ranks[list(pp)][:, at[0], at[1]].flatten().tolist())
        return dist.new_group(ranks, use_local_synchronization=True) if len(ranks) > 1 else None

    def gathered(self, dimension: Dimension, value: T) -> list[T]:
        """The values of all ranks along a dimension."""
        group = self.group(dimension)
        if group is None:
            return [value]
        values: list[Any] = [None] * group.size()
        dist.all_gather_object(values, value, group=group)
        return values

    def combined(self, value: T, combine: Callable[[Dimension, list[T]], T]) -> T:
        """A value made of those of all ranks: along "ep", then "dp", then "pp"; the same everywhere."""
        for dimension in reversed(DIMENSIONS):
            value = combine(dimension, self.gathered(dimension, value))
        return value
