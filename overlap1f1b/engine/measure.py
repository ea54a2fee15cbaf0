"""Node costs from a step that was played, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

import torch
import torch.distributed as dist

from overlap1f1b.plan import CostKey, NodeCosts, Plan, Span


def measured_costs(plan: Plan, spans: Iterable[Span], group: dist.ProcessGroup | None) -> NodeCosts:
    """Costs in seconds: the mean over microbatches of each node, on the rank where it took longest."""
    took = {span.node: span.end - span.start for span in spans}
    times = torch.tensor([took.get(node, 0.0) for node in plan.nodes], dtype=torch.float64)
    if group is not None:
        dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    samples: dict[CostKey, list[float]] = {}
    for node, time in zip(plan.nodes, times.tolist(), strict=True):
        samples.setdefault((node.op, node.kind, node.block, node.seam), []).append(time)
    return NodeCosts(by_node={key: fmean(values) for key, values in samples.items()})


def agree(plan: Plan, group: dist.ProcessGroup | None) -> None:
    """Raises ``RuntimeError`` where the ranks of a group hold plans of different orders, which would deadlock."""
    if group is None:
        return
    prints: list[str | None] = [None] * group.size()
    dist.all_gather_object(prints, plan.fingerprint, group=group)
    if len(set(prints)) > 1:
        raise RuntimeError(f"the ranks compiled different plans of {plan.program.name!r}: {prints}")
