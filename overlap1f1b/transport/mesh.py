"""The mesh of an engine's ranks: every rank's coordinates, groups, and the comparison of values between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from itertools import compress, product
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.schedule import Program
from overlap1f1b.schedule.values import check_kind
from overlap1f1b.transport.failures import Failures, LostRankError, headline
from overlap1f1b.transport.groups import Group, Groups, backend_of, gather_objects, gathered

T = TypeVar("T")
Dimension = Literal["pp", "dp", "ep", "cp", "tp"]
DIMENSIONS: tuple[Dimension, ...] = ("pp", "dp", "ep", "cp", "tp")
DATA: tuple[Dimension, ...] = ("dp", "ep", "cp")
"""Dimensions whose ranks compute different data, so that gradients are summed over them."""
VALUES = "the values"
"""Begin of the names of facts that stand for the values of a tensor."""
_SHOWN = 80  # characters of a value in a message
_FACTS = 5  # numbers that are compared at once


class Mesh:
    """This rank's coordinates in a DeviceMesh; a missing dimension counts as one rank.

    Each method that compares values, all ranks must call, those along its dimensions. It raises ``LostRankError`` if
    one of them failed, or did not answer within the limit.

    >>> mesh = Mesh(init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "ep")))
    >>> mesh.size("ep"), mesh.size("dp")
    (4, 1)

    Attributes:
        devices: The DeviceMesh, with any of the dimensions "pp", "dp", "ep", "cp" and "tp", or None for one rank.
        experts_over: Dimensions whose ranks share the experts, in the order of :data:`DIMENSIONS`.
        exchanging: Group of the ranks that share the experts; None for this rank alone.
        number: Number of this rank in the default group.
        labels: Name of each rank in messages, by its number; ``label`` is this rank's.
        layout: Sizes of "pp", "dp" and "ep", and of the other dimensions that have several ranks.
        data_ranks: Number of ranks that compute different data at one stage.
        token_ranks: Number of ranks with different tokens at the experts: a tensor group's count if they share experts.
        expert_slice: Number of this rank in the group of ranks that share the experts, and the group's size.
        expert_copies: Dimensions with different data whose ranks hold the same experts.
        own: What makes the groups of this mesh, all of which end together.
        inner: Groups over which blocks may communicate: the mesh's own along "cp" and "tp".
        failures: Record of failures, shared by these ranks, with the limit of every wait for one of them.

    Raises:
        ValueError: ``mesh`` is no DeviceMesh or has other dimensions, or experts cannot be shared over
            ``experts_over``.
        LostRankError: A rank does not make its Mesh within the limit.
    """

    def __init__(
        self, mesh: DeviceMesh | None, limit: timedelta | None = None, experts_over: Sequence[str] = ("ep",)
    ) -> None:
        check_kind("mesh", mesh, DeviceMesh, None)
        names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
        if not experts_over:
            raise ValueError(f"experts_over={experts_over!r}; allowed: a list of ep, cp, or tp, one or more")
        if mesh is not None and (not names or not set(names) <= set(DIMENSIONS)):
            what = f"with dimensions {names}" if names else "without mesh_dim_names"
            raise ValueError(
                f"mesh {what} of sizes {tuple(mesh.shape)}; allowed: any of {', '.join(map(repr, DIMENSIONS))}"
            )
        self.devices = mesh
        self.experts_over: tuple[Dimension, ...] = tuple(name for name in DIMENSIONS if name in experts_over)
        self.device_type = "cpu" if mesh is None else mesh.device_type
        self._groups: dict[Dimension, Group] = {}
        self._beside: dict[str, Mesh] = {}
        self.number = dist.get_rank() if dist.is_initialized() else 0
        self._at: dict[str, int] = dict.fromkeys(DIMENSIONS, 0)
        ranks, size = torch.tensor(self.number, device="cpu"), dict[str, int]()
        if mesh is not None:
            # Not mesh[name].size(): for a slice torch 2.15 loads the compiler, and keeps a context variable of it.
            size = dict(zip(names, mesh.shape, strict=True))
            self._groups = {name: mesh.get_group(name) for name in DIMENSIONS if size.get(name, 1) > 1}
            # The mesh's coordinates, not numbers within groups: torch sorts the ranks of a group.
            self._at |= zip(names, mesh.get_coordinate() or (), strict=True)
            ranks = mesh.mesh.permute([names.index(name) for name in DIMENSIONS if name in names])
        self._ranks = ranks.reshape([size.get(name, 1) for name in DIMENSIONS])
        self._lines = dict(zip(DIMENSIONS, _lines(self._ranks, list(self._at.values())), strict=True))
        self.exchanging = self._exchanging()
        self.labels = self._labels()
        self.label, self.several = self.labels[self.number], len(self.labels) > 1
        every = {name: self.size(name) for name in DIMENSIONS}
        self.layout = {name: size for name, size in every.items() if size > 1 or name in ("pp", "dp", "ep")}
        self.data_ranks = math.prod(every[name] for name in DATA)
        self.token_ranks = self.data_ranks * (every["tp"] if "tp" in experts_over else 1)
        shared = self.exchanging
        self.expert_slice = (0, 1) if shared is None else (shared.rank(), shared.size())
        self.expert_copies = tuple(name for name in DATA if name not in experts_over)
        self.inner = [group for name in ("cp", "tp") if (group := self.group(name)) is not None]
        self.own = Groups(list(self.labels), limit, device=self.device_type)
        self.failures = Failures(self.own.name if self.several else None, self.labels, limit=limit)
        self.failures.meet()
        self._control = self._comparing("control")

    def _comparing(self, purpose: str) -> dict[Dimension, Group]:
        """Return a new group along each dimension of several ranks, on gloo whatever the device, to compare values."""
        made: dict[Dimension, Group] = {}
        for name in self._groups:
            with _naming(name):
                made[name] = self.own.new(self.along(name), f"{purpose} {name}", gloo=True)
        return made

    def _exchanging(self) -> Group | None:
        several = [name for name in self.experts_over if name in self._groups]
        if len(several) < 2 or self.devices is None:
            return self._groups[several[0]] if several else None
        names = tuple(name for name in self.devices.mesh_dim_names or () if name in several)
        return self.devices[names]._flatten("_".join(names)).get_group()

    def _labels(self) -> dict[int, str]:
        shape = self._ranks.shape
        several = [position for position, size in enumerate(shape) if size > 1]
        return {
            int(self._ranks[at]): "rank " + (", ".join(f"{DIMENSIONS[p]} {at[p]}" for p in several) or "0")
            for at in product(*map(range, shape))
        }

    @property
    def device(self) -> torch.device:
        """This rank's device, of the type that the mesh has."""
        return torch.empty(0, device=self.device_type).device

    def group(self, dimension: Dimension) -> Group | None:
        """Return the group of this rank along a dimension; None for one rank."""
        return self._groups.get(dimension)

    def size(self, dimension: Dimension) -> int:
        """Return the number of ranks along a dimension."""
        group = self.group(dimension)
        return 1 if group is None else group.size()

    def rank(self, dimension: Dimension) -> int:
        """Return this rank's coordinate along a dimension."""
        return self._at[dimension]

    @property
    def on_gloo(self) -> bool:
        """Whether any dimension's group is on gloo."""
        return any(backend_of(group, self.device_type) == "gloo" for group in self._groups.values())

    def ranks(self, *, pp: Sequence[int], over: Sequence[Dimension]) -> list[int]:
        """Return the default group's numbers of the pipeline ranks ``pp`` over further dimensions, ascending."""
        at = [slice(None) if d in over else self._at[d] for d in DIMENSIONS[1:]]
        return sorted(self._ranks[list(pp)][(slice(None), *at)].flatten().tolist())

    def new_group(self, purpose: str, *, pp: Sequence[int], over: Sequence[Dimension], **options: Any) -> Group | None:
        """Return a new group of :meth:`ranks`, all of which must call this; None for one rank.

        ``options`` go to :meth:`Groups.new`.
        """
        ranks = self.ranks(pp=pp, over=over)
        return self.own.new(ranks, purpose, **options) if len(ranks) > 1 else None

    def beside(self, purpose: str) -> Mesh:
        """Return this mesh with groups of its own to compare values, for a thread beside this one.

        All ranks must call this, and close this mesh alone.
        """
        if purpose not in self._beside:
            other = self._beside[purpose] = copy(self)
            other._control = self._comparing(purpose)
        return self._beside[purpose]

    def close(self) -> None:
        """End all groups of this mesh; no other method may be called any more."""
        self._control.clear()
        self._beside.clear()
        self.own.close()

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError if a group has no or another backend for a device, or the default group is another's."""
        if not self._groups:
            return
        wanted = backend_of(None, device)
        for name, group in self._groups.items():
            if (found := backend_of(group, device)) != wanted:
                raise ValueError(
                    f"the mesh's group along {name!r} is on {found} for a model on {str(device)!r}; "
                    f"allowed: {wanted}, as the default group"
                )
        if self.device_type != device.type:
            raise ValueError(
                f"a mesh of {self.device_type!r} for a model on {str(device)!r}; allowed: a mesh of {device.type!r}"
            )
        bound = getattr(dist.distributed_c10d._get_default_group(), "bound_device_id", None)
        if bound is not None and bound.type == device.type and bound.index not in (None, device.index):
            raise ValueError(
                f"init_process_group(device_id={bound}) for a model on {str(device)!r}; allowed: the model's device"
            )

    def gathered(self, dimension: Dimension, value: T) -> list[T]:
        """Return the values of all ranks along a dimension, in the mesh's order."""
        group = self._control.get(dimension)
        if group is None:
            return [value]
        with _naming(dimension):
            return gather_objects(group, self.along(dimension), value)

    def leads(self, replicas: Sequence[int], *, expert: bool, parts: Collection[int] = ()) -> bool:
        """Return whether this rank is the first of the pipeline ranks ``replicas`` that hold a parameter.

        Each of the ranks that hold ``parts`` of a DTensor counts.
        """
        pipeline = self.along("pp")
        lines = [[pipeline[pp] for pp in replicas]]
        lines += [self.along(name) for name in DIMENSIONS[1:] if not (expert and name in self.experts_over)]
        return all(self.number == line[0] or set(line) <= set(parts) for line in lines)

    def agree(self, facts: Mapping[str, object], besides: str = "", *, over: Sequence[Dimension] = DIMENSIONS) -> None:
        """Compare values by name over all ranks along ``over`` that have them; ValueError if two differ.

        The message has both values and both ranks, and ``besides``, what else would be allowed.
        """
        for dimension in (name for name in reversed(over) if name in self._control):
            first: dict[str, tuple[object, int]] = {}
            for rank, theirs in zip(self.along(dimension), self.gathered(dimension, dict(facts)), strict=True):
                for name, fact in theirs.items():
                    other, whose = first.setdefault(name, (fact, rank))
                    if other != fact:
                        here, there = self.labels[whose], self.labels[rank]
                        one, two = _differing(str(other), str(fact))
                        said = f"{name} is {one} on {here} and {two} on {there}"
                        if name.startswith(VALUES):  # sums of bits say nothing to a user
                            said = f"{name} differ between {here} and {there}"
                        raise ValueError(f"{said}; allowed: the same on all ranks{besides}")

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank along all dimensions."""
        return not any(map(self.rank, DIMENSIONS))

    @property
    def where(self) -> str:
        """For messages: ``" on rank ep 1"``, and nothing on a rank alone."""
        return f" on {self.label}" if self.several else ""

    def compared(self, facts: Mapping[str, float], limit: timedelta | None = None) -> Comparison:
        """Start to compare up to five numbers over all ranks; ``limit`` is of waits, None for the mesh's own."""
        return Comparison(self._control, facts, limit or self.failures.limit)

    def along(self, dimension: Dimension) -> list[int]:
        """Return the default group's numbers of the ranks along a dimension, in the mesh's order."""
        return self._lines[dimension]

    def barrier(self) -> None:
        """Wait for all ranks that share the experts."""
        for dimension in self.experts_over:
            if dimension in self._control:
                with _naming(dimension):
                    self._control[dimension].barrier().wait()

    def sums(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks, in float64, the same on all ranks."""
        total = torch.tensor(values, dtype=torch.float64, device="cpu")
        for dimension, group in self._control.items():
            with _naming(dimension):
                group.allreduce([total]).wait()
        return list(total.tolist())

    def combined(
        self, value: T, combine: Callable[[Dimension, list[T]], T], *, over: Sequence[Dimension] = DIMENSIONS
    ) -> T:
        """Combine the values of all ranks along ``over``, the last dimension first; the result is the same on them."""
        for dimension in reversed(over):
            value = combine(dimension, self.gathered(dimension, value))
        return value

    def every(self, value: T, *, over: Sequence[Dimension] = DIMENSIONS) -> dict[int, T]:
        """Return the values of all ranks along ``over`` by their numbers in the default group, in the mesh's order."""
        return self.combined(
            {self.number: value}, lambda _, tables: {rank: t[rank] for t in tables for rank in t}, over=over
        )


class Comparison:
    """Named numbers that are compared over the ranks of some groups, by their dimensions, while the thread goes on.

    Ranks compare them in their order; other ranks may have other names, if what they do is itself one of the numbers.
    Waits raise a LostRankError if a rank failed, or did not answer within the limit.
    """

    def __init__(self, groups: Mapping[Dimension, Group], facts: Mapping[str, float], limit: timedelta) -> None:
        self._groups, self._limit, self._facts = groups, limit, facts
        if not groups:  # a rank alone
            return
        assert len(facts) <= _FACTS, facts  # ranks in another call compare as many
        numbers = [*facts.values(), *[0.0] * (_FACTS - len(facts))]
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._own = torch.tensor([numbers, [-number for number in numbers]], dtype=torch.float64, device="cpu")
        self._most = {name: self._own.clone() for name in groups}
        self._works = {name: groups[name].allreduce([line], self._options) for name, line in self._most.items()}

    def differ(self, *, here: bool = False) -> set[str]:
        """Wait; return the names of numbers that differ, the same on all ranks.

        With ``here=True``, by which ranks may call this alone, it is along any dimension of this rank.
        """
        if not self._groups:
            return set()
        lines = self._lines()
        found = torch.stack([(line != self._own).any(dim=0) for line in lines.values()]).any(dim=0).to(torch.uint8)
        # One dimension after the other: otherwise a rank would not learn of a difference elsewhere.
        for name in () if here or len(lines) < 2 else self._groups:
            with _naming(name):
                self._groups[name].allreduce([found], self._options).wait(self._limit)
        return set(compress(self._facts, found.tolist()))

    def extremes(self, fact: str, *over: Dimension) -> tuple[float, float]:
        """Wait; return the least and the largest number of a name, along these dimensions of this rank, or all."""
        if not self._groups:
            return self._facts[fact], self._facts[fact]
        lines = [line for name, line in self._lines().items() if name in over or not over]
        most, least = torch.stack([self._own, *lines])[:, :, [*self._facts].index(fact)].max(dim=0).values.tolist()
        return -least, most

    def _lines(self) -> dict[Dimension, torch.Tensor]:
        for name, work in self._works.items():
            with _naming(name):
                work.wait(self._limit)
        return self._most


@contextmanager
def _naming(dimension: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(f"the ranks along {dimension!r} did not meet: {headline(error)}") from error


def _differing(one: str, other: str) -> tuple[str, str]:
    """Return both texts; a long text begins a little before the first difference."""
    if max(len(one), len(other)) <= _SHOWN:
        return one, other
    same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, same - 20)
    parts = (text[start : start + _SHOWN] for text in (one, other))
    first, second = (f"{'…' if start else ''}{part}{'…' if len(part) == _SHOWN else ''}" for part in parts)
    return first, second


def check_ranks(program: Program, mesh: DeviceMesh | None) -> None:
    """Raise ValueError if a program has another number of pipeline ranks than a mesh; None is one rank."""
    size = 1 if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)).get("pp", 1)
    if size != program.placement.ranks:
        raise ValueError(
            f"program {program.name!r} over {program.placement.ranks} pipeline ranks on a mesh with {size} along 'pp'; "
            f"allowed: the same number, as of build_schedule(..., ranks={size})"
        )


