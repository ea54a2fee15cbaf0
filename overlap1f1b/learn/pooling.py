"""Ranks that share experts pool what they saw of the exchanges of a step: how long each was in flight, and its bytes.

    every rank   sends   one row of numbers for each exchange of its plan, which is the same on all of them
                 gets    those of the others, so that its timeline tells why it waited
    when         alike on all ranks, and only of some steps: so often that it takes PART of their time

A step with pooled times has ended on its device. They are what drift, the gate and the causes of waits are made of.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping
from itertools import chain

from overlap1f1b.learn.peers import Peers
from overlap1f1b.plan import EXCHANGED, Node, NodeCosts, Op, Plan
from overlap1f1b.play.result import StepResult
from overlap1f1b.simulation import Flown
from overlap1f1b.transport.mesh import Mesh

PART = 0.004
"""The part of steps that ranks may spend on pooling."""
EVERY_ON_DEVICE = 16
"""One of so many steps, or fewer, is pooled on a device, since the thread waits for its end."""

_POOLED = (*EXCHANGED, Op.REDUCE)


class Pooling:
    """Decides which steps of one number of microbatches are pooled, alike on all ranks.

    Attributes:
        steps: Number of steps so far, whatever is played between them.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._next = 0

    def pooled(
        self, result: StepResult, plan: Plan, costs: NodeCosts | None, peers: Peers, *, on_device: bool
    ) -> StepResult:
        """Return the result of a step with ``costs`` and what the others saw if it is pooled, else as it is.

        All ranks must call this.
        """
        if self.steps < (self._next or (EVERY_ON_DEVICE - 1 if on_device else 0)):
            return result
        seconds = result.overlap.makespan  # a device has ended now
        since = time.thread_time()  # without the wait for the others
        result = result.pooled(costs, _seen_by_others(plan, result, peers.mesh))
        (most,) = peers.slowest([(time.thread_time() - since) / max(seconds, 1e-9)])
        self._next = self.steps + max(EVERY_ON_DEVICE if on_device else 1, math.ceil(most / PART))
        return result


def _seen_by_others(plan: Plan, result: StepResult, mesh: Mesh) -> tuple[Mapping[Node, Flown], ...]:
    """Return what each other rank that shares experts saw of the same exchanges."""
    nodes = [node for node in plan.ranks[mesh.rank("pp")] if node.op in _POOLED]
    flown = result.overlap.causes.flown
    mine = array("d", chain.from_iterable(flown.get(node, Flown(0.0)) for node in nodes))
    every = mesh.every(mine, over=mesh.experts_over)
    others = (iter(of) for rank, of in every.items() if rank != mesh.number)
    width = len(Flown._fields)
    return tuple(dict(zip(nodes, map(Flown._make, zip(*[of] * width, strict=True)), strict=True)) for of in others)
