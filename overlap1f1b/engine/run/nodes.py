"""Table of the methods of a block's run that carry out the compute nodes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from overlap1f1b.engine.graph.autograd import accumulate
from overlap1f1b.engine.run.block import BlockRun
from overlap1f1b.engine.run.microbatch import Microbatch, Place
from overlap1f1b.engine.run.recompute import RecomputedRun
from overlap1f1b.plan import Node, Op
from overlap1f1b.schedule import Kind

_COMPUTE: dict[Kind, Callable[[BlockRun, Mapping[Place, Any]], None]] = {
    Kind.F: BlockRun.run_forward,
    Kind.I: BlockRun.run_backward,
}
_RECOMPUTE: dict[Op, Callable[[RecomputedRun], None]] = {
    Op.RECOMPUTE_EXPERTS: RecomputedRun.recompute_experts,
    Op.RECOMPUTE_ATTENTION: RecomputedRun.recompute_attention,
    Op.RECOMPUTE_DENSE: RecomputedRun.recompute_attention,
}


def compute(node: Node, microbatch: Microbatch, received: Mapping[Place, Any]) -> None:
    """Carry out a compute node; ``received`` are the rows that the exchanges before it brought, if there are any."""
    if node.kind is Kind.W:
        accumulate(microbatch.queues.pop((node.op, node.block, node.seam)).compute())
        return
    run: BlockRun = microbatch.runs.get(node.block) or _begun(microbatch, node.block)
    again = _RECOMPUTE.get(node.op)
    if again is None:
        _COMPUTE[node.kind](run, received)
    else:
        assert isinstance(run, RecomputedRun)
        again(run)


def _begun(microbatch: Microbatch, block: int) -> BlockRun:
    drops = microbatch.grad and microbatch.stage.shape[block].recompute != "none"
    run = microbatch.runs[block] = RecomputedRun(microbatch, block) if drops else BlockRun(microbatch, block)
    return run
