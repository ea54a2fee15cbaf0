"""The clock that plays nodes one after another over the resources of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from operator import add
from typing import NamedTuple

from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.intervals import Interval, common, difference, length, union
from overlap1f1b.plan.node import MOVES, OWN_AGAIN, RECOMPUTES, RESOURCE_OF, Node, Op, Place, Resource, awaited_by
from overlap1f1b.schedule import Kind, Placement
from overlap1f1b.schedule.placement import SINGLE

Key = tuple[int, int, int, Kind]
"""Pipe, stage, microbatch and direction of a chain of nodes."""

# The innermost loop uses these names, since looking up a member of an Enum runs Python code.
_F, _I, _W = Kind.F, Kind.I, Kind.W
_SEND, _RECEIVE, _GATHER, _RELEASE = Op.SEND, Op.RECEIVE, Op.GATHER, Op.RELEASE
_COUNTS, _DISPATCH, _EXPERTS, _COMBINE = Op.COUNTS, Op.DISPATCH, Op.EXPERTS, Op.COMBINE
_COMPUTE, _PEER = Resource.COMPUTE, Resource.PEER
_ALONE = RECOMPUTES | MOVES  # they need nothing of their chain


def destination(node: Node) -> Key:
    """Return the chain that receives the message of a SEND node."""
    _, kind, microbatch, _, _, _, stage, pipe = node
    return pipe, stage + (1 if kind is _F else -1), microbatch, kind


class Span(NamedTuple):
    """A node on its resource from ``start`` to ``end``."""

    node: Node
    start: float
    end: float


class _Transfer:
    """A transfer between stages; exchanges that are launched while it travels delay it."""

    __slots__ = ("end", "shared", "start")

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end
        self.shared: list[Interval] = []  # times in which it has half of a link

    def share(self, since: float, alone: float) -> None:
        """Delay this transfer by an exchange that takes ``alone`` and shares its link.

        Time that two such delays cover counts once.
        """
        shared = since, since + 2 * alone
        self.end += length(difference([shared], union(self.shared))) / 2
        self.shared.append(shared)


class Clock:
    """Plays the nodes of a rank in issue order.

    There are two clocks. The host launches one node after another in issue order; each takes its launch cost. A
    resource runs its nodes in the order of their launch: a node starts when it is launched and its inputs are there,
    an exchange or a send also not before the compute that was launched ahead of it has ended. Without launch costs the
    host is always ahead; a CPU's thread, which computes by itself, is played in this way. A dispatch needs counts: the
    resource waits for them, or, with ``counts_block``, the host, which launches nothing meanwhile; the dispatch then
    starts at once, since its rows were there before their counts. If a transfer
    between stages and an exchange share links, at either end of the transfer, each gets half of the rate while both
    run. So an exchange may delay the arrival of a transfer that was sent before: play the ranks in the order of time.
    Gathers of parameters have other ranks and a lane of their own: they follow each other, and delay no exchange. So
    do copies of activations to host memory, and those back; a segment's backward waits for the latter.

    Args:
        costs: Cost of each node.
        counts_block: Whether the host waits for counts.
        placement: Rank of each stage.
        clocks: Clocks of the ranks before this one, to which it is added; None for one rank.
    """

    def __init__(
        self,
        costs: NodeCosts,
        *,
        counts_block: bool = False,
        placement: Placement = SINGLE,
        clocks: list[Clock] | None = None,
    ) -> None:
        self.clocks = [] if clocks is None else clocks
        self.clocks.append(self)  # a transfer reaches the clock of another rank by its number
        self.arrivals: dict[Key, _Transfer] = {} if self.clocks[0] is self else self.clocks[0].arrivals
        """Transfers between the stages of all ranks, by the chain that receives them."""
        self.costs, self.counts_block, self.placement = costs, counts_block, placement
        self.launch = costs.launch
        self.now = 0.0
        """Earliest start of the next node: the compute so far has ended, and the host has come to it."""
        self.computed = self.host = 0.0  # ends of the compute and of the launches so far
        self.launches: list[Span] = []
        """Times in which the host launches nodes, if that costs time."""
        # Times at which every link of the resource is free.
        self.free: dict[Resource, list[float]] = {Resource.EXCHANGE: [], Resource.CONTROL: []}
        self.sent: dict[int, _Transfer] = {}  # the last to each rank
        self.outward: list[_Transfer] = []  # to other ranks, sharing the links
        self.inward: list[_Transfer] = []
        self.since: list[float] = []  # start of the present busy time of every link of the exchanges
        self.awaited: set[Key] = set()  # chains whose input comes from another rank
        self.ready: dict[Key, float] = {}
        self.arrived: dict[Key, dict[Place, float]] = {}  # ends of exchanges that no compute has taken yet
        self.gathered: dict[tuple[int, int], float] = {}  # ends of the gathers, by stage and block
        self.moved: dict[tuple[int, ...], float] = {}  # ends of the copies of activations, by their stay
        self.copied = {Op.OFFLOAD: 0.0, Op.FETCH: 0.0}  # times at which each way of the link to host memory is free
        self.known: dict[tuple[object, ...], tuple[float, tuple[float, ...]]] = {}  # costs, by node without microbatch

    def needed(self, node: Node) -> float:
        """Return the time at which all inputs of a node have arrived; infinite while one has not been sent."""
        op, kind, microbatch, _, call, part, stage, pipe = node
        # These may start as soon as they are issued; rows of an exchange were computed before.
        if kind is _W or op is _RECEIVE or op in _ALONE or op is _COMBINE or (op is _DISPATCH and kind is _I):
            return 0.0
        key = (pipe, stage, microbatch, kind)
        ready = self.ready.get(key)
        if ready is not None:
            arrived = self.arrived.get(key)
            if arrived is None or (op is not _EXPERTS and op is not _DISPATCH):
                return ready
            needed = _COUNTS if op is _DISPATCH else _DISPATCH if kind is _F else _COMBINE
            return arrived.get((needed, call, part), ready)  # of several parts each waits for its own
        if key in self.awaited:
            transfer = self.arrivals.get(key)
            return inf if transfer is None else transfer.end
        if kind is _F:  # the first node of a chain needs the chain before it
            return self.ready.get((pipe, stage - 1, microbatch, kind), 0.0)
        forward = self.ready.get((pipe, stage, microbatch, _F), 0.0)
        return max(forward, self.ready.get((pipe, stage + 1, microbatch, kind), 0.0))

    def start(self, node: Node) -> float:
        """Return the earliest start of a node that is issued now."""
        needed = self.needed(node)
        return needed if needed > self.now else self.now

    def play(self, node: Node, needed: float | None = None) -> Span:
        """Issue a node and return its span; ``needed`` is the result of :meth:`needed`, if it is known."""
        op, kind, microbatch, block, call, part, stage, pipe = node
        if self.counts_block or self.launch:
            self._launch(node)
        if op is _RECEIVE:
            self.awaited.add((pipe, stage, microbatch, kind))
            return Span(node, self.now, self.now)
        if op is _RELEASE or op in MOVES:
            return self._move(node)
        start = self.start(node) if needed is None else max(self.now, needed)
        if (
            self.counts_block
            and op is _DISPATCH
            and (_COUNTS, call, part) in self.arrived.get((pipe, stage, microbatch, kind), ())
        ):
            start = self.host  # which has waited for the counts
        lane = RESOURCE_OF[op]
        if lane is _COMPUTE:
            if kind is not _W and (self.gathered or self.moved):
                start = max(start, self._brought(node))
            end = self.now = self.computed = start + self.cost(node)[0]
            if kind is not _W and op not in RECOMPUTES:
                self._take(node)
        elif lane is _PEER:
            start, end = self._send(node, start)
            return Span(node, start, end)
        elif op is _GATHER:
            start = max([start, *self.gathered.values()])
            end = self.gathered[stage, block] = start + self.cost(node)[0]
        else:
            start, end = self._travel(node, start, self.free[lane])
            if kind is not _W:
                self.arrived.setdefault((pipe, stage, microbatch, kind), {})[op, call, part] = end
        if kind is not _W and op not in RECOMPUTES:  # no later node of the chain needs their result
            self.ready[pipe, stage, microbatch, kind] = end
        return Span(node, start, end)

    def _brought(self, node: Node) -> float:
        """Return when the parameters of a compute node are gathered, and its activations back from the host."""
        stay, ends = node.stay, [self.gathered.get((node.stage, node.block), 0.0)]
        if node.kind is _I:
            every = [one for one in self.moved if one[:4] == stay[:4]] if node.op in OWN_AGAIN else [stay]
            ends += [self.moved.pop(one, 0.0) for one in every]
        return max(ends)

    def _move(self, node: Node) -> Span:
        """Copy activations to host memory or back, or wait until they have left; or free parameters."""
        op, place = node.op, node.stay
        if op not in self.copied:
            self.now = self.now if op is _RELEASE else max(self.now, self.moved[place])
            return Span(node, self.now, self.now)
        start = max(self.now, self.copied[op])
        end = self.copied[op] = self.moved[place] = start + self.cost(node)[0]
        return Span(node, start, end)

    def _take(self, node: Node) -> None:
        """Forget the exchanges that a compute node has waited for: of its part, or all."""
        key = node.pipe, node.stage, node.microbatch, node.kind
        arrived = self.arrived.pop(key, None)
        if arrived is not None and (one := awaited_by(node)) in arrived:
            del arrived[one]
            self.arrived[key] = arrived

    def _launch(self, node: Node) -> None:
        """Let the host launch a node; a dispatch may have to wait for its counts before."""
        if self.counts_block and node.op is Op.DISPATCH and node.kind is _F:
            self.host = max(self.host, self.needed(node))
        if self.launch:
            begun, self.host = self.host, self.host + self.launch.get(node[:2], 0.0)
            self.launches.append(Span(node, begun, self.host))
        self.now = max(self.now, self.host)

    def _send(self, node: Node, launched: float) -> tuple[float, float]:
        """Return start and end of a transfer to the rank of the next or previous stage."""
        key = pipe, stage, _, _ = destination(node)
        to = self.placement.rank(pipe, stage)
        start = max(launched, self.sent[to].end) if to in self.sent else launched
        transfer = _Transfer(start, start + self.cost(node)[0])
        if self.costs.shared_links:
            ends = [(self, self.outward, self.inward)]
            ends += [(clock, clock.inward, clock.outward) for clock in self.clocks[to : to + 1]]
            shared = [clock._share(transfer, opposite) for clock, _, opposite in ends]
            for since, until in shared:
                transfer.share(since, max(0.0, until - since))
            for _, way, _ in ends:
                way.append(transfer)
        self.sent[to] = self.arrivals[key] = transfer
        return start, transfer.end

    def _share(self, transfer: _Transfer, opposite: Sequence[_Transfer]) -> Interval:
        """Let a transfer share the links with exchanges that have been launched; return the longest common time.

        An exchange uses both directions of a link. A transfer the opposite way has delayed it already.
        """
        free, time = self.free[Resource.EXCHANGE], (transfer.start, transfer.end)
        more = difference([time], union((other.start, other.end) for other in opposite))
        busy = list(zip(self.since, free, strict=False))
        free[: len(busy)] = [until + sum([common(part, (since, until)) for part in more]) for since, until in busy]
        shared = [(max(since, transfer.start), min(until, transfer.end)) for since, until in busy]
        return max(shared, key=lambda one: one[1] - one[0], default=(transfer.start, transfer.start))

    def _delayed(self, cost: float, start: float) -> float:
        """Return the time of an exchange that shares the links with transfers."""
        time = start, start + cost
        shared = [sum([common(time, (o.start, o.end)) for o in way]) for way in (self.outward, self.inward)]
        return cost + min(cost, max(shared))

    def cost(self, node: Node) -> tuple[float, tuple[float, ...]]:
        """Return a node's time, and its time on every link; both are the same for every microbatch."""
        place = node[:2] + node[3:]
        known = self.known.get(place)
        if known is None:
            links = self.costs.links(node)
            known = self.known[place] = max(links), links
        return known

    def _travel(self, node: Node, launched: float, free: list[float]) -> tuple[float, float]:
        """Return the first start and the last end over the links; each link is first in, first out."""
        costs = self.cost(node)[1]
        shares = self.costs.shared_links and node.op is not Op.COUNTS
        if len(costs) == len(free) == 1 and not shares:
            start = max(launched, free[0])
            free[0] = start + costs[0]
            return start, free[0]
        free.extend([max(free, default=0.0)] * (len(costs) - len(free)))
        if len(costs) == 1:  # a single time holds for every link
            costs = costs * len(free)
        starts = [max(launched, at) for at in free]
        if shares:
            self.since.extend([0.0] * (len(free) - len(self.since)))
            self.since = [launched if launched > at else since for at, since in zip(free, self.since, strict=True)]
            for way in (self.outward, self.inward):
                way[:] = [transfer for transfer in way if transfer.end > self.now]
            alone, costs = max(costs), tuple(map(self._delayed, costs, starts))
            for transfer in (*self.outward, *self.inward):
                since, until = max(min(starts), transfer.start), min(min(starts) + alone, transfer.end)
                if since < until:
                    transfer.share(since, until - since)
        free[:] = map(add, starts, costs)
        return min(starts), max(free)


