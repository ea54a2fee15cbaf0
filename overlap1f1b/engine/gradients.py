"""The norm of the gradients over the whole model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from overlap1f1b.engine.mesh import Dimension, Mesh
from overlap1f1b.engine.stage import Stage
from overlap1f1b.schedule import Placement


def clip(stages: Mapping[int, Stage], placement: Placement, mesh: Mesh, max_norm: float) -> Tensor:
    """Scales the gradients so that their 2-norm over all ranks is at most ``max_norm``; returns the norm, a scalar.

    Every parameter counts once: those outside the experts on the first rank along "ep", those of a stage that several
    pipeline ranks hold on the first of them.

    Raises:
        ValueError: A negative or undefined ``max_norm``.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}; allowed: 0 or more")
    experts: dict[nn.Parameter, None] = {}
    every: dict[nn.Parameter, None] = {}
    for stage in stages.values():
        for block in range(len(stage.blocks)):
            experts |= dict.fromkeys(stage.expert_parameters_of(block))
            every |= dict.fromkeys(stage.blocks[block].parameters())
    counted: dict[nn.Parameter, None] = {}
    for number, stage in stages.items():
        if placement.replicas(number)[0] == mesh.rank("pp"):
            mine = (p for block in stage.blocks for p in block.parameters())
            counted |= dict.fromkeys(p for p in mine if p in experts or mesh.rank("ep") == 0)
    square = float(get_total_norm([p.grad for p in counted if p.grad is not None]).double()) ** 2

    def total(dimension: Dimension, squares: list[float]) -> float:
        return squares[0] if dimension == "dp" else sum(squares)

    norm = torch.tensor(mesh.combined(square, total)).sqrt()
    clip_grads_with_norm_(every, max_norm, norm)
    return norm
