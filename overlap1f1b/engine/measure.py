"""Node costs from a step that was played, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from overlap1f1b.moe.exchange import Exchange, Expected, Transfer
from overlap1f1b.plan import LANE_OF, CostKey, Lane, NodeCosts, Plan, Span


class BackToBack:
    """Sends every exchange of rows twice, one behind the other: the second shows how long it occupies the links.

    A lone exchange also shows how long it takes to start, and a link that has rested may pass its first bytes faster;
    in a plan most exchanges travel behind another.
    """

    def __init__(self, real: Exchange) -> None:
        self.real, self.ranks, self.rank, self.background = real, real.ranks, real.rank, real.background
        self.counts, self.expect_rows, self.expect_counts = real.counts, real.expect_rows, real.expect_counts

    def rows(
        self,
        source: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        tag: int = 0,
        expected: Expected | None = None,
    ) -> Transfer:
        # Both carry the same rows, so it does not matter which of them fills the buffer that was announced.
        ahead = self.real.rows(source, send, receive, tag, expected)
        return replace(self.real.rows(source, send, receive, tag), ahead=ahead)


def measured_costs(plan: Plan, spans: Iterable[Span], group: dist.ProcessGroup | None) -> NodeCosts:
    """Costs in seconds: the mean over microbatches of each node.

    Of a compute node that of the slowest rank; of an exchange one for every rank, the time until it had received all
    its rows, since the ranks' links carry different numbers of them.
    """
    took = {span.node: span.end - span.start for span in spans}
    mine: dict[CostKey, list[float]] = {}
    for node in plan.nodes:
        mine.setdefault((node.op, node.kind, node.block, node.seam), []).append(took.get(node, 0.0))
    means = torch.tensor([fmean(values) for values in mine.values()], dtype=torch.float64)
    every = [means]
    if group is not None:
        every = [torch.empty_like(means) for _ in range(group.size())]
        dist.all_gather(every, means, group=group)
    by_rank = torch.stack(every, dim=1).tolist()
    return NodeCosts(
        by_node={
            key: max(times) if LANE_OF[key[0]] is Lane.COMPUTE else tuple(times)
            for key, times in zip(mine, by_rank, strict=True)
        }
    )


def agree(plan: Plan, group: dist.ProcessGroup | None) -> None:
    """Raises ``RuntimeError`` where the ranks of a group hold plans of different orders, which would deadlock."""
    if group is None:
        return
    prints: list[str | None] = [None] * group.size()
    dist.all_gather_object(prints, plan.fingerprint, group=group)
    if len(set(prints)) > 1:
        raise RuntimeError(f"the ranks compiled different plans of {plan.program.name!r}: {prints}")
