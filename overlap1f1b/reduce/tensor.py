"""Gradients of tensor-parallel parameters."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, zeros

from overlap1f1b.cut.stage import Stage
from overlap1f1b.plan import Node
from overlap1f1b.reduce.fsdp import ShardedReducer
from overlap1f1b.reduce.reduction import BlockKey, Reduction
from overlap1f1b.transport.lanes import Flight
from overlap1f1b.transport.mesh import Mesh

GradientSpec = tuple[tuple[Placement, ...], torch.dtype]
"""Placements and dtype of a gradient."""


class TensorGradients(Reduction):
    """Gives gradients the placements of their parameters, when the last contribution to a block is in.

    The gradient of a DTensor may have placements ``Partial``, as of a norm's weight under sequence parallelism. Torch
    would sum it wherever it is used next: in an optimizer, or in a thread that reduces it over other ranks, where the
    sums of two threads can meet. Here all ranks of a tensor group sum at the same node of their plan. They tell each
    other the placements of each gradient in the first step in which one of them has it, since a rank may lack it. The
    gradient of an embedding whose rows are split is whole on every rank; here each keeps its rows.

    FSDP2's reduction, ``sharded``, may sum gradients beside ``.grad``.
    """

    def __init__(self, stages: Mapping[int, Stage], mesh: Mesh, sharded: ShardedReducer | None) -> None:
        super().__init__()
        self.stages, self.mesh, self.sharded = stages, mesh, sharded
        self._parameters: dict[BlockKey, list[Any]] = {}
        for number, stage in stages.items():
            for block in range(len(stage.blocks)):
                every = (*stage.dense_parameters_of(block), *stage.expert_parameters_of(block))
                self._parameters[number, block] = [p for p in every if isinstance(p, DTensor)]
        self.reduces = any(self._parameters.values())
        """Whether any parameter is a DTensor."""
        self._known: dict[BlockKey, dict[int, GradientSpec]] = {}  # by number of the parameter

    def begin(self, order: Sequence[Node]) -> None:
        # Torch would sum partial ones before it adds to them.
        self._aside.take(chain.from_iterable(self._parameters.values()))

    def _gradient(self, parameter: nn.Parameter) -> Any:
        return parameter.grad if self.sharded is None else self.sharded.gradient(parameter)

    def launch(self, node: Node) -> Sequence[Flight[Any]]:
        """Give the gradients of a block the placements of their parameters, and wait for the sums.

        ValueError if ranks differ in a gradient's placements, and RuntimeError if these are new: one would wait for
        ever.
        """
        if parameters := self._parameters.get((node.stage, node.block)):
            for number, (placements, dtype) in sorted(self._specs(node, parameters).items()):
                parameter = parameters[number]
                grad = self._gradient(parameter)
                if grad is not None and grad.placements != placements:
                    raise RuntimeError(
                        f"the gradient of {self._name(node, parameter)} has placements {tuple(grad.placements)}; "
                        f"allowed: {placements}, as in its first step"
                    )
                if placements == parameter.placements:
                    continue
                if grad is None:
                    over = parameter.device_mesh
                    grad = zeros(*parameter.shape, dtype=dtype, device_mesh=over, placements=placements)
                grad = grad.redistribute(placements=parameter.placements)
                if self.sharded is None:
                    parameter.grad = grad
                else:
                    self.sharded.set_gradient(parameter, grad)
            if self.sharded is not None:  # it reduces what steps without set_requires_gradient_sync have left
                self._aside.add_back(parameters)
        return ()

    def _name(self, node: Node, parameter: nn.Parameter) -> str:
        stage = self.stages[node.stage]
        label = next(name for name, p in stage.blocks[node.block].named_parameters() if p is parameter)
        return f"{label} of {stage.names[node.block]}"

    def _specs(self, node: Node, parameters: Sequence[Any]) -> dict[int, GradientSpec]:
        """Return placements and dtypes of gradients; ranks exchange them until each parameter has had a gradient."""
        known = self._known.setdefault((node.stage, node.block), {})
        if len(known) < len(parameters):
            grads = {n: grad for n, p in enumerate(parameters) if (grad := self._gradient(p)) is not None}
            mine = {n: (tuple(grad.placements), grad.dtype) for n, grad in grads.items()}
            for table in self.mesh.gathered("tp", mine):
                for number, found in table.items():
                    if known.setdefault(number, found) != found:
                        raise ValueError(
                            f"the gradient of {self._name(node, parameters[number])} has placements {found[0]} on a "
                            f"rank of a tensor group and {known[number][0]} on another; allowed: the same on all ranks"
                        )
        return known
