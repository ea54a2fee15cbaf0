"""The ranks that an engine spans: pipeline, data and expert parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.schedule import Program
from overlap1f1b.transport.failures import Failures, LostRankError, headline
from overlap1f1b.transport.groups import Group, Groups, backend_of, gather_objects

T = TypeVar("T")
Dimension = Literal["pp", "dp", "ep"]
DIMENSIONS: tuple[Dimension, ...] = ("pp", "dp", "ep")
_MOST = 80  # characters of a value in a message


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
        LostRankError: A rank does not make its Mesh within the limit.
    """

    def __init__(self, mesh: DeviceMesh | None, timeout: timedelta | None = None) -> None:
        names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
        if mesh is not None and (not names or not set(names) <= set(DIMENSIONS)):
            raise ValueError(
                f"mesh with dimensions {names or None} of sizes {tuple(mesh.shape)}; "
                f"allowed: any of {', '.join(map(repr, DIMENSIONS))}"
            )
        self.devices = mesh
        self.device_type = "cpu" if mesh is None else mesh.device_type
        self.same: dict[str, object] = {}
        """What has to be equal on all ranks; compared whenever they exchange values."""
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
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self.labels = self._labels()
        """What messages call each rank, by its number in the default group."""
        self._own: Groups | None = None
        if mesh is None or not self._groups:
            self.failures = Failures()
            return
        self._own = Groups(list(self.labels), timeout, device=self.device_type)
        self.failures = Failures(self._own.name, self.labels)
        """What these ranks tell each other when one fails."""
        self.failures.meet(timeout or dist.distributed_c10d.default_pg_timeout)
        for name in self._groups:
            with _naming(name):
                self._control[name] = self._own.new(self._along(name), f"control {name}", gloo=True)

    def _labels(self) -> dict[int, str]:
        if self._ranks is None:
            return {}
        shape = tuple(self._ranks.shape)
        several = [position for position, size in enumerate(shape) if size > 1]
        return {
            int(rank): "rank " + (", ".join(f"{DIMENSIONS[p]} {at[p]}" for p in several) or "0")
            for rank, at in zip(self._ranks.flatten().tolist(), product(*map(range, shape)), strict=True)
        }

    @property
    def label(self) -> str:
        """What messages call this rank."""
        return self.labels.get(self._rank, "rank 0")

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return len(self.labels) > 1

    def abort(self) -> None:
        """Ends every transfer of this mesh's own groups on gloo, on its other ranks too."""
        if self._own is not None:
            self._own.abort()

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
        return any(backend_of(group, self.device_type) == "gloo" for group in self._groups.values())

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
            ValueError: They differ in what has to be the :attr:`same`.
            LostRankError: One of them failed, or did not answer within the limit.
        """
        group = self._control.get(dimension)
        if group is None:
            return [value]
        with _naming(dimension):
            found = gather_objects(group, (self.same, value))
        mine = self._along(dimension)
        found = [found[sorted(mine).index(rank)] for rank in mine]
        self._compare(mine, [same for same, _ in found])
        return [value for _, value in found]

    def agree(self, facts: Mapping[str, object]) -> None:
        """Compares facts by their names, over all ranks that have a fact of that name.

        Raises:
            ValueError: One differs; the message has both values and whose they are.
            LostRankError: As :meth:`gathered`.
        """
        for dimension in reversed(DIMENSIONS):
            if dimension in self._control:
                self._compare(self._along(dimension), self.gathered(dimension, dict(facts)))

    def compared(self, number: float) -> Callable[[], bool]:
        """Starts to compare a number over all ranks; what it returns waits, and says on all ranks whether all are one.

        Raises:
            LostRankError: When called: a rank failed, or did not answer within the limit.
        """
        ends = torch.tensor([number, -number], dtype=torch.float64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        groups = iter(self._control.items())
        first = next(groups, None)
        work = None if first is None else first[1].allreduce([ends], options)

        def same() -> bool:
            if first is not None and work is not None:
                with _naming(first[0]):
                    work.wait()
            for dimension, group in groups:  # each of what the one before gave, or some ranks would not hear of it
                with _naming(dimension):
                    group.allreduce([ends], options).wait()
            return bool(ends[0] == -ends[1])

        return same

    def _compare(self, ranks: Sequence[int], every: Sequence[Mapping[str, object]]) -> None:
        first: dict[str, tuple[object, int]] = {}
        for rank, facts in zip(ranks, every, strict=True):
            for name, fact in facts.items():
                other, whose = first.setdefault(name, (fact, rank))
                if other != fact:
                    one, two = _differing(str(other), str(fact))
                    raise ValueError(
                        f"{name} is {one} on {self.labels[whose]} and {two} on {self.labels[rank]}; "
                        "allowed: the same on all ranks"
                    )

    def _along(self, dimension: str) -> list[int]:
        assert self._ranks is not None
        at = [slice(None) if name == dimension else self.rank(name) for name in DIMENSIONS]
        ranks: list[int] = self._ranks[at[0], at[1], at[2]].tolist()
        return ranks

    def meet(self, dimension: Dimension) -> None:
        """Waits for all ranks along a dimension.

        Raises:
            LostRankError: One of them failed, or did not answer within the limit.
        """
        with _naming(dimension):
            self._control[dimension].barrier().wait()

    def combined(self, value: T, combine: Callable[[Dimension, list[T]], T]) -> T:
        """A value made of those of all ranks: along "ep", then "dp", then "pp"; the same everywhere."""
        for dimension in reversed(DIMENSIONS):
            value = combine(dimension, self.gathered(dimension, value))
        return value


@contextmanager
def _naming(dimension: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(f"the ranks along {dimension!r} did not meet: {headline(error)}") from error


def _differing(one: str, other: str) -> tuple[str, str]:
    """Both texts from a little before where they begin to differ, if they are long."""
    if max(len(one), len(other)) <= _MOST:
        return one, other
    same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, same - 20)
    parts = (text[start : start + _MOST] for text in (one, other))
    first, second = (f"{'…' if start else ''}{part}{'…' if len(part) == _MOST else ''}" for part in parts)
    return first, second
