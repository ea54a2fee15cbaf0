"""The ranks that an engine spans: pipeline, data and expert parallel."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.engine.failures import headline
from overlap1f1b.moe.groups import Group, Groups, gather_objects
from overlap1f1b.schedule import Program

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
        timeout: Limit of every wait for another rank.

    Raises:
        ValueError: Other dimensions.
    """

    def __init__(self, mesh: DeviceMesh | None, timeout: timedelta | None = None) -> None:
        names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
        if mesh is not None and (not names or not set(names) <= set(DIMENSIONS)):
            raise ValueError(
                f"mesh with dimensions {names or None} of sizes {tuple(mesh.shape)}; "
                f"allowed: any of {', '.join(map(repr, DIMENSIONS))}"
            )
        self.devices = mesh
        self._groups: dict[str, Group] = {}
        self._control: dict[str, Group] = {}  # for agreements: on the CPU, whatever the device, with the limit
        self._at: dict[str, int] = {}
        self._ranks: Tensor | None = None
        if mesh is not None:
            self._groups = {name: mesh.get_group(name) for name in names if mesh[name].size() > 1}
            # Not the groups' own numbers: torch sorts a group's ranks, a mesh may have them in another order.
            self._at = dict(zip(names, mesh.get_coordinate() or (), strict=True))
            order = [names.index(name) for name in DIMENSIONS if name in names]
            self._ranks = mesh.mesh.permute(order)
            for position, dimension in enumerate(DIMENSIONS):
                if dimension not in names:
                    self._ranks = self._ranks.unsqueeze(position)
            for name, group in self._groups.items():
                ranks = dist.get_process_group_ranks(group)
                self._control[name] = Groups.of(group, timeout, gloo=True).new(ranks, "control")
        self.name: str = self.combined(uuid.uuid4().hex, lambda _, names: names[0])
        """Of this Mesh, the same on all its ranks and on no others."""
        self._own = Groups(self.name, timeout) if self._groups else None

    def check(self, program: Program) -> None:
        """Raises ValueError unless the program has as many pipeline ranks."""
        if self.size("pp") != program.placement.ranks:
            raise ValueError(
                f"program {program.name!r} over {program.placement.ranks} pipeline ranks on a mesh with "
                f"{self.size('pp')} along 'pp'; allowed: the same number"
            )

    def group(self, dimension: Dimension) -> Group | None:
        """The ranks along a dimension; None for one rank."""
        return self._groups.get(dimension)

    def size(self, dimension: Dimension) -> int:
        """Ranks along a dimension."""
        group = self.group(dimension)
        return 1 if group is None else group.size()

    def rank(self, dimension: Dimension) -> int:
        """This rank's number along a dimension."""
        return self._at.get(dimension, 0)

    @property
    def on_gloo(self) -> bool:
        """Whether any of the groups is."""
        return any(dist.get_backend(group) == "gloo" for group in self._groups.values())

    def ranks(self, *, pp: Sequence[int], over: Sequence[Dimension]) -> list[int]:
        """Numbers in the default group of some pipeline ranks, over further dimensions, ascending."""
        if self._ranks is None:
            return [dist.get_rank() if dist.is_initialized() else 0]
        at = [slice(None) if name in over else slice(self.rank(name), self.rank(name) + 1) for name in ("dp", "ep")]
        return sorted(self._ranks[list(pp)][:, at[0], at[1]].flatten().tolist())

    def new_group(self, purpose: str, *, pp: Sequence[int], over: Sequence[Dimension]) -> Group | None:
        """A new group of :meth:`ranks`, all of which must call this; None for one rank."""
        ranks = self.ranks(pp=pp, over=over)
        return self._own.new(ranks, purpose) if self._own is not None and len(ranks) > 1 else None

    def number(self, pp: int) -> int:
        """The number that a pipeline rank has in a group of this rank's pipeline."""
        assert self._ranks is not None
        mine = self._ranks[:, self.rank("dp"), self.rank("ep")].tolist()
        return sorted(mine).index(mine[pp])

    def gathered(self, dimension: Dimension, value: T) -> list[T]:
        """The values of all ranks along a dimension, in the mesh's order.

        Raises:
            RuntimeError: One of them failed, or did not answer within the limit.
        """
        group = self._control.get(dimension)
        if group is None:
            return [value]
        with _naming(dimension):
            values = gather_objects(group, value)
        mine = self._along(dimension)
        return [values[sorted(mine).index(rank)] for rank in mine]

    def _along(self, dimension: Dimension) -> list[int]:
        assert self._ranks is not None
        at = [slice(None) if name == dimension else self.rank(name) for name in DIMENSIONS]
        ranks: list[int] = self._ranks[at[0], at[1], at[2]].tolist()
        return ranks

    def meet(self, dimension: Dimension) -> None:
        """Waits for all ranks along a dimension.

        Raises:
            RuntimeError: As :meth:`gathered`.
        """
        with _naming(dimension):
            self._control[dimension].barrier().wait()

    def combined(self, value: T, combine: Callable[[Dimension, list[T]], T]) -> T:
        """A value made of those of all ranks: along "ep", then "dp", then "pp"; the same everywhere."""
        for dimension in reversed(DIMENSIONS):
            value = combine(dimension, self.gathered(dimension, value))
        return value


@contextmanager
def _naming(dimension: Dimension) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"the ranks along {dimension!r} did not meet: {headline(error)}") from error
