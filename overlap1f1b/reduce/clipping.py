"""The norm of the gradients over the whole model."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from overlap1f1b.cut.blocks import tensor_dimension
from overlap1f1b.cut.stage import Stage, parameters_of
from overlap1f1b.cut.weights import main_grad
from overlap1f1b.schedule import Placement
from overlap1f1b.schedule.values import quoted
from overlap1f1b.transport.boundary import summed
from overlap1f1b.transport.mesh import Mesh


def check_norm(name: Literal["max_norm", "norm_type"], value: object) -> float:
    """Return a limit or an order of norms as a number; raise ``ValueError`` for one that no norm has."""
    number = math.nan
    if not isinstance(value, bool | str) or value == "inf":  # which torch takes, too
        with suppress(TypeError, ValueError):
            number = float(value)  # type: ignore[arg-type]
    if number > 0 or (number == 0 and name == "max_norm"):
        return number
    allowed = "0 or more" if name == "max_norm" else "more than 0, math.inf for the largest gradient"
    raise ValueError(f"{name}={quoted(value)}; allowed: {allowed}")


def clip(
    stages: Mapping[int, Stage],
    placement: Placement,
    mesh: Mesh,
    max_norm: float,
    norm_type: float,
    repeated: Set[nn.Parameter],
) -> Tensor:
    """Scale the gradients so that their norm over all ranks is at most ``max_norm``; return the norm, a scalar.

    Every parameter counts once: on the first of the ranks that hold the same; tied over stages not on the later stages
    (``repeated``). Of a DTensor every rank of its mesh counts its part, of a slice over "tp" every rank of the group.
    ValueError if experts' gradients are in ``main_grad``.
    """
    placed = list(parameters_of(stages))  # of the modules: a stage knows gathered parameters, not shards
    every = dict.fromkeys(parameter for *_, parameter, _ in placed)
    experts = {parameter for *_, parameter, expert in placed if expert}
    if any(p.grad is None and main_grad(p) is not None for p in experts):
        raise ValueError("clip_gradients with experts' gradients in main_grad; allowed: the optimizer's own clipping")
    counted: dict[nn.Parameter, None] = {}
    for number, stage in stages.items():
        for parameter in (p for block in stage.blocks for p in block.parameters() if p not in repeated):
            grad, expert = parameter.grad, parameter in experts
            parts = grad.device_mesh.mesh.flatten().tolist() if isinstance(grad, DTensor) else ()
            if tensor_dimension(parameter, mesh, expert=expert) is not None:
                parts = mesh.along("tp")
            if mesh.leads(placement.replicas(number), expert=expert, parts=parts):
                counted[parameter] = None
    has_double = any(parameter.dtype == torch.float64 for parameter in every)
    own = _joined(_powers([p.grad for p in counted if p.grad is not None], norm_type), norm_type)
    total, double = mesh.sums(own, has_double)
    if math.isinf(norm_type):
        total = _joined([*mesh.every(own).values()], norm_type)
    norm = torch.tensor(total, dtype=torch.float64, device="cpu").pow(1 / _power(norm_type))
    norm = norm.to(torch.float64 if double else torch.float32)
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in every:
        over = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
        by_mesh.setdefault(over, []).append(parameter)
    for parameters in by_mesh.values():
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _power(norm_type: float) -> float:
    return 1.0 if math.isinf(norm_type) else norm_type


def _joined(powers: Sequence[float], norm_type: float) -> float:
    """Return the sum of the powers of several norms; of infinity norms the largest, or a NaN among them."""
    if math.isinf(norm_type):
        return max(powers, key=lambda power: (math.isnan(power), power), default=0.0)
    return sum(powers)


def _powers(grads: Iterable[Tensor], norm_type: float) -> list[float]:
    """Return powers in float64 of norms in float32 or a gradient's wider dtype; of a DTensor its local part's."""
    alike: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}
    for grad in grads:
        part, copies = grad, 1
        if isinstance(grad, DTensor):
            shard = summed(grad)
            sizes = zip(shard.device_mesh.shape, shard.placements, strict=True)
            part, copies = shard.to_local(), math.prod(size for size, placed in sizes if placed.is_replicate())
        if part.numel():  # the infinity norm of nothing is undefined
            alike.setdefault((part.device, part.dtype, 1 if math.isinf(norm_type) else copies), []).append(part)
    found: list[float] = []
    for (_, dtype, copies), tensors in alike.items():
        norms = torch._foreach_norm(tensors, norm_type, dtype=torch.promote_types(dtype, torch.float32))
        found += (torch.stack(norms).to("cpu", torch.float64).pow(_power(norm_type)) / copies).tolist()
    return found
