"""What sums the gradients of a step over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

from torch import nn

from overlap1f1b.engine.reduce.fsdp import ShardedReducer, Sharding
from overlap1f1b.engine.reduce.plain import Reducer
from overlap1f1b.engine.run.stage import Stage
from overlap1f1b.plan import Node
from overlap1f1b.transport.groups import Group
from overlap1f1b.transport.lanes import Flight, Lane
from overlap1f1b.transport.mesh import Mesh


class Reduction(Protocol):
    """Sums gradients of a step over ranks, under the rest of it."""

    def begin(self, order: Sequence[Node]) -> None:
        """Before the first node of a step; ``order`` is that of the launches, the same on all ranks that sum."""

    def launch(self, node: Node) -> Sequence[Flight[Any]]:
        """Carries out a ``reduce`` node: the block's last contribution is in."""

    def settle(self) -> None:
        """Waits until nothing is under way, so that the groups can be used for something else."""

    def finish(self) -> None:
        """After the last node: waits until ``.grad`` holds the sums."""

    def restore(self) -> None:
        """After a failure, in a step or outside: the model is as the user left it."""


def reductions_of(
    stages: Mapping[int, Stage],
    sharding: Sharding,
    mesh: Mesh,
    replicas: Sequence[int],
    *,
    dense: Group | None,
    experts: Group | None,
    lane: Lane,
    shards: Lane,
) -> list[Reduction]:
    """FSDP2's reduction for what it holds, and one of the engine's own for all else.

    Args:
        stages: Those of this rank, by number.
        sharding: What FSDP2 holds of them.
        mesh: Ranks of the engine.
        replicas: Pipeline ranks that hold this rank's stages.
        dense: Ranks that hold the parameters outside the experts; None for this one alone.
        experts: Ranks that hold the same experts.
        lane: Of the engine's own reductions.
        shards: Of FSDP2's.

    Raises:
        ValueError: FSDP2 was applied over other ranks than those that hold the same parameters.
    """
    reductions: list[Reduction] = []
    apart: Set[nn.Parameter] = frozenset()
    if sharding.groups:
        ranks, expert_ranks = (mesh.ranks(pp=replicas, over=over) for over in (("dp", "ep"), ("dp",)))
        with sharding.gathered():
            sharded = ShardedReducer(sharding, stages, shards, ranks=ranks, expert_ranks=expert_ranks)
        reductions.append(sharded)
        apart = sharded.parameters
    own = Reducer(stages, dense, experts, lane, apart=apart)
    if own.reduces:
        reductions.append(own)
    return reductions
