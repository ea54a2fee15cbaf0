"""Parameters that several stages hold as one, such as an embedding and the head that shares its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from overlap1f1b.engine.reduce.reduction import GradientsAside
from overlap1f1b.plan import Node
from overlap1f1b.schedule import Placement
from overlap1f1b.transport.lanes import Flight
from overlap1f1b.transport.mesh import Dimension, Mesh

Ties = Mapping[int, Mapping[str, nn.Parameter]]
"""Tied parameters of this rank's stages, by stage and by the name that all their stages use."""


class TiedReduction:
    """Sums the gradients of tied parameters over the stages, after every other reduction.

    Each stage has its own copy. Equal gradients, and an optimizer that treats the copies alike, keep them equal.
    All ranks of the engine must make it.

    Args:
        ties: Tied parameters of this rank's stages.
        placement: Which rank holds which stage.
        mesh: Ranks of the engine.

    Raises:
        ValueError: A tied parameter is a DTensor, or has other shapes on other stages.
    """

    def __init__(self, ties: Ties, placement: Placement, mesh: Mesh) -> None:
        for name, parameter in ((name, p) for tied in ties.values() for name, p in tied.items()):
            if isinstance(parameter, DTensor):
                raise ValueError(f"{name} is tied over stages and a DTensor; allowed: no FSDP2 around tied parameters")
        self.ties = ties
        mine = _joined(
            "pp", [{name: {stage: tuple(p.shape)} for name, p in tied.items()} for stage, tied in ties.items()]
        )
        self._stages: dict[str, list[int]] = {}
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self._first = {stage: placement.replicas(stage)[0] == mesh.rank("pp") for stage in ties}
        for name, shapes in sorted(mesh.combined(mine, _joined).items()):
            if len(set(shapes.values())) > 1:
                raise ValueError(f"{name} is tied over stages with shapes {shapes}; allowed: one shape")
            stages = sorted(shapes)
            holders = [set(placement.replicas(stage)) for stage in stages]
            ranks = sorted(set.union(*holders))
            self._stages[name] = stages
            if mesh.rank("pp") not in ranks:
                continue
            apart = any(set(ranks) != holder for holder in holders)
            self._groups[name] = mesh.new_group(f"tied {name}", pp=ranks, over=()) if apart else None
        self._aside = GradientsAside()

    @classmethod
    def of(cls, model: object, placement: Placement, mesh: Mesh) -> list[TiedReduction]:
        """Return the reduction of a model that is given as stages; empty if no rank has tied parameters."""
        ties: dict[int, Mapping[str, nn.Parameter]] = {}
        if isinstance(model, Mapping):
            ties = {
                number: stage.__dict__.get("tied", {}) for number, stage in model.items() if hasattr(stage, "__dict__")
            }
        tied = mesh.combined(any(ties.values()), lambda _, every: any(every))
        return [cls(ties, placement, mesh)] if tied else []

    @property
    def repeated(self) -> set[nn.Parameter]:
        """Parameters of this rank that a norm counts on an earlier stage."""
        return {p for stage, tied in self.ties.items() for name, p in tied.items() if stage != self._stages[name][0]}

    def begin(self, order: Sequence[Node]) -> None:
        """Set gradients of earlier steps aside."""
        self._aside.take(p for tied in self.ties.values() for p in tied.values())

    def launch(self, node: Node) -> Sequence[Flight[Any]]:
        """Start nothing: the last contribution of an embedding comes last of all."""
        return ()

    def settle(self) -> None:
        """Return at once: nothing is in flight between nodes."""

    def finish(self) -> None:
        """Sum over the stages, and add the gradients of earlier steps."""
        for name, group in self._groups.items():
            held = {stage: tied[name] for stage, tied in sorted(self.ties.items()) if name in tied}
            total = next(iter(held.values())).new_zeros(next(iter(held.values())).shape)
            for stage, parameter in held.items():
                if parameter.grad is not None and (group is None or self._first[stage]):
                    total += parameter.grad
            if group is not None:
                group.allreduce([total]).wait()
            for parameter in held.values():
                parameter.grad = total.clone()
        self.restore()

    def restore(self) -> None:
        """Add the gradients of earlier steps, also after a step that failed."""
        self._aside.add_back()


def repeated(reductions: Sequence[object]) -> set[nn.Parameter]:
    """Return the parameters that a norm counts on an earlier stage."""
    return {p for tied in reductions if isinstance(tied, TiedReduction) for p in tied.repeated}


def ties_of(reductions: Sequence[object]) -> dict[str, nn.Parameter]:
    """Return the tied parameters of this rank, by the name that all their stages use."""
    ties = [reduction.ties for reduction in reductions if isinstance(reduction, TiedReduction)]
    return {name: p for by_stage in ties for tied in by_stage.values() for name, p in tied.items()}


_Shapes = dict[str, dict[int, tuple[int, ...]]]


def _joined(dimension: Dimension, tables: list[_Shapes]) -> _Shapes:
    joined: _Shapes = {}
    for table in tables:
        for name, shapes in table.items():
            joined.setdefault(name, {}).update(shapes)
    return joined
