"""The methods of a block's run that carry out the compute nodes of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlap1f1b.engine.graph.autograd import accumulate
from overlap1f1b.engine.run.block import BlockRun
from overlap1f1b.engine.run.microbatch import Microbatch, Place
from overlap1f1b.engine.run.recompute import RecomputedRun
from overlap1f1b.plan import RECOMPUTES, Node, Op
from overlap1f1b.schedule import Kind


def compute(node: Node, microbatch: Microbatch, received: Mapping[Place, Any]) -> None:
    """Carry out a compute node; ``received`` are the rows that the exchanges before it brought, if there are any."""
    if node.kind is Kind.W:
        accumulate(microbatch.queues.pop((node.op, node.block, node.seam)).compute())
        return
    run: BlockRun | None = microbatch.runs.get(node.block)
    if run is None:
        drops = microbatch.grad and microbatch.stage.shape[node.block].recompute != "none"
        run = microbatch.runs[node.block] = (RecomputedRun if drops else BlockRun)(microbatch, node.block)
    if node.op in RECOMPUTES:
        assert isinstance(run, RecomputedRun)
        if node.op is Op.RECOMPUTE_EXPERTS:
            run.recompute_experts()
        else:
            run.recompute_attention()
    elif node.kind is Kind.F:
        run.run_forward(received)
    else:
        run.run_backward(received)
