"""When nodes run, played one after another over the lanes."""

from __future__ import annotations

from typing import NamedTuple

from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import Lane, Node, Op
from overlap1f1b.schedule import Kind


class Span(NamedTuple):
    """A node on its lane from ``start`` to ``end``."""

    node: Node
    start: float
    end: float


class Clock:
    """Plays nodes in issue order.

    The issuing thread computes. It launches an exchange without waiting for it, and waits where a compute node needs a
    result. A lane runs its nodes in the order of their launch. A dispatch needs counts: the lane waits for them, or, if
    ``counts_block``, the issuing thread does.
    """

    def __init__(self, costs: NodeCosts, *, counts_block: bool = False) -> None:
        self.costs, self.counts_block = costs, counts_block
        self.now = 0.0
        """Time at which the issuing thread takes its next node."""
        self.free: dict[Lane, list[float]] = {Lane.EXCHANGE: [], Lane.CONTROL: []}  # of every link of the lane
        self.ready: dict[tuple[int, int, int, Kind], float] = {}
        self.end: dict[Node, float] = {}

    def needed(self, node: Node) -> float:
        """Time at which everything that the node needs is there."""
        if node.kind is Kind.W and node.op is not Op.REDUCE:
            return self.end[node._replace(kind=Kind.I)]
        key = (node.pipe, node.stage, node.microbatch, node.kind)
        if node.kind is Kind.I and key not in self.ready:  # the first node of a backward needs the whole forward
            key = (*key[:3], Kind.F)
        return self.ready.get(key, 0.0)

    def start(self, node: Node) -> float:
        """Earliest start of a node if it were issued now."""
        return max(self.now, self.needed(node))

    def play(self, node: Node) -> Span:
        """Issues the node."""
        start = self.start(node)
        if node.lane is Lane.COMPUTE:
            end = self.now = start + self.costs(node)
        else:
            if self.counts_block and node.op is Op.DISPATCH and node.kind is Kind.F:
                self.now = start
            start, end = self._travel(node, start)
        if node.kind is not Kind.W:
            self.ready[node.pipe, node.stage, node.microbatch, node.kind] = end
            self.end[node] = end
        return Span(node, start, end)

    def _travel(self, node: Node, launched: float) -> tuple[float, float]:
        """First start and last end over the links, each of which is first in, first out."""
        costs, free = self.costs.links(node), self.free[node.lane]
        free.extend([max(free, default=0.0)] * (len(costs) - len(free)))
        if len(costs) == 1:  # a single time holds for every link
            costs = costs * len(free)
        starts = [max(launched, at) for at in free]
        free[:] = [start + cost for start, cost in zip(starts, costs, strict=True)]
        return min(starts), max(free)


def play(nodes: tuple[Node, ...], costs: NodeCosts, *, counts_block: bool = False) -> list[Span]:
    """The spans of a whole plan."""
    clock = Clock(costs, counts_block=counts_block)
    return [clock.play(node) for node in nodes]


def makespan(nodes: tuple[Node, ...], costs: NodeCosts, *, counts_block: bool = False) -> float:
    """The time at which the last node ends."""
    return max((span.end for span in play(nodes, costs, counts_block=counts_block)), default=0.0)
