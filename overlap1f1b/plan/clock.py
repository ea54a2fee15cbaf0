"""When nodes run, played one after another over the lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import Lane, Node, Op
from overlap1f1b.schedule import Kind, Placement
from overlap1f1b.schedule.placement import SINGLE

Key = tuple[int, int, int, Kind]
"""Pipe, stage, microbatch and direction of a chain of nodes."""


class Span(NamedTuple):
    """A node on its lane from ``start`` to ``end``."""

    node: Node
    start: float
    end: float


class Clock:
    """Plays the nodes of a rank in issue order.

    The issuing thread computes. It launches an exchange or a send without waiting for it, and waits where a compute
    node needs a result. A lane runs its nodes in the order of their launch. A dispatch needs counts: the lane waits for
    them, or, if ``counts_block``, the issuing thread does.

    Args:
        costs: How long each node takes.
        counts_block: Who waits for counts.
        placement: Which rank holds which stage.
        arrivals: When what was sent between stages is there, by the chain that receives it; shared by the ranks.
    """

    def __init__(
        self,
        costs: NodeCosts,
        *,
        counts_block: bool = False,
        placement: Placement = SINGLE,
        arrivals: dict[Key, float] | None = None,
    ) -> None:
        self.costs, self.counts_block, self.placement = costs, counts_block, placement
        self.arrivals = {} if arrivals is None else arrivals
        self.now = 0.0
        """Time at which the issuing thread takes its next node."""
        self.free: dict[Lane, list[float]] = {Lane.EXCHANGE: [], Lane.CONTROL: []}  # of every link of the lane
        self.sent: dict[int, float] = {}  # end of the last send to each rank
        self.awaited: set[Key] = set()  # chains whose input comes from another rank
        self.ready: dict[Key, float] = {}
        self.end: dict[Node, float] = {}

    def needed(self, node: Node) -> float:
        """Time at which everything that the node needs is there; infinite while nobody has sent it."""
        if node.op in (Op.REDUCE, Op.RECEIVE):  # launched where they stand
            return 0.0
        if node.kind is Kind.W:
            return self.end[node._replace(kind=Kind.I)]
        pipe, stage, microbatch, kind = key = (node.pipe, node.stage, node.microbatch, node.kind)
        if key in self.ready:
            return self.ready[key]
        if key in self.awaited:
            return self.arrivals.get(key, float("inf"))
        if kind is Kind.F:  # the first node of a chain needs the chain before it
            return self.ready.get((pipe, stage - 1, microbatch, kind), 0.0)
        forward = self.ready.get((pipe, stage, microbatch, Kind.F), 0.0)
        return max(forward, self.ready.get((pipe, stage + 1, microbatch, kind), 0.0))

    def start(self, node: Node) -> float:
        """Earliest start of a node if it were issued now."""
        return max(self.now, self.needed(node))

    def play(self, node: Node) -> Span:
        """Issues the node."""
        key = (node.pipe, node.stage, node.microbatch, node.kind)
        if node.op is Op.RECEIVE:
            self.awaited.add(key)
            return Span(node, self.now, self.now)
        start = self.start(node)
        if node.lane is Lane.COMPUTE:
            end = self.now = start + self.costs(node)
        elif node.op is Op.SEND:
            start, end = self._send(node, start)
        else:
            if self.counts_block and node.op is Op.DISPATCH and node.kind is Kind.F:
                self.now = start
            start, end = self._travel(node, start)
        if node.op is not Op.SEND:
            self.end[node] = end
            if node.kind is not Kind.W:
                self.ready[key] = end
        return Span(node, start, end)

    def _send(self, node: Node, launched: float) -> tuple[float, float]:
        """Start and end of a transfer to the rank of the next stage, or of the one before."""
        onward = node.stage + (1 if node.kind is Kind.F else -1)
        to = self.placement.rank(node.pipe, onward)
        start = max(launched, self.sent.get(to, 0.0))
        end = self.sent[to] = start + self.costs(node)
        self.arrivals[node.pipe, onward, node.microbatch, node.kind] = end
        return start, end

    def _travel(self, node: Node, launched: float) -> tuple[float, float]:
        """First start and last end over the links, each of which is first in, first out."""
        costs, free = self.costs.links(node), self.free[node.lane]
        free.extend([max(free, default=0.0)] * (len(costs) - len(free)))
        if len(costs) == 1:  # a single time holds for every link
            costs = costs * len(free)
        starts = [max(launched, at) for at in free]
        free[:] = [start + cost for start, cost in zip(starts, costs, strict=True)]
        return min(starts), max(free)


def play(nodes: Sequence[Node], costs: NodeCosts, *, counts_block: bool = False) -> list[Span]:
    """The spans of the nodes of a single rank."""
    clock = Clock(costs, counts_block=counts_block)
    return [clock.play(node) for node in nodes]


def play_ranks(
    ranks: Sequence[Sequence[Node]], placement: Placement, costs: NodeCosts, *, counts_block: bool = False
) -> list[list[Span]]:
    """The spans of every rank, each of which waits where it computes with what another has not sent yet.

    Raises:
        ValueError: Ranks wait for each other; names the first node that waits.
    """
    arrivals: dict[Key, float] = {}
    clocks = [Clock(costs, counts_block=counts_block, placement=placement, arrivals=arrivals) for _ in ranks]
    spans: list[list[Span]] = [[] for _ in ranks]
    moved = True
    while moved:
        moved = False
        for nodes, clock, done in zip(ranks, clocks, spans, strict=True):
            while len(done) < len(nodes) and clock.needed(nodes[len(done)]) < float("inf"):
                done.append(clock.play(nodes[len(done)]))
                moved = True
    for rank, (nodes, done) in enumerate(zip(ranks, spans, strict=True)):
        if len(done) < len(nodes):
            raise ValueError(
                f"rank {rank}, position {len(done)}: {nodes[len(done)]} waits forever for what another rank sends; "
                "allowed: no ranks that wait for each other"
            )
    return spans


def makespan(nodes: Sequence[Node], costs: NodeCosts, *, counts_block: bool = False) -> float:
    """The time at which the last node of a single rank ends."""
    return max((span.end for span in play(nodes, costs, counts_block=counts_block)), default=0.0)