def play_ranks(
    ranks: Sequence[Sequence[Node]], placement: Placement, costs: NodeCosts, *, counts_block: bool = False
) -> list[list[Span]]:
    """Return the spans of every rank on its resources, as :func:`play_clocks`."""
    return [spans for spans, _ in play_clocks(ranks, placement, costs, counts_block=counts_block)]


def makespan(
    ranks: Sequence[Sequence[Node]], placement: Placement, costs: NodeCosts, *, counts_block: bool = False
) -> float:
    """Return the end of the last node of all ranks."""
    played = play_ranks(ranks, placement, costs, counts_block=counts_block)
    return max((span.end for spans in played for span in spans), default=0.0)


def play_clocks(
    ranks: Sequence[Sequence[Node]], placement: Placement, costs: NodeCosts, *, counts_block: bool = False
) -> list[tuple[list[Span], list[Span]]]:
    """Return of every rank the spans on its resources, and the spans in which its host launches the same nodes.

    A rank waits at a compute node whose input has not been sent. Without launch costs there are no spans of the host.

    Raises:
        ValueError: Ranks wait for each other; the message names the first node that waits.
    """
    clocks: list[Clock] = []
    for _ in ranks:
        Clock(costs, counts_block=counts_block, placement=placement, clocks=clocks)
    spans: list[list[Span]] = [[] for _ in ranks]
    waiting: dict[Key, list[int]] = {}  # ranks, by the chain whose input they wait for
    ready = [(0.0, rank) for rank in range(len(ranks))]  # each by the earliest time of its next node
    while ready:
        time, rank = heappop(ready)
        nodes, clock, done = ranks[rank], clocks[rank], spans[rank]
        for position in range(len(done), len(nodes)):
            node = nodes[position]
            needed = clock.needed(node)
            if needed == inf:
                waiting.setdefault(node.chain, []).append(rank)
                break
            if costs.shared_links and max(clock.now, needed) > time:  # until then others may delay a transfer
                heappush(ready, (max(clock.now, needed), rank))
                break
            done.append(clock.play(node, needed))
            if node.op is _SEND:
                for other in waiting.pop(destination(node), ()):
                    heappush(ready, (clocks[other].now, other))
    for rank, (nodes, done) in enumerate(zip(ranks, spans, strict=True)):
        if len(done) < len(nodes):
            raise ValueError(
                f"rank {rank}, position {len(done)}: {nodes[len(done)]} waits forever for a message of another rank; "
                "allowed: no ranks that wait for each other"
            )
    for done in spans:  # some transfers were delayed later
        for position, (node, start, _) in enumerate(done):
            if node.op is _SEND:
                done[position] = Span(node, start, clocks[0].arrivals[destination(node)].end)
    return [(done, clock.launches) for done, clock in zip(spans, clocks, strict=True)]
