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


class TensorGradients:
    """Gives gradients the placements of their parameters, when the last contribution to a block is in.

    The gradient of a DTensor may have placements ``Partial``, as of a norm's weight under sequence parallelism. Torch
    would sum it wherever it is used next: in an optimizer, or in a thread that reduces it over other ranks, where the
    sums of two threads can meet. Here all ranks of a tensor group sum at the same node of their plan. They tell each
    other the placements of each gradient in the first step in which one of them has it, since a rank may lack it. The
    gradient of an embedding whose rows are split is whole on every rank; here each keeps its rows.

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
        """Give the gradients of a block the placements of their parameters, and wait for the sums.

        Raises:
            ValueError: Ranks differ in the placements of a gradient, so that one would wait for a sum for ever.
            RuntimeError: A gradient has placements that it did not have before.
        """
        if node.stage in self.stages and (parameters := self._parameters(node.stage, node.block)):
            known = self._known(node, parameters)
            for number, parameter in enumerate(parameters):
                grad, placements = parameter.grad, known.get(number)
                if placements is None or (grad is None and placements == parameter.placements):
                    continue
                if grad is None:
                    options = {"device_mesh": parameter.device_mesh, "placements": placements}
                    grad = zeros(*parameter.shape, dtype=parameter.dtype, **options)
                elif grad.placements != placements:
                    raise RuntimeError(
                        f"the gradient of {self._name(node, parameter)} has placements {tuple(grad.placements)}; "
                        f"allowed: {placements}, as in its first step"
                    )
                if placements != parameter.placements:
                    parameter.grad = grad.redistribute(placements=parameter.placements)
        return ()

    def _name(self, node: Node, parameter: nn.Parameter) -> str:
        stage = self.stages[node.stage]
        label = next(name for name, p in stage.blocks[node.block].named_parameters() if p is parameter)
        return f"{label} of {stage.names[node.block]}"

    def _known(self, node: Node, parameters: Sequence[Any]) -> dict[int, tuple[Placement, ...]]:
        """Return the placements of gradients; ranks exchange them until each parameter has had a gradient."""
        known = self._placements.setdefault((node.stage, node.block), {})
        if len(known) < len(parameters):
            mine = {n: tuple(p.grad.placements) for n, p in enumerate(parameters) if p.grad is not None}
            for table in self.mesh.gathered("tp", mine):
                for number, found in table.items():
                    if known.setdefault(number, found) != found:
                        raise ValueError(
                            f"the gradient of {self._name(node, parameters[number])} has placements {found} on a rank "
                            f"of a tensor group and {known[number]} on another; allowed: the same on all its ranks"
                        )
        return known

    def settle(self) -> None:
        """Return at once: nothing is in flight between nodes."""

    def finish(self) -> None:
        """Return at once: every block with a DTensor has had its node."""

    def restore(self) -> None:
        """Leave the gradients as they are."""
