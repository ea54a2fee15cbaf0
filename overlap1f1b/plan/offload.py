"""Which activations leave to host memory, and when: what a segment's forward has left for one microbatch is one stay.

A stay's copy starts right behind that forward. Where the activations are freed, and where they are fetched, are places
in the order of nodes, so that what a rank holds depends on the order alone, and on no clock::

    dense.f[0] m0, offload.f[0] m0, …, free.f[0] m0, …, fetch.b[0] m0, …, dense.b[0] m0

By the times of the order without copies they are freed as soon as the copy has ended, and fetched as late as the
backward does not wait. Where that is not enough for a limit of memory, it waits.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from operator import itemgetter

from overlap1f1b.plan.clock import Span, makespan, play_ranks
from overlap1f1b.plan.costs import Held, NodeCosts, cost_key
from overlap1f1b.plan.intervals import Interval
from overlap1f1b.plan.node import MOVES, OWN_AGAIN, Node, Op, Resource
from overlap1f1b.plan.orders import with_inserted
from overlap1f1b.plan.plan import Plan
from overlap1f1b.schedule import Kind


def leaving(
    plans: Iterable[Plan],
    costs: NodeCosts,
    rooms: Sequence[float] = (),
    *,
    every: bool,
    counts_block: bool = False,
) -> list[Plan]:
    """Return plans of several orders within the rooms, in which activations leave to host memory.

    With ``every`` all do that can be back in time; else those that have to, in the orders that could be the fastest.
    ``rooms`` are the bytes that each pipeline rank may hold beyond those before the step.
    """
    if every:
        return [offloaded(plan, costs, counts_block=counts_block) for plan in plans]
    found = list({plan.ranks: plan for plan in plans}.values())
    kept = [plan for plan in found if plan.fits(rooms)]
    best = min((plan.predicted for plan in kept), default=inf)
    for plan in sorted((plan for plan in found if not plan.fits(rooms)), key=lambda plan: plan.predicted):
        if plan.predicted >= best:  # with copies it is no faster
            break
        less = offloaded(plan, costs, rooms, counts_block=counts_block)
        if less.fits(rooms):
            kept.append(less)
            best = min(best, less.predicted)
    return kept


def offloaded(plan: Plan, costs: NodeCosts, rooms: Sequence[float] = (), *, counts_block: bool = False) -> Plan:
    """Return a plan in which activations leave to host memory, of blocks whose shapes allow it.

    Args:
        plan: Any order; all its nodes but copies keep theirs.
        costs: Of its nodes, with the copies, and what they move as bytes of ``FREE``.
        rooms: Bytes that each pipeline rank may hold beyond those before the step, for which activations leave; without
            them all leave that can be back in time.
        counts_block: Whether the host waits for counts.
    """
    if not any(block.offload for shape in plan.shapes for block in shape):
        return plan
    placement = plan.program.placement
    kept = [[node for node in nodes if node.op not in MOVES] for nodes in plan.ranks]
    ranks = []
    for rank, spans in enumerate(play_ranks(kept, placement, costs, counts_block=counts_block)):
        line = _Line(spans, plan, costs)
        if rooms:
            line.keep_within(rooms[rank])
        else:
            line.leave_all()
        ranks.append(tuple(line.nodes()))
    end = makespan(ranks, placement, costs, counts_block=counts_block)
    return replace(plan, ranks=tuple(ranks), predicted=end, peak_bytes=costs.peak_bytes(ranks))


@dataclass(eq=False)
class _Stay:
    """The activations of a segment for one microbatch, between two positions in the order.

    Args:
        node: Its forward.
        begin: Position behind that.
        end: Position of its backward.
        bytes: What leaves.
        out, back: Times that the copies take.
        left, needed: When that to the host ends, and when that back begins.
        free, fetch: Positions before which they are freed and fetched, once they leave.
    """

    node: Node
    begin: int
    end: int
    bytes: float
    out: float
    back: float
    left: float = 0.0
    needed: float = 0.0
    free: int = -1
    fetch: int = -1

    @property
    def leaves(self) -> bool:
        return self.free >= 0


def _copy(node: Node, op: Op) -> Node:
    """Return a copy of the activations that a forward leaves."""
    number, part = node.segment
    return node._replace(op=op, kind=Kind.I if op is Op.FETCH else Kind.F, call=number, part=part)


@dataclass(eq=False)
class _Link:
    """Times in which one way of the link to host memory is taken."""

    taken: list[Interval] = field(default_factory=list)

    def first(self, since: float, length: float) -> float:
        """Return the end of the first free time of a length that begins at a time or later."""
        for begin, end in self.taken:
            if begin - since >= length:
                break
            since = max(since, end)
        return since + length

    def last(self, until: float, length: float) -> float:
        """Return the begin of the last free time of a length that ends at a time or earlier."""
        for begin, end in reversed(self.taken):
            if until - end >= length:
                break
            until = min(until, begin)
        return until - length


class _Line:
    """The nodes of a rank in their order, with the times at which they are issued, and the stays between them."""

    def __init__(self, spans: Sequence[Span], plan: Plan, costs: NodeCosts) -> None:
        self.order, self.costs = [span.node for span in spans], costs
        computed = (end if node.resource is Resource.COMPUTE else 0.0 for node, _, end in spans)
        self.issued = [0.0, *accumulate(computed, max)]  # when all compute before a position has ended
        self.starts = self.issued[-1:]  # when the first compute at a position or behind it starts
        for node, start, _ in reversed(spans):
            self.starts.append(start if node.resource is Resource.COMPUTE else self.starts[-1])
        self.starts.reverse()
        self.out, self.back = _Link(), _Link()
        self.stays = list(self._stays(plan))

    def _stays(self, plan: Plan) -> Iterator[_Stay]:
        """Yield what may leave: from behind the forward of a segment until a backward needs it."""
        begins, ends = dict[tuple[int, ...], int](), dict[tuple[int, ...], int]()
        for at, node in enumerate(self.order):
            place = node.stay
            if node.resource is not Resource.COMPUTE or not plan.shapes[node.stage][node.block].offload:
                continue
            if node.kind is Kind.F:
                begins[place] = at + 1
            elif node.kind is Kind.I:
                for one in [one for one in begins if one[:4] == place[:4]] if node.op in OWN_AGAIN else [place]:
                    ends.setdefault(one, at)
        for place, begin in begins.items():
            if place in ends:
                node = self.order[begin - 1]
                free, out, back = (_copy(node, op) for op in (Op.FREE, Op.OFFLOAD, Op.FETCH))
                size = -self.costs.bytes.get(cost_key(free), Held()).kept
                yield _Stay(node, begin, ends[place], size, self.costs(out), self.costs(back))

    def _look(self, stay: _Stay) -> tuple[int, int]:
        """Find times for the copies of a stay; return where it would be freed and fetched if nothing shall wait."""
        if not stay.leaves:
            stay.left = self.out.first(self.issued[stay.begin], stay.out)
            stay.needed = self.back.last(self.starts[stay.end], stay.back)
        free = bisect_left(self.starts, stay.left, stay.begin, stay.end)
        return free, bisect_right(self.issued, stay.needed, stay.begin, stay.end + 1) - 1

    def _let_leave(self, stay: _Stay, free: int, fetch: int) -> None:
        if not stay.leaves:
            insort(self.out.taken, (stay.left - stay.out, stay.left))
            insort(self.back.taken, (stay.needed, stay.needed + stay.back))
        stay.free, stay.fetch = free, fetch

    def leave_all(self) -> None:
        """Let all stays leave that can come back in time."""
        for stay in self.stays:
            free, fetch = self._look(stay)
            some = stay.bytes > 0 if self.costs.bytes else stay.out > 0 or not self.costs.by_node
            if some and free <= fetch:
                self._let_leave(stay, free, fetch)

    def keep_within(self, room: float) -> None:
        """Let stays leave, until no node needs more than the room, or none is left that could."""
        needs = list(self.costs.needs(self.order))
        for at in range(len(needs)):
            while needs[at] > room:
                here = [one for one in self.stays if one.bytes > 0 and one.begin <= at < one.end]
                prices = [(self._price(one, at), one) for one in here if not one.free <= at < one.fetch]
                _, stay = min(prices, key=itemgetter(0), default=(None, None))
                if stay is None:
                    return
                free, fetch = (stay.free, stay.fetch) if stay.leaves else self._look(stay)
                before = range(stay.free, stay.fetch)
                self._let_leave(stay, min(free, at), max(fetch, at + 1))
                for position in range(stay.free, stay.fetch):
                    needs[position] -= stay.bytes * (position not in before)

    def _price(self, stay: _Stay, at: int) -> tuple[float, float]:
        """Return the time that it costs for each byte if a stay is away at a position; then larger ones first."""
        self._look(stay)
        waits = max(0.0, stay.left - self.starts[at]) + max(0.0, self.issued[at + 1] - stay.needed)
        return waits / stay.bytes, -stay.bytes

    def nodes(self) -> list[Node]:
        """Return the order with the copies."""
        added: dict[int, list[Node]] = {}
        away = [stay for stay in self.stays if stay.leaves]
        for op in (Op.OFFLOAD, Op.FREE, Op.FETCH):
            for stay in sorted(away, key=lambda one: one.end if op is Op.FETCH else one.begin):
                at = {Op.OFFLOAD: stay.begin, Op.FREE: stay.free, Op.FETCH: stay.fetch}[op]
                added.setdefault(at, []).append(_copy(stay.node, op))
        return with_inserted(self.order, added)
