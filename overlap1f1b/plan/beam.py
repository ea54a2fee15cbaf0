"""Orders of nodes by a beam search: the best beginnings of a step go on side by side.

Contract: :func:`searched` returns every node of a step once, for each rank in issue order. The result depends on the
arguments alone, so it is the same on all ranks.

In every round each beginning becomes longer by one node::

    1. find the lane on which a next node can end first                        (Giffler and Thompson's active schedules)
    2. each node that this lane could begin before that makes a longer beginning; of weight gradients the oldest does
    3. of beginnings that have played the same nodes, the few stay that no other is ahead of
    4. of all beginnings the ``width`` stay whose bounds are the smallest: no step that begins so ends earlier
"""

from __future__ import annotations

from operator import itemgetter
from random import Random
from typing import NamedTuple

from overlap1f1b.plan.node import RECOMPUTES
from overlap1f1b.plan.precedence import Precedence
from overlap1f1b.schedule import Kind

_SCORE = itemgetter(0)
ALIKE = 4
"""Beginnings that stay of those that have played the same nodes."""


class _Beginning(NamedTuple):
    """A beginning of a step, and the node that it has played last.

    Args:
        score: What the smallest of is the best: the bound, and a share of the time in which lanes were idle.
        bound: Lower bound of the step.
        idle: Time in which lanes were idle.
        played: A number for the nodes that are played, whatever their order.
        free: Times from which on lanes are free.
        left: Time that each lane still has to do.
        ready: Nodes that may be next, each with the time from which on, in the order in which they became so.
        partly: Nodes of which some needs are played: how many are not, and the time of the others' ends.
        before: The same without its last node.
        node: The last node, from ``start`` on.
    """

    score: float
    bound: float
    idle: float
    played: int
    free: tuple[float, ...]
    left: tuple[float, ...]
    ready: dict[int, float]
    partly: dict[int, tuple[int, float]]
    before: _Beginning | None = None
    node: int = -1
    start: float = 0.0


class Beam:
    """A beam search over the orders that keep all rules."""

    def __init__(self, needs: Precedence) -> None:
        self.needs, self.times, self.lanes = needs, needs.times, needs.lanes
        self.counts = list(map(len, needs.before))
        self.weights = [node.kind is Kind.W for node in needs.nodes]
        self.again = [node.op in RECOMPUTES for node in needs.nodes]

    def run(self, width: int, idle: float, oldest: bool, limit: float) -> tuple[float, list[float]]:
        """Return the time of the step, and when each node starts; infinite if no beginning ends within the limit.

        Args:
            width: Beginnings that go on side by side.
            idle: Weight of the time in which lanes were idle, beside the bound.
            oldest: Whether of weight gradients only the oldest may be next.
            limit: Time of a step that is of interest.
        """
        marks = [Random(node).getrandbits(60) for node in range(len(self.times))]
        ready = {node: 0.0 for node, count in enumerate(self.counts) if not count}
        free = (0.0,) * len(self.needs.loads)
        stay = [_Beginning(self.needs.bound, self.needs.bound, 0.0, 0, free, tuple(self.needs.loads), ready, {})]
        for _ in self.times:
            alike: dict[int, list[_Beginning]] = {}
            for one in stay:
                for node, start in self._next(one, oldest=oldest):
                    longer = self._longer(one, node, start, marks[node], idle)
                    if longer.bound <= limit:
                        alike.setdefault(longer.played, []).append(longer)
            stay = []
            for several in alike.values():
                stay += several if len(several) == 1 else _ahead(several)
            if len(stay) > width:
                stay.sort(key=_SCORE)
                del stay[width:]
        starts = [0.0] * len(self.times)
        if not stay:
            return float("inf"), starts
        one, end = min(stay, key=_SCORE), 0.0
        while one.before is not None:
            starts[one.node] = one.start
            end = max(end, one.start + self.times[one.node])
            one = one.before
        return end, starts

    def _next(self, one: _Beginning, *, oldest: bool) -> list[tuple[int, float]]:
        """Return the nodes that may be next on the lane whose next node can end first, each with its start."""
        times, lanes, free, ready = self.times, self.lanes, one.free, one.ready
        # Waiting weight gradients hold activations, so they come before what is computed again.
        waits = {lanes[node] for node in ready if self.weights[node]}
        first, lane = float("inf"), -1
        for node, start in ready.items():
            on = lanes[node]
            end = (start if start > free[on] else free[on]) + times[node]
            if end < first and not (self.again[node] and on in waits):
                first, lane = end, on
        found, weighted = [], False
        for node, start in ready.items():
            if lanes[node] == lane and not (self.again[node] and lane in waits):
                begin = max(start, free[lane])
                if begin < first or begin + times[node] == first:
                    if not (weighted and oldest and self.weights[node]):
                        found.append((node, begin))
                    weighted |= self.weights[node]
        return found

    def _longer(self, one: _Beginning, node: int, start: float, mark: int, weight: float) -> _Beginning:
        _, bound, idle, played, free, left, ready, partly, *_ = one
        lane, time, tails, counts = self.lanes[node], self.times[node], self.needs.tails, self.counts
        end = start + time
        ready, changed = ready.copy(), False
        del ready[node]
        for other, lag in self.needs.behind[node].items():
            count, since = partly.get(other) or (counts[other], 0.0)
            since = max(since, end + lag)
            if not changed and (count > 1 or counts[other] > 1):
                partly, changed = partly.copy(), True
            if count > 1:
                partly[other] = count - 1, since
            else:
                ready[other] = since
                bound = max(bound, since + tails[other])
                partly.pop(other, None)
        rest = left[lane] - time
        bound = max(bound, end + rest + (self.needs.rest[lane] if rest > 1e-9 else 0.0))
        idle += start - free[lane]
        free, left = (*free[:lane], end, *free[lane + 1 :]), (*left[:lane], rest, *left[lane + 1 :])
        return _Beginning(
            bound + weight * idle, bound, idle, played ^ mark, free, left, ready, partly, one, node, start
        )


def _ahead(several: list[_Beginning]) -> list[_Beginning]:
    """Return the best few of beginnings that have played the same nodes, without those that another is ahead of."""
    several.sort(key=_SCORE)
    kept: list[_Beginning] = []
    for one in several:
        if not any(_is_ahead(other, one) for other in kept):
            kept.append(one)
            if len(kept) == ALIKE:
                break
    return kept


def _is_ahead(one: _Beginning, other: _Beginning) -> bool:
    """Return whether each lane is free, and each node may come, as early as in another beginning."""
    if any(mine > its for mine, its in zip(one.free, other.free, strict=True)):
        return False
    soon, mine, parts = min(other.free), one.ready, one.partly
    return not any(mine[node] > its and mine[node] > soon for node, its in other.ready.items()) and not any(
        parts[node][1] > since and parts[node][1] > soon for node, (_, since) in other.partly.items()
    )
