"""Choose what sums the gradients of a rank's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from torch import nn

from overlap1f1b.engine.reduce.fsdp import ShardedReducer, Sharding
from overlap1f1b.engine.reduce.plain import Reducer
from overlap1f1b.engine.reduce.reduction import Reduction
from overlap1f1b.engine.reduce.tensor import TensorGradients
from overlap1f1b.engine.run.blocks import Blocks
from overlap1f1b.transport.groups import Group
from overlap1f1b.transport.lanes import Lane
from overlap1f1b.transport.mesh import DATA, Mesh


def reductions_of(
    stages: Mapping[int, Blocks],
    sharding: Sharding,
    mesh: Mesh,
    replicas: Sequence[int],
    *,
    dense: Group | None,
    experts: Group | None,
    lane: Lane,
    shards: Lane,
) -> list[Reduction]:
    """Return FSDP2's reduction for the parameters that it holds, and the engine's own for all others.

    Args:
        replicas: Pipeline ranks that hold the same stages as this rank.
        dense: Ranks that hold the same parameters outside the experts; None for this rank alone.
        experts: Ranks that hold the same experts.
        lane: Of the engine's own reductions.
        shards: Of FSDP2's reductions.
    """
    reductions: list[Reduction] = []
    sharded = None
    apart: Set[nn.Parameter] = frozenset()
    if sharding.groups:
        if len(replicas) > 1:  # these play other plans
            sharding.ahead = None
        ranks, expert_ranks = (mesh.ranks(pp=replicas, over=over) for over in (DATA, mesh.expert_copies))
        with sharding.gathered():
            sharded = ShardedReducer(sharding, stages, shards, ranks=ranks, expert_ranks=expert_ranks)
        reductions.append(sharded)
        apart = sharded.parameters
    tensors = TensorGradients(stages, mesh, sharded)
    if tensors.reduces:
        reductions.insert(0, tensors)  # before gradients are summed over other ranks
    own = Reducer(stages, dense, experts, lane, apart=apart)
    if own.reduces:
        reductions.append(own)
    return reductions
