"""The first step of ranks that share a tensor group: their gradients and tokens must fit the layout.

Else routers, norms or experts would learn from wrong gradients in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overlap1f1b.engine.agreement import parameters_by_place
from overlap1f1b.engine.run.autograd import main_grad
from overlap1f1b.engine.run.blocks import Blocks
from overlap1f1b.transport.mesh import Mesh, lines_of

MOST_APART, SMALL = 0.125, 2**-5
"""Largest difference of gradients that should be equal, of their norm, and norms that are not compared, of the largest.

Kernels may round in another order on each rank, in bfloat16, too, and a gradient may be nothing but such roundings.
"""


def check_tensor_group(stages: Mapping[int, Blocks], mesh: Mesh) -> None:
    """Compare what the ranks of a tensor group have computed in the first step. All of them must call this.

    Of gradients 64 entries are compared, of tokens the first rows.

    Raises:
        ValueError: They hold copies of a parameter, and its gradients differ, as where each rank has other tokens; or
            experts that they share have got the same tokens from each of them.
    """
    if mesh.group("tp") is None:
        return
    copies = {
        place: p
        for place, p, expert in parameters_by_place(stages)
        if not (expert and "tp" in mesh.experts_over) and _is_copied(p, mesh)
    }
    grads = {place: _sampled(grad) for place, p in copies.items() if (grad := _gradient(p)) is not None}
    rows = {
        (number, call): first.double().cpu()
        for number, stage in stages.items()
        for call, first in (stage.first_rows or {}).items()
    }
    for stage in stages.values():
        stage.first_rows = None
    ranks = mesh.gathered("tp", (grads, rows))
    _check_gradients(copies, [found for found, _ in ranks], mesh)
    if rows and all(_are_the_same([found[call] for _, found in ranks]) for call in rows):
        raise ValueError(
            f"experts_over={mesh.experts_over!r} with the same tokens on all ranks of a tensor group, "
            f"{mesh.along('tp')}; allowed: a part of the tokens on each, as with SequenceParallel, or no 'tp' in it"
        )


def _check_gradients(copies: Mapping[str, nn.Parameter], grads: Sequence[Mapping[str, Tensor]], mesh: Mesh) -> None:
    sampled = {place: _with_zeros([found.get(place) for found in grads]) for place in copies}
    largest = max(map(_longest, sampled.values()), default=0.0)
    for place, each in sampled.items():
        apart, norm = _longest(each - each[0]), _longest(each)
        if apart > MOST_APART * norm and norm > SMALL * largest:
            raise ValueError(
                f"the gradient of {place} differs over the tensor group, ranks {mesh.along('tp')}, by "
                f"{apart / norm:.1%}; allowed: the same tokens and random numbers on each, or a DTensor whose gradient "
                "has placements Partial where each has other tokens"
            )


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    return main_grad(parameter) if parameter.grad is None else parameter.grad


def _is_copied(tensor: Tensor, mesh: Mesh) -> bool:
    """Return whether all ranks of a tensor group have the same tensor, or the same part of it."""
    if not isinstance(tensor, DTensor):
        return True
    group, lines = set(mesh.along("tp")), lines_of(tensor.device_mesh)
    along = [placement for line, placement in zip(lines, tensor.placements, strict=True) if group <= set(line)]
    return all(placement.is_replicate() for placement in along)


def _sampled(tensor: Tensor) -> Tensor:
    """Return up to 64 entries, evenly spread, in float64."""
    flat = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
    return (
        flat[torch.linspace(0, max(0, flat.numel() - 1), min(64, flat.numel()), dtype=torch.float64).long()]
        .double()
        .cpu()
    )


def _with_zeros(grads: Sequence[Tensor | None]) -> Tensor:
    """Return ``[ranks, entries]``, with zeros for ranks that have no gradient."""
    known = next((grad for grad in grads if grad is not None), torch.zeros(0))
    return torch.stack([torch.zeros_like(known) if grad is None else grad for grad in grads])


def _longest(vectors: Tensor) -> float:
    """Return the largest norm of ``[ranks, entries]``."""
    return float(vectors.norm(dim=1).max())


def _are_the_same(rows: Sequence[Tensor]) -> bool:
    """Return whether all ranks have sent the same ``[rows, H]`` to experts; False where the rows are all alike."""
    if len({part.shape for part in rows}) > 1:
        return False
    spread = (rows[0] - rows[0].mean(0)).norm()
    return all(bool((part - rows[0]).norm() < 0.01 * spread) for part in rows)
