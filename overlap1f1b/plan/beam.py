"""Orders of nodes by a beam search: the best beginnings of a step go on side by side.

Contract: :meth:`Beam.run` returns when every node of a step starts. The result depends on the arguments alone, so it is
the same on all ranks.

In every round each beginning becomes longer by one node::

    1. find the lane on which a next node can end first                        (Giffler and Thompson's active schedules)
    2. each node that this lane could begin before that makes a longer beginning; of weight gradients the oldest does;
       one for which a rank has no room waits
    3. the ``width`` longer ones stay whose bounds are the smallest: no step that begins so ends earlier
    4. of those that have played the same nodes, only the few stay that no other is ahead of
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import itemgetter
from random import Random
from typing import NamedTuple

from overlap1f1b.plan.budget import Budget
from overlap1f1b.plan.node import RECOMPUTES
from overlap1f1b.plan.precedence import Placed, Precedence
from overlap1f1b.schedule import Kind

_SCORE = itemgetter(0)
ALIKE = 4
"""Beginnings that stay of those that have played the same nodes."""
KEPT = 2.5
"""Number of nodes that are scheduled in the time that it takes to add a node to one beginning."""


class _Beginning(NamedTuple):
    """A beginning of a step, and the node that it has played last.

    Args:
        bound: Lower bound of the step.
        idle: Time in which lanes were idle.
        played: A number for the nodes that are played, whatever their order.
        held: Bytes on each rank.
        free: Times from which on lanes are free.
        left: Time that each lane still has to do.
        ready: Nodes that may be next, each with the time from which on, in the order in which they became so.
        partly: Nodes of which some needs are played: how many are not, and the time of the others' ends.
        before: The same without its last node.
        node: The last node, from ``start`` on.
    """

    bound: float
    idle: float
    played: int
    held: tuple[float, ...]
    free: tuple[float, ...]
    left: tuple[float, ...]
    ready: dict[int, float]
    partly: dict[int, tuple[int, float]]
    before: _Beginning | None = None
    node: int = -1
    start: float = 0.0


_Longer = tuple[float, float, int, _Beginning, int, float]
"""Score, bound, ``played``, and what makes a longer beginning: the one before, its next node, and when this starts."""


class Beam:
    """A beam search over the orders that keep all rules.

    Args:
        needs: Nodes of the step, and their rules.
        rooms: Most bytes that each rank may hold, by what the nodes hold; any number if it is empty.
    """

    def __init__(self, needs: Precedence, rooms: Sequence[float] = ()) -> None:
        self.needs, self.times, self.lanes, self.rooms = needs, needs.times, needs.lanes, rooms
        self.ranks = needs.ranks
        self.counts = list(map(len, needs.before))
        self.weights = [node.kind is Kind.W for node in needs.nodes]
        self.again = [node.op in RECOMPUTES for node in needs.nodes]
        self.marks = [Random(node).getrandbits(60) for node in range(len(self.times))]

    def run(
        self, width: int, idle: float, limit: float, budget: Budget, begun: Sequence[tuple[int, float]] = ()
    ) -> Placed:
        """Return the time of the step, and when each node starts; infinite if no beginning ends within the limit.

        Args:
            width: Beginnings that go on side by side.
            idle: Weight of the time in which lanes were idle, beside the bound.
            limit: Time of a step that is of interest.
            budget: Of all searches.
            begun: The first nodes of the step with their starts, if it has begun.
        """
        played, ready = 0, {node: 0.0 for node, count in enumerate(self.counts) if not count}
        free = (0.0,) * len(self.needs.loads)
        held = (0.0,) * (max(self.ranks) + 1)
        stay = [_Beginning(self.needs.bound, 0.0, 0, held, free, tuple(self.needs.loads), ready, {})]
        for node, start in begun:
            if node not in stay[0].ready:  # it starts with one that it needs
                break
            stay = [self._longer(stay[0], stay[0].bound, stay[0].played ^ self.marks[node], node, start)]
            played += 1
        for _ in range(played, len(self.times)):
            longer = list[_Longer]()
            for one in stay:
                self._lengthen(one, longer, idle, limit)
            longer.sort(key=_SCORE)
            stay, alike = [], dict[int, list[_Beginning]]()
            for _, bound, played, before, node, start in longer:
                one, same = self._longer(before, bound, played, node, start), alike.get(played)
                if same is None:
                    alike[played] = [one]
                elif len(same) < ALIKE and not any(_is_ahead(other, one) for other in same):
                    same.append(one)
                else:
                    continue
                stay.append(one)
                if len(stay) == width:
                    break
            budget.spend(KEPT * len(stay))
        starts = [0.0] * len(self.times)
        if not stay:
            return inf, starts
        one, end = min(stay, key=lambda one: max(one.free)), 0.0
        while one.before is not None:
            starts[one.node] = one.start
            end = max(end, one.start + self.times[one.node])
            one = one.before
        return end, starts

    def _lengthen(self, one: _Beginning, longer: list[_Longer], weight: float, limit: float) -> None:
        """Add the longer beginnings: with each next node of the lane on which one can end first."""
        times, lanes, free, weights, coming = self.times, self.lanes, one.free, self.weights, one.ready
        if self.rooms:
            most, ranks = self.needs.most, self.ranks
            spare = [room - held for room, held in zip(self.rooms, one.held, strict=True)]
            coming = {node: start for node, start in coming.items() if most[node] <= spare[ranks[node]]}
        # Waiting weight gradients hold activations, so they come before what is computed again.
        if waits := {lanes[node] for node in coming if weights[node]} if True in self.again else ():
            coming = {node: start for node, start in coming.items() if not (self.again[node] and lanes[node] in waits)}
        first, lane = inf, -1
        for node, start in coming.items():
            on = lanes[node]
            end = (start if start > free[on] else free[on]) + times[node]
            if end < first:
                first, lane = end, on
        if lane < 0:
            return
        weighted, since, rest = False, free[lane], one.left[lane]
        behind = self.needs.rest[lane]
        for node, ready in coming.items():
            if lanes[node] != lane:
                continue
            start, time = (ready if ready > since else since), times[node]
            if start < first or start + time == first:
                if not (weighted and weights[node]):
                    bound = max(one.bound, start + self.needs.tails[node])
                    bound = max(bound, start + rest + (behind if rest - time > 1e-9 else 0.0))
                    if bound <= limit:
                        score = bound + weight * (one.idle + start - since)
                        longer.append((score, bound, one.played ^ self.marks[node], one, node, start))
                weighted |= weights[node]

    def _longer(self, one: _Beginning, bound: float, played: int, node: int, start: float) -> _Beginning:
        """Return a beginning with one more node, which starts at a time."""
        _, idle, _, held, free, left, ready, partly, *_ = one
        lane, counts = self.lanes[node], self.counts
        end = start + self.times[node]
        ready, changed = ready.copy(), False
        del ready[node]
        for other, lag in self.needs.behind[node]:
            if counts[other] == 1:
                ready[other] = max(0.0, end + lag)
                continue
            count, since = partly.get(other) or (counts[other], 0.0)
            since = max(since, end + lag)
            if not changed:
                partly, changed = partly.copy(), True
            if count > 1:
                partly[other] = count - 1, since
            else:
                ready[other] = since
                del partly[other]
        idle += start - free[lane]
        free = (*free[:lane], end, *free[lane + 1 :])
        left = (*left[:lane], left[lane] - self.times[node], *left[lane + 1 :])
        if self.rooms:
            rank = self.ranks[node]
            held = (*held[:rank], held[rank] + self.needs.kept[node], *held[rank + 1 :])
        return _Beginning(bound, idle, played, held, free, left, ready, partly, one, node, start)


def _is_ahead(one: _Beginning, other: _Beginning) -> bool:
    """Return whether each lane is free, and each node may come, as early as in another beginning."""
    if any(mine > its for mine, its in zip(one.free, other.free, strict=True)):
        return False
    soon, mine, parts = min(other.free), one.ready, one.partly
    return not any(mine[node] > its and mine[node] > soon for node, its in other.ready.items()) and not any(
        parts[node][1] > since and parts[node][1] > soon for node, (_, since) in other.partly.items()
    )