def lines_of(mesh: DeviceMesh) -> list[list[int]]:
    """Return the ranks that this rank meets along each dimension of a DeviceMesh."""
    return _lines(mesh.mesh, mesh.get_coordinate() or [0] * mesh.ndim)


def _lines(ranks: torch.Tensor, at: Sequence[Any]) -> list[list[int]]:
    return [ranks[(*at[:dimension], slice(None), *at[dimension + 1 :])].tolist() for dimension in range(ranks.ndim)]


def grid_of(
    pp: Group | None, ep: Group | None, device: torch.device, limit: timedelta, *, order: Sequence[int] | None = None
) -> DeviceMesh | None:
    """Return the mesh "pp" × "ep" of this rank's groups, None for one rank; all ranks along "ep" must call this.

    A group that is None has this rank alone. Ranks along ``ep`` are each in a separate pipeline; ``order[i]`` is the
    pipeline rank of rank ``i`` of ``pp``, by default ``i``. ValueError if the groups do not form a grid.
    """
    named = [(name, group) for name, group in (("pp", pp), ("ep", ep)) if group is not None]
    if not named:
        return None
    line = [dist.get_rank()] if pp is None else dist.get_process_group_ranks(pp)
    line = line if order is None else [line[order.index(number)] for number in range(len(line))]
    lines = [line]
    if ep is not None:
        column, own = dist.get_process_group_ranks(ep), line.index(dist.get_rank())
        lines = gathered(column, line, limit)
        across = [one[own : own + 1] for one in lines] == [[rank] for rank in column]
        if not across or len({len(one) for one in lines}) > 1:
            raise ValueError(
                f"pipelines {lines} of ranks {column} that share experts; allowed: a grid, one rank of each"
            )
    ranks = torch.tensor(lines, device="cpu").T  # [pp, ep]
    names, groups = zip(*named, strict=True)
    return DeviceMesh.from_group(
        list(groups), device.type, mesh=ranks if len(named) == 2 else ranks.flatten(), mesh_dim_names=names
    )
