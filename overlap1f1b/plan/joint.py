"""List scheduling of all ranks of a pipeline together, each in the time of the others."""

from __future__ import annotations

from heapq import heappop, heappush

from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.clock import Key
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import Node, Op
from overlap1f1b.plan.scheduler import ListScheduler, Policy
from overlap1f1b.schedule import Program


def schedule_ranks(program: Program, chains: Chains, costs: NodeCosts, policy: Policy) -> list[list[Node]]:
    """The nodes of every rank in issue order.

    The rank whose time is earliest issues its next node; it waits no further than the time of the others, since one of
    them may send something that can start before.
    """
    arrivals: dict[Key, float] = {}
    peaks = zip(program.peak_activations, program.peak_weights or [None] * len(program.ranks), strict=True)
    schedulers = [
        ListScheduler(program.actions(rank), chains, costs, policy, peak, arrivals, peak_weights)
        for rank, (peak, peak_weights) in enumerate(peaks)
    ]
    if len(schedulers) == 1:
        return [schedulers[0].run()]
    wakes = [0.0] * len(schedulers)  # when each rank looks again for something to do
    heap = [(0.0, rank) for rank in range(len(schedulers))]
    while heap:
        wake, rank = heappop(heap)
        scheduler = schedulers[rank]
        if wake != wakes[rank] or scheduler.ended:  # woken earlier meanwhile
            continue
        before = len(scheduler.order)
        waits = scheduler.step(wake)
        wakes[rank] = scheduler.clock.now if waits is None else waits
        if wakes[rank] < float("inf"):
            heappush(heap, (wakes[rank], rank))
        for node in scheduler.order[before:]:
            if node.op is Op.SEND:
                peer = chains.peer(node)
                received = chains.receive(node)
                key = (received.pipe, received.stage, received.microbatch, received.kind)
                arrival = max(arrivals[key], schedulers[peer].clock.now)
                if arrival < wakes[peer]:
                    wakes[peer] = arrival
                    heappush(heap, (arrival, peer))
    assert all(scheduler.ended for scheduler in schedulers), "a checked program has no ranks that wait for each other"
    return [scheduler.order for scheduler in schedulers]
