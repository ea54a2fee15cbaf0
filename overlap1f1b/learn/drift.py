"""Whether node times leave what a plan was made for: an estimate from the steps that play it, which measure anyway.

table     of every fourth step: by cost key the median over microbatches, of an exchange the time in which it moved
before    the first tables of a plan: what its costs are beside each other's work
now       the last tables; when their median leaves that of the first ones, costs are scaled by the change
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from threading import Thread

from overlap1f1b.learn.measure import Links, slowest
from overlap1f1b.learn.peers import Peers
from overlap1f1b.plan import EXCHANGED, CostKey, NodeCosts, Plan, Resource, cost_key
from overlap1f1b.simulation import Timeline
from overlap1f1b.transport.mesh import DIMENSIONS, Mesh

EVERY = 4
"""Steps between two tables."""
TABLES = 3
"""Tables whose median is an estimate."""
LEAVES = 1.25
"""Change of all exchanges, or of all compute, of a rank from which a plan is made anew: noise stays below."""

Table = Mapping[CostKey, float]


class Drift:
    """The node times of the steps of one plan on this rank."""

    def __init__(self) -> None:
        self._steps = 0
        self._before: list[Table] = []
        self._now: deque[Table] = deque(maxlen=TABLES)

    def note(self, timeline: Timeline) -> bool:
        """Note a step; return whether ranks are to compare their changes now, alike on all that play the plan."""
        self._steps += 1
        if self._steps % EVERY:
            return False
        if len(self._before) < TABLES:
            self._before.append(table_of(timeline))
            return False
        self._now.append(table_of(timeline))
        return len(self._now) == TABLES

    @property
    def changes(self) -> tuple[float, float]:
        """By how much all exchanges, and all compute, take longer than in the first steps."""
        before, now = _medians(self._before), _medians(self._now)
        both = before.keys() & now.keys()
        exchange, compute = ([key for key in both if (key[0] in EXCHANGED) is exchanged] for exchanged in (True, False))
        return tuple(  # type: ignore[return-value]
            sum(now[key] for key in keys) / (sum(before[key] for key in keys) or 1.0) if keys else 1.0
            for keys in (exchange, compute)
        )

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
    """A search of plans on the first rank, beside its steps.

    Args:
        make: Returns the plans, the fastest first, or raises ValueError where none keeps within the limit of memory.
        costs: Those that they are for.
        peers: The ranks that go over to one of them.
    """

    def __init__(self, make: Callable[[], list[Plan]], costs: NodeCosts, peers: Peers) -> None:
        self.costs, self._peers = costs, peers
        self._made: list[Plan] | None = None
        self._make = make
        self._thread = Thread(target=self._run, name="overlap1f1b-search", daemon=True)
        if not any(map(peers.mesh.rank, DIMENSIONS)):
            self._thread.start()

    def _run(self) -> None:
        try:
            self._made = self._make()
        except ValueError:
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

    >>> left({0: (1.1, 0.95), 1: (1.2, 0.9)}), left({0: (2.0, 1.0)}), left({0: (1.0, 0.7)})
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


def _medians(tables: list[Table] | deque[Table]) -> dict[CostKey, float]:
    keys = set.intersection(*(set(table) for table in tables)) if tables else set()
    return {key: median(table[key] for table in tables) for key in keys}
