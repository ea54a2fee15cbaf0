"""The norm of the gradients over the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from overlap1f1b.engine.agreement import parameters_by_place
from overlap1f1b.engine.graph.autograd import main_grad
from overlap1f1b.engine.run.blocks import Blocks
from overlap1f1b.schedule import Placement
from overlap1f1b.transport.boundary import summed
from overlap1f1b.transport.mesh import Mesh


def clip(
    stages: Mapping[int, Blocks],
    placement: Placement,
    mesh: Mesh,
    max_norm: float,
    repeated: Set[nn.Parameter] = frozenset(),
) -> Tensor:
    """Scale the gradients so that their 2-norm over all ranks is at most ``max_norm``; return the norm, a scalar.

    Every parameter counts once: on the first of the ranks that hold the same; tied over stages not on the later stages
    (``repeated``). Of a DTensor every rank of its mesh counts its part.

    Raises:
        ValueError: A negative or undefined ``max_norm``; experts' gradients that are in ``main_grad``.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}; allowed: 0 or more")
    placed = list(parameters_by_place(stages))  # of the modules: a stage knows gathered parameters, not shards
    every = dict.fromkeys(parameter for _, parameter, _ in placed)
    experts = {parameter for _, parameter, expert in placed if expert}
    if any(p.grad is None and main_grad(p) is not None for p in experts):
        raise ValueError("clip_gradients with experts' gradients in main_grad; allowed: the optimizer's own clipping")
    counted: dict[nn.Parameter, None] = {}
    for number, stage in stages.items():
        for parameter in (p for block in stage.blocks for p in block.parameters() if p not in repeated):
            grad = parameter.grad
            parts = grad.device_mesh.mesh.flatten().tolist() if isinstance(grad, DTensor) else ()
            if mesh.leads(placement.replicas(number), expert=parameter in experts, parts=parts):
                counted[parameter] = None
    grads = [p.grad for p in counted if p.grad is not None]
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    shards = [summed(grad) for grad in grads if isinstance(grad, DTensor)]
    has_double = any(parameter.dtype == torch.float64 for parameter in every)
    square, double = mesh.sums(_square(whole) + _square_of_shards(shards), has_double)
    norm = torch.tensor(math.sqrt(square), dtype=torch.float64 if double else torch.float32, device="cpu")
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in every:
        over = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
        by_mesh.setdefault(over, []).append(parameter)
    for parameters in by_mesh.values():
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _square(grads: Iterable[Tensor]) -> float:
    """Return the squared norm in float64, of norms in each gradient's own precision, at least float32."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    squares = []
    for (_, dtype), tensors in alike.items():
        norms = torch._foreach_norm(tensors, 2, dtype=torch.promote_types(dtype, torch.float32))
        squares += [norm * norm for norm in torch.stack(norms).tolist()]  # ** would raise where this gives infinity
    return sum(squares)


def _square_of_shards(grads: Iterable[DTensor]) -> float:
    """Return this rank's part of the squared norm; the ranks of a gradient's mesh sum the parts."""
    by_copies: dict[int, list[Tensor]] = {}
    for grad in grads:
        sizes = zip(grad.device_mesh.shape, grad.placements, strict=True)
        copies = math.prod(size for size, placement in sizes if placement.is_replicate())
        by_copies.setdefault(copies, []).append(grad.to_local())
    return sum(_square(locals_) / copies for copies, locals_ in by_copies.items())
