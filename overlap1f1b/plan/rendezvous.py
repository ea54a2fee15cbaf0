"""Plans for devices: both ends of a transfer start it at one place in a common order of all ranks.

NCCL's transfers are kernels. One that waits for its peer occupies its stream and multiprocessors, and whatever waits
for the whole device, or shares a hardware queue with it, waits, too. In a plan of this module no transfer waits for a
node that its own rank plays later: the nodes of all ranks could be played one after another, in one common order, each
transfer on both of its ranks at once. So nothing hangs, whatever on a device waits for whatever.
"""

from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.clock import Clock, Key, destination
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import Node, Op, Resource, peer_of
from overlap1f1b.plan.plan import Plan

_EVEN = NodeCosts.uniform(attention=1, experts=1, dispatch=0, aggregate=1, dense=1)
"""Costs where none are known; without any all receives would come first, and wait on the device from then on."""


def with_rendezvous(plan: Plan, costs: NodeCosts, *, counts_block: bool = False) -> Plan:
    """Return the plan with every RECEIVE where its message is sent, and REDUCE nodes where all of their ranks are.

    The nodes of all ranks are merged into one order, by the times at which the costs let them end. A receive goes to
    the place in this order at which its message is sent: earlier it would wait on the device, later the send would. A
    reduction over several pipeline ranks goes to the place where the last of them is ready. All other nodes keep their
    order.

    Args:
        plan: A checked plan.
        costs: Costs of the nodes.
        counts_block: Whether the host waits for counts.
    """
    if len(plan.ranks) == 1:
        return plan
    costs = costs if costs.by_op or costs.by_node else _EVEN
    placement = plan.program.placement
    chains, clocks = Chains(placement, plan.shapes), list[Clock]()
    left: list[list[Node]] = []  # of every rank, without receives, the next one last
    for nodes in plan.ranks:
        clock = Clock(costs, counts_block=counts_block, placement=placement, clocks=clocks)
        for node in nodes:
            if node.op is Op.RECEIVE:
                clock.play(node)
        left.append([node for node in reversed(nodes) if node.op is not Op.RECEIVE])
    merged: list[list[Node]] = [[] for _ in left]
    heap: list[tuple[float, bool, int, Node]] = []  # end of each rank's next node, sends first on a tie
    waiting: dict[Key, list[int]] = {}  # ranks, by the chain whose input they wait for
    ready: dict[tuple[int, int], list[tuple[int, Node]]] = {}  # reductions, by stage and block

    def go_on(rank: int) -> None:
        """Let the rank's next node wait for its turn, or the rank for a message."""
        if not left[rank]:
            return
        node, clock = left[rank][-1], clocks[rank]
        needed = clock.needed(node)
        if needed == inf:
            waiting.setdefault(node.chain, []).append(rank)
            return
        left[rank].pop()
        if node.op is not Op.SEND:  # a send is played in its turn, since the others learn of it
            clock.play(node, needed)
        heappush(heap, (clock.now, node.resource is Resource.COMPUTE, rank, node))

    for rank in range(len(left)):
        go_on(rank)
    while heap:
        _, _, rank, node = heappop(heap)
        if node.op is Op.REDUCE:
            arrived = ready.setdefault((node.stage, node.block), [])
            arrived.append((rank, node))
            if len(arrived) == len(placement.replicas(node.stage)):
                for other, reduction in ready.pop((node.stage, node.block)):
                    merged[other].append(reduction)
        else:
            merged[rank].append(node)
        if node.op is Op.SEND:
            clocks[rank].play(node)
            merged[peer_of(node, placement)].append(chains.receive(node))
            for peer in waiting.pop(destination(node), ()):
                go_on(peer)
        go_on(rank)
    assert not any(left), "ranks of a checked plan do not wait for each other"
    return replace(plan, ranks=tuple(map(tuple, merged)))
