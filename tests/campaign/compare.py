"""Values by name, and where two sets of them differ."""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.campaign.draw import Case, Hidden
from tests.pauses import pauses

Values = dict[str, Tensor]


def values_of(parameters: Iterable[tuple[str, nn.Parameter]], prefix: str, *, grad: bool) -> Values:
    """Copies of gradients, zeros where there is none, or of the parameters themselves; those under FSDP2 whole."""
    found = {}
    for name, parameter in parameters:
        value = parameter.detach() if not grad else parameter.grad
        if value is None:
            value = torch.zeros_like(parameter)
        found[prefix + name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def part_of(full: Tensor, like: Tensor, shard: int) -> Tensor:
    """Return the part of a parameter that one rank holds: some of the experts, or all of anything else."""
    if full.shape == like.shape:
        return full
    return full[shard * len(like) : (shard + 1) * len(like)]


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], shard: int, limit: float) -> list[str]:
    """Names of values that differ by more than a limit, relative to themselves and to a thousandth of all together."""
    every = math.sqrt(sum(float(value.square().sum()) for value in found.values()))
    problems = []
    for name, value in found.items():
        wanted = part_of(expected[name], value, shard)
        error = float((value - wanted).norm())
        if not error <= limit * (float(wanted.norm()) + 1e-3 * every):
            problems.append(f"{name} differs by {error:.1e} of {float(wanted.norm()):.1e}")
    return problems


def unequal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of values that are not the same to the bit."""
    return [name for name in found | expected if not torch.equal(found[name], expected[name])]


def paused(case: Case | Hidden, rank: int) -> AbstractContextManager[None]:
    """Pauses of the threads where a case has them."""
    return pauses(100 * case.seed + rank) if case.paused else nullcontext()


def limit_of(case: Case) -> float:
    """Relative difference that the order of sums explains, after some steps of an optimizer too."""
    if case.autocast:
        return 0.3
    return 1e-9 if case.double else 1e-3
