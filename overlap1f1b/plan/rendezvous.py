"""Plans for devices: both ends of a transfer start it at one place in a common order of all ranks.

NCCL's transfers are kernels. One that waits for its peer occupies its stream and multiprocessors, and whatever waits
for the whole device, or shares a hardware queue with it, waits, too. In a plan of this module no transfer waits for a
node that its own rank plays later: the nodes of all ranks could be played one after another, in one common order, each
transfer on both of its ranks at once. So nothing hangs, whatever on a device waits for whatever.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.clock import Clock, Clocks, Key, destination
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import Node, Op, Resource
from overlap1f1b.plan.plan import Plan

_FOREVER = float("inf")
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
    merger = _Merger(plan, costs if costs.by_op or costs.by_node else _EVEN, counts_block=counts_block)
    return replace(plan, ranks=tuple(map(tuple, merger.run())))


class _Merger:
    """Merges the nodes of all ranks into one order, and puts the nodes that have two ends where both are."""

    def __init__(self, plan: Plan, costs: NodeCosts, *, counts_block: bool) -> None:
        self.placement = placement = plan.program.placement
        self.chains = Chains(placement, plan.shapes)
        self.clocks = Clocks()
        for _ in plan.ranks:
            Clock(costs, counts_block=counts_block, placement=placement, clocks=self.clocks)
        self.nodes: list[list[Node]] = []  # of every rank, without receives, the next one last
        for clock, nodes in zip(self.clocks, plan.ranks, strict=True):
            for node in nodes:
                if node.op is Op.RECEIVE:
                    clock.play(node)
            self.nodes.append([node for node in reversed(nodes) if node.op is not Op.RECEIVE])
        self.merged: list[list[Node]] = [[] for _ in plan.ranks]
        self.heap: list[tuple[float, bool, int, Node]] = []  # end of each rank's next node, sends first on a tie
        self.waiting: dict[Key, list[int]] = {}  # ranks, by the chain whose input they wait for
        self.ready: dict[tuple[int, int], list[tuple[int, Node]]] = {}  # reductions, by stage and block

    def run(self) -> list[list[Node]]:
        """Return the nodes of every rank."""
        for rank in range(len(self.nodes)):
            self._next(rank)
        while self.heap:
            _, _, rank, node = heappop(self.heap)
            if node.op is Op.REDUCE:
                self._reduce(rank, node)
            else:
                self.merged[rank].append(node)
            if node.op is Op.SEND:
                self.clocks[rank].play(node)
                self.merged[self.chains.peer(node)].append(self.chains.receive(node))
                for peer in self.waiting.pop(destination(node), ()):
                    self._next(peer)
            self._next(rank)
        assert not any(self.nodes), "ranks of a checked plan do not wait for each other"
        return self.merged

    def _next(self, rank: int) -> None:
        """Let the rank's next node wait for its turn, or the rank for a message."""
        if not self.nodes[rank]:
            return
        node, clock = self.nodes[rank][-1], self.clocks[rank]
        needed = clock.needed(node)
        if needed == _FOREVER:
            self.waiting.setdefault(node.chain, []).append(rank)
            return
        self.nodes[rank].pop()
        if node.op is not Op.SEND:  # a send is played in its turn, since the others learn of it
            clock.play(node, needed)
        heappush(self.heap, (clock.now, node.resource is Resource.COMPUTE, rank, node))

    def _reduce(self, rank: int, node: Node) -> None:
        replicas = set(self.placement.replicas(node.stage))
        arrived = self.ready.setdefault((node.stage, node.block), [])
        arrived.append((rank, node))
        if len(arrived) == len(replicas):
            for other, reduction in self.ready.pop((node.stage, node.block)):
                self.merged[other].append(reduction)


def check_rendezvous(plan: Plan) -> None:
    """Raise ``ValueError`` unless the plan ends if every rank waits for each of its transfers where it starts it.

    Then it ends on a device, too, whatever waits there: see :func:`with_rendezvous`.
    """
    chains, placement = Chains(plan.program.placement, plan.shapes), plan.program.placement
    at = [0] * len(plan.ranks)

    def awaited(rank: int) -> tuple[Node | tuple[int, int], int] | None:
        """Return what the rank waits for (a receive, or the stage and block of a reduction), and on how many ranks."""
        nodes = plan.ranks[rank]
        while at[rank] < len(nodes):
            node = nodes[at[rank]]
            if node.op in (Op.SEND, Op.RECEIVE):
                return (node if node.op is Op.RECEIVE else chains.receive(node)), 2
            if node.op is Op.REDUCE and (ranks := len(set(placement.replicas(node.stage)))) > 1:
                return (node.stage, node.block), ranks
            at[rank] += 1
        return None

    while True:
        arrived: dict[object, list[int]] = {}
        moved = False
        for rank in range(len(plan.ranks)):
            found = awaited(rank)
            if found is not None:
                arrived.setdefault(found[0], []).append(rank)
                if len(arrived[found[0]]) == found[1]:
                    moved = True
                    for other in arrived[found[0]]:
                        at[other] += 1
        if not moved:
            break
    for rank, (nodes, position) in enumerate(zip(plan.ranks, at, strict=True)):
        if position < len(nodes):
            raise ValueError(
                f"plan of {plan.program.name!r}, rank {rank}, position {position}: {nodes[position]} waits forever for "
                "its other rank; allowed: both ends of a transfer at one place in an order of all ranks"
            )
