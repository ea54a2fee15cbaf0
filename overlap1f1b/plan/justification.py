"""Improvement of an order: nodes change places on a critical path, and steps are packed to the left and to the right.

Contract: :func:`justified` returns times at which nodes start, by which no node breaks a rule and the step does not
take longer. The result depends on the arguments alone.

A step is given by a key of every node. It is packed to the left::

    1. take the node of the smallest key of those whose needs are placed
    2. place it on its lane, in the first gap from the end of its needs on

Packed to the right, the same begins at the end. Each round::

    1. find a critical path, and on it nodes that wait for the one before on their lane alone; let one of them pass
    2. pack to the left, and in some rounds to the right and to the left again
    3. go on from there, if the step takes no longer than the one of ``LATE`` rounds ago           (late acceptance)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter
from random import Random

from overlap1f1b.plan.budget import Budget
from overlap1f1b.plan.precedence import Lags, Precedence, Step

LATE = 200
ROUNDS = 2000
"""Most times that all nodes are placed."""
PLACED = 0.5
"""Scheduled nodes that take as long as to place one."""
PACKED = 0.1
"""Share of the rounds in which a step that is not faster is packed to the right and to the left again."""
SHAKEN, MOVED = 0.3, 0.1
"""Share of the rounds in which keys change at random, and of the keys that do."""

_time = itemgetter(0)


def justified(needs: Precedence, starts: Sequence[float], budget: Budget, nodes: float) -> Step:
    """Return a step that is at least as fast as packed by the given starts.

    Args:
        needs: Nodes of the step.
        starts: When they start in some order that keeps all rules.
        budget: Of all searches.
        nodes: How much of it may be used.
    """
    draw, late, cost = Random(0), list[float](), max(1, len(starts)) * PLACED
    rounds = min(ROUNDS, int(nodes / cost))
    budget.spend(cost)
    best = now = _packed(needs, starts)
    width = sum(needs.times) / max(1, len(starts))
    while rounds > 0 and best[0] > needs.bound * (1 + 1e-9):
        keys, waits = list(now[1]), _critical(needs, now, draw)
        for _ in range(draw.choice((1, 1, 2)) if waits else 0):
            before, node = draw.choice(waits)
            keys[before] = now[1][node] + 1e-6
            if draw.random() < 0.3:
                keys[node] = now[1][before] - 1e-6
        if not waits or draw.random() < SHAKEN:
            amount = width * draw.choice((1, 4))
            keys = [key + draw.gauss(0, amount) if draw.random() < MOVED else key for key in keys]
        tried = _packed(needs, keys)
        used = 1
        if tried[0] < now[0] or draw.random() < PACKED:
            tried = min(_packed(needs, _packed_right(needs, tried[1])), tried, key=_time)
            used = 3
        rounds -= used
        budget.spend(used * cost)
        if tried[0] <= max(now[0], late[0] if len(late) == LATE else now[0]):
            now = tried
        late = [*late[-LATE + 1 :], now[0]]
        best = min(best, now, key=_time)
    return best


def _packed_right(needs: Precedence, starts: Sequence[float]) -> list[float]:
    """Return when nodes start if each ends as late as the others let it."""
    ends = [-(start + time) for start, time in zip(starts, needs.times, strict=True)]
    last, back = _placed(ends, needs, needs.behind, needs.before)
    return [last - start - time for start, time in zip(back, needs.times, strict=True)]


def _packed(needs: Precedence, keys: Sequence[float]) -> Step:
    return _placed(keys, needs, needs.before, needs.behind)


def _placed(keys: Sequence[float], needs: Precedence, before: Sequence[Lags], behind: Sequence[Lags]) -> Step:
    times, lanes, left = needs.times, needs.lanes, list(map(len, before))
    heap = [(key, node) for node, key in enumerate(keys) if not left[node]]
    heapify(heap)
    ready, starts, last = [0.0] * len(keys), [0.0] * len(keys), 0.0
    busy: list[tuple[list[float], list[float]]] = [([], []) for _ in needs.rank_of]  # begins and ends on each lane
    while heap:
        node = heappop(heap)[1]
        start, time = ready[node], times[node]
        begins, ends = busy[lanes[node]]
        at = len(ends)
        if ends and start < ends[-1]:
            at = bisect_right(ends, start)
            while at < len(begins) and (begins[at] < start + time or begins[at] < start):
                start = ends[at]
                at += 1
        end = start + time
        begins.insert(at, start)
        ends.insert(at, end)
        starts[node] = start
        last = end if end > last else last
        for other, lag in behind[node]:
            since = end + lag
            ready[other] = since if since > ready[other] else ready[other]
            left[other] -= 1
            if not left[other]:
                heappush(heap, (keys[other], other))
    return last, starts


def _critical(needs: Precedence, step: Step, draw: Random) -> list[tuple[int, int]]:
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
