"""What each node of a step must come behind, whichever order its ranks play."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import pairwise
from math import inf

from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.clock import play_ranks
from overlap1f1b.plan.costs import CostKey, Held, NodeCosts, cost_key
from overlap1f1b.plan.node import RECOMPUTES, RESOURCE_OF, Node, Op, Resource, awaited_by, peer_of
from overlap1f1b.plan.plan import action_of, microbatch_of
from overlap1f1b.schedule import Action, Kind

Lags = tuple[tuple[int, float], ...]
"""Numbers of nodes, each with a time after its end, below 0 before that."""
Placed = tuple[float, list[float]]
"""The time of a step, and the start of every node."""


class Precedence:
    """The nodes of a step, but for receives, and what each waits for.

    - A chain's computation has one order, its exchanges have one, and each needs the results before it.
    - Microbatches pass each place of a stage in their order, so sums have one order.
    - Under a limit a forward waits for two microbatches: one has ended, and one has no weight gradients left. They are
      those that ended first in an order which keeps the limits. So every order of these nodes keeps them.

    Args:
        chains: Nodes of the actions of a program that does not place weight gradients.
        costs: Costs of the nodes.
        ranks: Nodes of every rank in an order that keeps all rules.
        live: Microbatches of each rank that may be between forward and backward, at most as many as declared; any
            number if it is empty.
        late: Number of them that may wait for weight gradients beyond these.

    Attributes:
        nodes: The nodes, by their number.
        times: The time of each.
        lanes: The lane of each: computation, exchanges, counts, and transfers to each neighbour.
        rank_of: The rank of each lane.
        ranks: The rank of each node.
        before: Of each the numbers of nodes for which it waits, each with the time after its end, below 0 before that.
        behind: The same of the nodes that wait for it.
        order: The numbers, each behind all that it needs.
        heads: Least time from the begin of the step to the begin of each node.
        tails: Least time from the begin of each node to the end of the step.
        loads: Time that each lane has to do.
        rest: Least time from the end of each lane's last node to the end of the step.
        kept: Bytes that a rank holds more when a node has ended than before, with what is launched behind it.
        most: Bytes that it holds more at once.
        bound: No order of the nodes takes less.
    """

    def __init__(
        self,
        chains: Chains,
        costs: NodeCosts,
        ranks: Sequence[Sequence[Node]],
        live: Sequence[int] = (),
        late: int = 0,
    ) -> None:
        self.chains, self.costs = chains, costs
        self.nodes = [node for nodes in ranks for node in nodes if node.op is not Op.RECEIVE]
        self.times = list(map(costs, self.nodes))
        self.number = {node: number for number, node in enumerate(self.nodes)}
        self.lanes: list[int] = []
        self.rank_of: list[int] = []
        found: dict[tuple[int, Resource, int], int] = {}
        for rank, nodes in enumerate(ranks):
            for node in nodes:
                if node.op is not Op.RECEIVE:
                    to = peer_of(node, chains.placement) if node.op is Op.SEND else rank
                    lane = found.setdefault((rank, RESOURCE_OF[node.op], to), len(found))
                    self.rank_of += [rank] if lane == len(self.rank_of) else []
                    self.lanes.append(lane)
        self.ranks = [self.rank_of[lane] for lane in self.lanes]
        self._needs: list[dict[int, float]] = [{} for _ in self.nodes]
        for action in dict.fromkeys(map(action_of, self.nodes)):
            self._add_chain(action)
        for nodes in ranks:
            self._add_sums(nodes)
        for nodes, limit in zip(ranks, live, strict=False):
            self._add_limits([node for node in nodes if node.resource is Resource.COMPUTE], limit, late)
        self.before: list[Lags] = [tuple(needs.items()) for needs in self._needs]
        behind: list[list[tuple[int, float]]] = [[] for _ in self.nodes]
        for number, needed in enumerate(self.before):
            for other, lag in needed:
                behind[other].append((number, lag))
        self.behind: list[Lags] = list(map(tuple, behind))
        self.order = self._topological()
        self.heads, self.tails = [0.0] * len(self.times), [0.0] * len(self.times)
        for number in self.order:
            ends = [self.heads[other] + self.times[other] + lag for other, lag in self.before[number]]
            self.heads[number] = max(0.0, *ends, 0.0)
        for number in reversed(self.order):
            rests = [self.tails[other] + lag for other, lag in self.behind[number]]
            self.tails[number] = self.times[number] + max(0.0, *rests, 0.0)
        self.loads = [0.0] * len(self.rank_of)
        self.rest = [inf] * len(self.rank_of)
        for number, lane in enumerate(self.lanes):
            self.loads[lane] += self.times[number]
            self.rest[lane] = min(self.rest[lane], self.tails[number] - self.times[number])
        self._hold()
        self.bound = max([*self.tails, *map(self.lane_bound, range(len(self.rank_of)))])

    def lane_bound(self, lane: int) -> float:
        """Return the least end of a step by one lane, whose nodes keep their heads and tails and may be interrupted."""
        own = [node for node, its in enumerate(self.lanes) if its == lane]
        return interrupted((self.heads[node], self.times[node], self.tails[node] - self.times[node]) for node in own)

    def _hold(self) -> None:
        """Note what nodes hold; if nobody has counted, (stage, microbatch) with activations are."""
        self.kept, self.most = [0.0] * len(self.times), [0.0] * len(self.times)
        places, begun = dict[object, list[int]](), set[CostKey]()
        for number in self.order:  # microbatches pass each place in their order
            node, at = self.nodes[number], number
            if node.resource is Resource.COMPUTE:
                places.setdefault(microbatch_of(node), [number, number])[1] = number
            else:  # it is launched right behind what it needs
                at = next(other for other, _ in self.before[number] if self.nodes[other].resource is Resource.COMPUTE)
            kept, most, first = self.costs.bytes.get(key := cost_key(node), Held())
            first = 0.0 if key in begun else first
            begun.add(key)
            self.most[at] = max(self.most[at], self.kept[at] + first + max(most, kept))
            self.kept[at] += first + kept
        for first_node, last in () if self.costs.bytes else places.values():
            self.kept[first_node] = self.most[first_node] = 1.0
            self.kept[last] = -1.0

    def _topological(self) -> list[int]:
        left = list(map(len, self.before))
        order = [node for node, count in enumerate(left) if not count]
        for node in order:
            for other, _ in self.behind[node]:
                left[other] -= 1
                if not left[other]:
                    order.append(other)
        return order

    def _after(self, first: Node, second: Node, *, begun: bool = False) -> None:
        """Let a node wait for the end of another, or until it has begun."""
        number = self.number[first]
        self._needs[self.number[second]][number] = -self.times[number] if begun else 0.0

    def _add_chain(self, action: Action) -> None:
        """Add what the nodes of an action need of each other, and of the actions before."""
        nodes = [node for node in self.chains.of(action) if node.op is not Op.RECEIVE]
        computed: Node | None = None
        travels: list[Node] = []  # exchanges since the computation that needed all before
        last: dict[Resource, Node] = {}
        for node in nodes:
            needs = [last.get(node.resource)]
            if node.resource is not Resource.COMPUTE:
                needs += [computed, node._replace(op=Op.COUNTS) if node.op is Op.DISPATCH else None]
                travels += [node] if node.op is not Op.SEND else []
            else:
                if node.op in RECOMPUTES:
                    if (exchange := last.get(Resource.EXCHANGE)) is not None:
                        self._after(exchange, node, begun=True)
                else:
                    mine = [other for other in travels if other.block == node.block and other.place == awaited_by(node)]
                    needs += mine or travels
                    travels = [other for other in travels if other not in mine] if mine else []
                computed = node
            last[node.resource] = node
            for other in needs:
                if other in self.number:
                    self._after(other, node)
            if (weight := self.chains.weight(node)) is not None:
                for part in nodes:
                    if part[:5] == node[:5]:
                        self._after(part, weight)
        self._join(action, nodes)

    def _join(self, action: Action, nodes: Sequence[Node]) -> None:
        """Add what an action needs of the actions before."""
        kind, stage, microbatch, pipe = action
        first, begin = nodes[0], next(node for node in nodes if node.op not in RECOMPUTES)
        before = stage - 1 if kind is Kind.F else stage + 1
        if 0 <= before < self.chains.placement.stages:
            end = self.chains.of(Action(kind, before, microbatch, pipe))[-1]
            self._after(end, begin if end.op is Op.SEND else first)
        if kind is not Kind.F:
            forward = self.chains.of(Action(Kind.F, stage, microbatch, pipe))
            self._after(forward[-1], begin)
            self._after(forward[-2 if forward[-1].op is Op.SEND else -1], first)

    def _add_sums(self, nodes: Iterable[Node]) -> None:
        latest: dict[Node, Node] = {}
        for node in nodes:
            if node.op is not Op.RECEIVE:
                together = node.op is Op.EXPERTS and node.kind is Kind.I  # parts are one summand
                place = node._replace(microbatch=0, part=0 if together else node.part)
                if place in latest:
                    self._after(latest[place], node)
                latest[place] = node

    def _add_limits(self, computes: Sequence[Node], live: int, late: int) -> None:
        """Let a microbatch begin only behind others: ``live`` may be open, and ``late`` more may wait for weights."""
        begins, ends, weights = (dict[tuple[int, int, int], list[Node]]() for _ in range(3))
        for node in computes:
            place = microbatch_of(node)
            if node.kind is Kind.F:
                begins.setdefault(place, [node])
            else:
                weights[place] = [*weights.pop(place, ()), node]  # in the order of the last ones
                if node.kind is Kind.I:
                    ends.pop(place, None)
                    ends[place] = [node]
        firsts = [first for (first,) in begins.values()]
        for one, following in pairwise(firsts):
            self._after(one, following)
        for ended, most in ((list(ends.values()), live), (list(weights.values()), live + late)):
            for needed, first in zip(ended, firsts[most:], strict=False):
                for node in needed:
                    self._after(node, first)

    def starts(self, ranks: Sequence[Sequence[Node]], *, counts_block: bool = False) -> list[float]:
        """Return when each node starts in an order of every rank."""
        played = play_ranks(ranks, self.chains.placement, self.costs, counts_block=counts_block)
        begins = {span.node: span.start for spans in played for span in spans}
        return [begins[node] for node in self.nodes]

    def in_order(self, starts: Sequence[float]) -> list[int]:
        """Return the numbers of the nodes in the order of their starts, each behind all that it needs."""

        def turn(node: int) -> tuple[float, bool]:  # one that takes no time before one that starts with it
            return starts[node], self.times[node] > 0 or self.nodes[node].op in RECOMPUTES

        return sorted(self.order, key=turn)

    def issued(self, starts: Sequence[float], *, counts_block: bool) -> list[list[Node]]:
        """Return the nodes of every rank in issue order, for the times at which they start.

        An exchange follows its producer at once, behind those before it on its lane. A dispatch whose counts hold up
        the host follows the computation before its start. A receive comes right before the chain that needs it.
        """
        nodes = self.nodes
        ranks: list[list[int]] = [[] for _ in range(max(self.rank_of) + 1)]
        place: dict[int, int] = {}  # of every node, behind which computation of its rank it comes
        latest = [0] * len(self.rank_of)
        behind: dict[tuple[int, int], list[int]] = {}
        for node in self.in_order(starts):
            number, lane = self.ranks[node], self.lanes[node]
            rank = ranks[number]
            if RESOURCE_OF[nodes[node].op] is Resource.COMPUTE:
                place[node] = len(rank)
                rank.append(node)
                continue
            at = max(place[other] for other, _ in self.before[node] if self.ranks[other] == number)
            if counts_block and nodes[node].op is Op.DISPATCH and nodes[node].kind is Kind.F:
                at = len(rank) - 1
            if nodes[node].op is not Op.COUNTS:  # all counts of a call leave before its first rows
                at = latest[lane] = max(latest[lane], at)
            place[node] = at
            behind.setdefault((number, at), []).append(node)
        for together in behind.values():
            together.sort(key=lambda node: nodes[node].op is not Op.COUNTS)
        return [
            self._with_receives(
                [nodes[node] for at, compute in enumerate(rank) for node in (compute, *behind.get((number, at), ()))]
            )
            for number, rank in enumerate(ranks)
        ]

    def _with_receives(self, nodes: Sequence[Node]) -> list[Node]:
        order, begun = list[Node](), set[object]()
        for node in nodes:
            if node.kind is not Kind.W and node.op not in RECOMPUTES and node.chain not in begun:
                begun.add(node.chain)
                first = self.chains.of(action_of(node))[0]
                order += [first] if first.op is Op.RECEIVE else []
            order.append(node)
        return order


def interrupted(jobs: Iterable[tuple[float, float, float]]) -> float:
    """Return a bound of one lane's jobs, each with its earliest begin, its time and the least time behind it.

    It is the time in which one would do them that may interrupt a job for one with more time behind it (Jackson).

    >>> interrupted([(0, 4, 0), (1, 2, 5)])
    8.0
    """
    coming, waiting = sorted(jobs, reverse=True), list[tuple[float, float]]()
    now = end = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, time, behind = coming.pop()
            heappush(waiting, (-behind, time))
        behind, time = waiting[0]
        works = min(time, coming[-1][0] - now) if coming else time
        now += works
        if works < time:
            heapreplace(waiting, (behind, time - works))
        else:
            heappop(waiting)
            end = max(end, now - behind)
    return end
