"""Gradients of tensor-parallel parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Placement, zeros

from overlap1f1b.engine.reduce.reduction import BlockKey
from overlap1f1b.engine.run.blocks import Blocks
from overlap1f1b.plan import Node
from overlap1f1b.transport.lanes import Flight
from overlap1f1b.transport.mesh import Mesh


class PartialSums:
    """Gives gradients the placements of their parameters, when the last contribution to a block is in.

    The gradient of a DTensor may have placements ``Partial``, as of a norm's weight under sequence parallelism. Torch
    would sum it wherever it is used next: in an optimizer, or in a thread that reduces it over other ranks, where the
    sums of two threads can meet. Here all ranks of a tensor group sum at the same node of their plan. In the first step
    they tell each other which gradients have placements of their own, since a rank may lack one. The gradient of an
    embedding whose rows are split is whole on every rank; here each keeps its rows.

    Args:
        stages: Stages of this rank, by number.
        mesh: Ranks of the engine.
    """

    def __init__(self, stages: Mapping[int, Blocks], mesh: Mesh) -> None:
        self.stages, self.mesh = stages, mesh
        self._placements: dict[BlockKey, dict[int, tuple[Placement, ...]]] = {}  # by number of the parameter

    @property
    def reduces(self) -> bool:
        """Whether any parameter is a DTensor."""
        return any(self._parameters(n, block) for n, stage in self.stages.items() for block in range(len(stage.blocks)))

    def _parameters(self, stage: int, block: int) -> list[Any]:
        every = (*self.stages[stage].own_parameters(block), *self.stages[stage].expert_parameters_of(block))
        return [parameter for parameter in every if isinstance(parameter, DTensor)]

    def begin(self, order: Sequence[Node]) -> None:
        """Prepare nothing."""

    def launch(self, node: Node) -> Sequence[Flight[Any]]:
        """Sum the partial gradients of a block, and wait for them."""
        if node.stage in self.stages and (parameters := self._parameters(node.stage, node.block)):
            known = self._known(node, parameters)
            for number, parameter in enumerate(parameters):
                grad = parameter.grad
                if number in known:
                    if grad is None:
                        options = {"device_mesh": parameter.device_mesh, "placements": known[number]}
                        grad = zeros(*parameter.shape, dtype=parameter.dtype, **options)
                    parameter.grad = grad.redistribute(placements=parameter.placements)
                elif grad is not None and grad.placements != parameter.placements:
                    raise RuntimeError(
                        f"the gradient of {self._name(node, parameter)} has placements {tuple(grad.placements)}, which "
                        f"it had on no rank in the first step; allowed: a first step in which all parameters are used"
                    )
        return ()

    def _name(self, node: Node, parameter: nn.Parameter) -> str:
        stage = self.stages[node.stage]
        label = next(name for name, p in stage.blocks[node.block].named_parameters() if p is parameter)
        return f"{label} of {stage.names[node.block]}"

    def _known(self, node: Node, parameters: Sequence[Any]) -> dict[int, tuple[Placement, ...]]:
        """Return the placements of gradients that differ from those of their parameters, on any rank."""
        key = node.stage, node.block
        if key not in self._placements:
            grads = {n: p.grad for n, p in enumerate(parameters) if p.grad is not None}
            mine = {n: tuple(g.placements) for n, g in grads.items() if g.placements != parameters[n].placements}
            self._placements[key] = {n: found for table in self.mesh.gathered("tp", mine) for n, found in table.items()}
        return self._placements[key]

    def settle(self) -> None:
        """Return at once: nothing is in flight between nodes."""

    def finish(self) -> None:
        """Return at once: every block with a DTensor has had its node."""

    def restore(self) -> None:
        """Leave the gradients as they are."""
