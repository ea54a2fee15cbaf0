"""Improvement of an order: nodes change places, and steps are packed to the left and to the right.

Contract: :func:`justified` returns times at which nodes start, by which no node breaks a rule and the step does not
take longer; :func:`lightened` those by which ranks hold less in as much time. The result depends on the arguments
alone.

A step is given by a key of every node. It is packed to the left::

    1. take the node of the smallest key of those whose needs are placed
    2. place it on its lane, in the first gap from the end of its needs on

Packed to the right, the same begins at the end. Each round::

    1. for time: find a critical path, and on it nodes that wait for the one before on their lane alone; let one pass
       for memory: where a rank holds the most, let a forward come later, or what frees memory earlier
    2. pack to the left; for time in some rounds to the right and to the left again
    3. go on from there, if the step is no worse than the one of ``LATE`` rounds ago           (late acceptance)
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from random import Random
from typing import Any

from overlap1f1b.plan.budget import Budget
from overlap1f1b.plan.node import RESOURCE_OF, Resource
from overlap1f1b.plan.precedence import Placed, Precedence
from overlap1f1b.schedule import Kind

LATE = 200
ROUNDS = 2000
"""Most times that all nodes are placed."""
PLACED = 0.5
"""Scheduled nodes that take as long as to place one."""
PACKED = 0.1
"""Share of the rounds in which a step that is not faster is packed to the right and to the left again."""
SHAKEN, MOVED = 0.3, 0.1
"""Share of the rounds in which keys change at random, and of the keys that do."""
NEAR, BEHIND = 24, 12
"""Nodes before the most that a rank holds that may come later, and of those behind it that may come earlier."""
MEAN = 0.02
"""Weight of the mean that is held, beside the most."""

_State = tuple[Any, ...]
"""A value, the smaller the better; the starts of all nodes; and what a change has to know."""


def _improved(now: Any, changed: Callable[[Any], tuple[Any, int]], rounds: int, least: float) -> Any:
    """Return the best state of so many rounds; ``changed`` returns another one, and how many it has used."""
    best, late = now, list[float]()
    while rounds > 0 and best[0] > least:
        tried, used = changed(now)
        rounds -= used
        if tried[0] <= max(now[0], late[0] if len(late) == LATE else now[0]):
            now = tried
        late = [*late[-LATE + 1 :], now[0]]
        best = now if now[0] < best[0] else best
    return best


def justified(needs: Precedence, starts: Sequence[float], budget: Budget, nodes: float) -> Placed:
    """Return a step that is at least as fast as packed by the given starts.

    Args:
        needs: Nodes of the step.
        starts: When they start in some order that keeps all rules.
        budget: Of all searches.
        nodes: How much of it may be used.
    """
    draw, cost = Random(0), max(1, len(starts)) * PLACED
    width = sum(needs.times) / max(1, len(starts))

    def changed(now: Placed) -> tuple[Placed, int]:
        """Return the step with a wait turned round, or all keys shaken, packed again; and how often it was packed."""
        keys, waits = list(now[1]), _critical(needs, now, draw)
        for _ in range(draw.choice((1, 1, 2)) if waits else 0):
            before, node = draw.choice(waits)
            keys[before] = now[1][node] + 1e-6
            if draw.random() < 0.3:
                keys[node] = now[1][before] - 1e-6
        if not waits or draw.random() < SHAKEN:
            amount = width * draw.choice((1, 4))
            keys = [key + draw.gauss(0, amount) if draw.random() < MOVED else key for key in keys]
        tried, used = _packed(needs, keys), 1
        if tried[0] < now[0] or draw.random() < PACKED:
            again = _packed(needs, _packed_right(needs, tried[1]))
            tried, used = again if again[0] <= tried[0] else tried, 3
        budget.spend(used * cost)
        return tried, used

    budget.spend(cost)
    found: Placed = _improved(_packed(needs, starts), changed, min(ROUNDS, int(nodes / cost)), needs.bound * (1 + 1e-9))
    return found


def lightened(needs: Precedence, starts: Sequence[float], limit: float, budget: Budget, nodes: float) -> list[float]:
    """Return starts by which no rank holds more than by the given ones, and a step takes no longer than a limit.

    Forwards come no earlier than they did, unless they are moved; all else comes as early as it may.

    Args:
        needs: Nodes of the step, with what they hold.
        starts: When they start in some order that keeps all rules and the limit.
        limit: Time of the step.
        budget: Of all searches.
        nodes: How much of it may be used.
    """
    draw, cost = Random(0), max(1, len(starts)) * PLACED
    width = sum(needs.times) / max(1, len(starts))
    computes = [list[int]() for _ in range(max(needs.rank_of) + 1)]
    for node in needs.order:  # of nodes that start together the first stays the first
        if RESOURCE_OF[needs.nodes[node].op] is Resource.COMPUTE:
            computes[needs.ranks[node]].append(node)
    forwards = [node for nodes in computes for node in nodes if needs.nodes[node].kind is Kind.F]

    def state(end: float, starts: Sequence[float]) -> _State:
        """Return what is held, the starts, and the order of the rank that holds the most, with the position of that."""
        if end > limit:
            return inf, starts, [], 0
        most, total, found, at = -1.0, 0.0, list[int](), 0
        for these in computes:
            level, order = 0.0, sorted(these, key=lambda node: (starts[node], needs.times[node] > 0))
            for place, node in enumerate(order):
                now, level = level + needs.most[node], level + needs.kept[node]
                total += now
                if now > most:
                    most, found, at = now, order, place
        return most + MEAN * total / max(1, len(starts)), starts, found, at

    def changed(now: _State) -> tuple[_State, int]:
        """Return the step with forwards later, or what frees bytes earlier, near the node with the most bytes."""
        _, starts, order, at = now
        keys, since = list(starts), [0.0] * len(starts)
        for node in forwards:
            since[node] = starts[node]
        for _ in range(draw.choice((1, 1, 2, 3))):
            what = draw.random()
            early = [node for node in order[: at + 1] if needs.nodes[node].kind is Kind.F][-NEAR:]
            frees = [node for node in order[at:] if needs.kept[node] < 0][:BEHIND]
            if what < 0.5 and early:
                moved, to = draw.choice(early), order[min(len(order) - 1, at + draw.choice((0, 1, 1, 2, 4)))]
                until, chain = starts[to] + draw.choice((0.0, needs.times[to])), needs.nodes[moved].chain
                for node in order:
                    if needs.nodes[node].chain == chain and starts[moved] <= starts[node] < until:
                        keys[node], since[node] = until, until if node == moved else 0.0
            elif what < 0.8 and frees:
                keys[draw.choice(frees)] = starts[order[max(0, at - draw.choice((0, 1, 2, 4)))]] - 1e-6
            else:
                moved = draw.randrange(len(starts))
                keys[moved], since[moved] = keys[moved] - width * draw.random() * draw.choice((1, 4)), 0.0
        budget.spend(cost)
        return state(*_packed(needs, keys, since)), 1

    ends = max(map(sum, zip(starts, needs.times, strict=True)))
    late = [start + limit - ends for start in _packed_right(needs, starts)]
    since = [0.0] * len(starts)
    for node in forwards:
        since[node] = late[node]
    keys = [max(start, at) for start, at in zip(starts, since, strict=True)]
    now = min(state(limit, starts), state(*_packed(needs, keys, since)), key=lambda one: one[0])
    return list(_improved(now, changed, min(ROUNDS, int(nodes / cost)), 0.0)[1])


def _packed_right(needs: Precedence, starts: Sequence[float]) -> list[float]:
    """Return when nodes start if each ends as late as the others let it."""
    ends = [-(start + time) for start, time in zip(starts, needs.times, strict=True)]
    last, back = _packed(needs, ends, right=True)
    return [last - start - time for start, time in zip(back, needs.times, strict=True)]


def _packed(needs: Precedence, keys: Sequence[float], since: Sequence[float] = (), *, right: bool = False) -> Placed:
    """Return the step that the rules at the head of this module make, and its starts.

    The smallest key comes first, each node in the first gap of its lane behind its needs and ``since``. Packed to the
    ``right``, time runs backwards: a node waits for those behind it.
    """
    before, behind = (needs.behind, needs.before) if right else (needs.before, needs.behind)
    times, lanes, left = needs.times, needs.lanes, list(map(len, before))
    heap = [(key, node) for node, key in enumerate(keys) if not left[node]]
    heapify(heap)
    ready, starts, last = list(since) or [0.0] * len(keys), [0.0] * len(keys), 0.0
    busy: list[tuple[list[float], list[float]]] = [([], []) for _ in needs.rank_of]  # begins and ends on each lane
    while heap:
        node = heappop(heap)[1]
        start, time = ready[node], times[node]
        begins, ends = busy[lanes[node]]
        at = len(ends)
        if ends and start < ends[-1]:
            at = bisect_right(ends, start)
            while at < len(begins) and begins[at] < start + time:
                start = ends[at]
                at += 1
        end = start + time
        begins.insert(at, start)
        ends.insert(at, end)
        starts[node] = start
        last = end if end > last else last
        for other, lag in behind[node]:
            soon = end + lag
            ready[other] = soon if soon > ready[other] else ready[other]
            left[other] -= 1
            if not left[other]:
                heappush(heap, (keys[other], other))
    return last, starts


def _critical(needs: Precedence, step: Placed, draw: Random) -> list[tuple[int, int]]:
    """Return the nodes of a critical path that wait for their lane alone, each behind the node for which it waits."""
    (last, starts), times, lanes = step, needs.times, needs.lanes
    ends = [start + time for start, time in zip(starts, times, strict=True)]
    on_lane = {(lanes[node], end): node for node, end in enumerate(ends) if times[node]}
    waits = list[tuple[int, int]]()
    node = draw.choice([node for node, end in enumerate(ends) if end == last])
    while starts[node] > 0:
        tight = [other for other, lag in needs.before[node] if ends[other] + lag == starts[node]]
        lane = on_lane.get((lanes[node], starts[node]))
        if lane is not None and lane not in tight and times[node] and (not tight or draw.random() < 0.5):
            waits.append((lane, node))
            node = lane
        elif tight:
            node = draw.choice(tight)
        else:
            break  # a node that takes no time waits for its lane
    return waits
