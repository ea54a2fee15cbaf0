"""Parameters that several stages hold as one, such as an embedding and the head that shares its weight."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from overlap1f1b.plan import Node
from overlap1f1b.reduce.reduction import Reduction
from overlap1f1b.schedule import Placement
from overlap1f1b.transport.mesh import Mesh

Ties = Mapping[int, Mapping[str, nn.Parameter]]
"""Tied parameters of this rank's stages, by stage and by the name that all their stages use."""


class TiedReduction(Reduction):
    """Sums the gradients of tied parameters over the stages, after every other reduction.

    Stages have copies of their own, or stages of one rank the same object. Equal gradients, and an optimizer that
    treats the copies alike, keep them equal. All ranks of the engine must make it.

    Raises:
        ValueError: A tied parameter is a DTensor or has two names, or has other shapes on other stages, or is frozen on
            some alone.
    """

    def __init__(self, ties: Ties, placement: Placement, mesh: Mesh) -> None:
        super().__init__()
        self.ties = ties
        self.parameters: dict[str, nn.Parameter] = {}
        """Tied parameters of this rank by name; stages of the rank hold equal copies."""
        names: dict[nn.Parameter, str] = {}
        mine: dict[tuple[str, int], str] = {}
        for stage, name, p in ((stage, name, p) for stage, tied in ties.items() for name, p in tied.items()):
            if isinstance(p, DTensor):
                raise ValueError(f"{name} is tied over stages and a DTensor; allowed: no FSDP2 around tied parameters")
            if names.setdefault(p, name) != name:
                raise ValueError(f"a parameter is tied as {names[p]} and as {name}; allowed: one name")
            self.parameters[name] = p
            mine[name, stage] = f"{list(p.shape)}{'' if p.requires_grad else ' frozen'}"
        shapes: dict[str, dict[int, str]] = {}
        for (name, stage), shape in sorted(entry for table in mesh.every(mine).values() for entry in table.items()):
            shapes.setdefault(name, {})[stage] = shape
        self.reduces = bool(shapes)
        """Whether any rank has tied parameters."""
        self._groups: dict[str, dist.ProcessGroup | None] = {}  # of parameters that this rank holds and that train
        self._first = {stage: placement.replicas(stage)[0] == mesh.rank("pp") for stage in ties}
        self.repeated: set[nn.Parameter] = set()
        """Parameters of this rank that a norm counts on an earlier stage."""
        for name, by_stage in shapes.items():
            if len(kinds := set(by_stage.values())) > 1:
                raise ValueError(f"{name} is tied over stages with shapes {by_stage}; allowed: one shape")
            counted = ties.get(min(by_stage), {}).get(name)
            self.repeated |= {tied[name] for tied in ties.values() if name in tied and tied[name] is not counted}
            holders = [set(placement.replicas(stage)) for stage in by_stage]
            ranks = sorted(set.union(*holders))
            if mesh.rank("pp") in ranks and not kinds.pop().endswith("frozen"):
                apart = any(set(ranks) != holder for holder in holders)
                self._groups[name] = mesh.new_group(f"tied {name}", pp=ranks, over=()) if apart else None

    def begin(self, order: Sequence[Node]) -> None:
        self._aside.take(p for tied in self.ties.values() for p in tied.values())

    def finish(self) -> None:
        # The last contribution of an embedding comes last of all.
        for name, group in self._groups.items():
            held: dict[nn.Parameter, int] = {}  # with the first of its stages: one object has the sum over its stages
            for stage, tied in sorted(self.ties.items()):
                if name in tied:
                    held.setdefault(tied[name], stage)
            first, *_ = held
            total = first.new_zeros(first.shape)
            for parameter, stage in held.items():
                if parameter.grad is not None and (group is None or self._first[stage]):
                    total += parameter.grad
            if group is not None:
                group.allreduce([total]).wait()
            for parameter in held:
                parameter.grad = total.clone()
        super().finish()


def ties_in(stage: object) -> Mapping[str, nn.Parameter]:
    """Return the tied parameters of a stage that is given, by the name that all their stages use."""
    tied = getattr(stage, "tied", None)  # a module that a model calls so is none
    return dict(tied.items()) if isinstance(tied, dict | nn.ParameterDict) else {}
