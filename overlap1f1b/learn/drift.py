"""Whether node times leave what a plan was made for: an estimate from the steps that play it, which measure anyway.

a table   of every fourth step, or fewer: by cost key the median over microbatches, of an exchange while it moved
before    the first tables of a plan: what its costs are beside each other's work
now       the last tables; when each of them has left the first ones, costs are scaled by the change
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import log
from statistics import median
from threading import Thread

from overlap1f1b.learn.measure import Links, slowest
from overlap1f1b.learn.peers import Peers
from overlap1f1b.plan import EXCHANGED, CostKey, NodeCosts, Plan, Resource, cost_key
from overlap1f1b.simulation import Timeline
from overlap1f1b.transport.mesh import DIMENSIONS, Mesh

EVERY = 4
"""Steps between two tables, or more: ranks tell each other of fewer steps where these are short."""
TABLES = 3
"""Tables whose median is an estimate."""
LEAVES = 1.5
"""Change of all exchanges, or of all compute, of a rank from which a plan is made anew: noise stays below."""

Table = Mapping[CostKey, float]


class Drift:
    """The node times of the steps of one plan on this rank."""

    def __init__(self) -> None:
        self._noted: int | None = None
        self._before: list[Table] = []
        self._now: deque[Table] = deque(maxlen=TABLES)

    def note(self, step: int, timeline: Timeline) -> bool:
        """Note a step; return whether ranks are to compare their changes now, alike on all that play the plan."""
        if self._noted is not None and step < self._noted + EVERY:
            return False
        self._noted = step
        if len(self._before) < TABLES:
            self._before.append(table_of(timeline))
            return False
        self._now.append(table_of(timeline))
        return len(self._now) == TABLES

    @property
    def changes(self) -> tuple[float, float]:
        """By how much all exchanges, and all compute, take longer than in the first steps: the least of all tables."""
        before = _medians(self._before)
        exchange, compute = (
            min((_sum_over(table, before, exchanged) for table in self._now), key=lambda one: abs(log(one)))
            for exchanged in (True, False)
        )
        return exchange, compute

    def scaled(self, costs: NodeCosts, mesh: Mesh) -> NodeCosts:
        """Return costs with the changes of all ranks, the same on all of them, which must call this."""
        before, now = _medians(self._before), _medians(self._now)
        mine: Links = {key: (now[key] / before[key],) for key in before if before[key] and key in now}
        every = mesh.combined(mine, lambda dimension, tables: slowest(tables, links=dimension in mesh.experts_over))
        by_node = dict(costs.by_node)
        for key, changes in every.items():
            cost = by_node.get(key, 0.0)
            if isinstance(cost, tuple) and len(cost) == len(changes):
                by_node[key] = tuple(one * change for one, change in zip(cost, changes, strict=True))
            elif not isinstance(cost, tuple):
                by_node[key] = cost * max(changes)
        return replace(costs, by_node=by_node)


class Search:
    """A search of plans on the first rank, beside its steps, for costs that have left those of the plan ``before``.

    ``make`` returns the plans, the fastest first, or raises ValueError where none keeps within the limit of memory.
    """

    def __init__(self, make: Callable[[], list[Plan]], costs: NodeCosts, before: Plan, peers: Peers) -> None:
        self.costs, self.before, self._peers = costs, before, peers
        self._made: list[Plan] | None = None
        self._make = make
        self._thread = Thread(target=self._run, name="overlap1f1b-search", daemon=True)
        if not any(map(peers.mesh.rank, DIMENSIONS)):
            self._thread.start()

    def _run(self) -> None:
        try:
            self._made = self._make()
        except Exception:  # whatever it is, the run goes on with its plan
            self._made = []

    @property
    def ended(self) -> bool:
        """Whether the plans are there, the same on all ranks, which must call this."""
        return self._peers.agreed(self._peers.first(self._made is not None))

    @property
    def plans(self) -> list[Plan]:
        """The plans, the same on all ranks, which must call this."""
        return self._peers.agreed(self._peers.first(self._made)) or []


def left(every: Mapping[int, tuple[float, float]]) -> bool:
    """Return whether the changes of any rank have left what its plan was made for.

    >>> left({0: (1.1, 0.95), 1: (1.3, 0.9)}), left({0: (2.0, 1.0)}), left({0: (1.0, 0.6)})
    (False, True, True)
    """
    return any(not 1 / LEAVES <= change <= LEAVES for changes in every.values() for change in changes)


def table_of(timeline: Timeline) -> Table:
    """Return the times of a step's nodes by their cost keys: of an exchange those in which it moved."""
    took: dict[CostKey, list[float]] = {}
    moved = timeline.causes.moved
    for node, start, end in timeline.spans:
        if node.resource is Resource.COMPUTE:
            took.setdefault(cost_key(node), []).append(end - start)
        elif node.op in EXCHANGED:
            took.setdefault(cost_key(node), []).append(moved[node])
    return {key: median(times) for key, times in took.items()}


def _sum_over(table: Table, before: Table, exchanged: bool) -> float:
    """Return the sum of the nodes that are exchanged, or of those that are not, over what it was before."""
    keys = [key for key in before.keys() & table.keys() if (key[0] in EXCHANGED) is exchanged]
    early = sum(before[key] for key in keys)
    return sum(table[key] for key in keys) / early or 1.0 if early else 1.0


def _medians(tables: list[Table] | deque[Table]) -> dict[CostKey, float]:
    keys = set.intersection(*(set(table) for table in tables)) if tables else set()
    return {key: median(table[key] for table in tables) for key in keys}
