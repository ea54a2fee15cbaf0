"""Whether node times leave what a plan was made for: an estimate from the steps that play it, which measure anyway.

a table   of every second step, or fewer: by cost key the median over microbatches, of an exchange while it moved
before    the first tables of a plan: what its costs are beside each other's work
now       the last tables; when each of them has left the first ones, costs are scaled by the change

Then a plan for these costs is searched beside the steps. It is tried if at each of the next tables it gains more than
going over to it costs; the plan before is tried beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import log
from statistics import median
from threading import Thread

from overlap1f1b.learn.measure import LinkCosts, slowest
from overlap1f1b.learn.peers import Peers
from overlap1f1b.plan import EXCHANGED, CostKey, NodeCosts, Plan, Resource, cost_key, play_ranks
from overlap1f1b.simulation import Timeline
from overlap1f1b.transport.mesh import Mesh

EVERY = 2
"""Steps between two tables, or more: ranks pool fewer steps where these are short."""
TABLES = 3
"""Tables whose median is an estimate."""
LEAVES = 1.3
"""Change of all exchanges, or of all compute, of a rank from which a plan is searched: noise stays below."""
WINDOWS = 3
"""Tables behind a search at each of which the plan that it found must gain."""
PAYS = 100
"""Steps within which a plan must gain what going over to it costs: a step more for each plan that is compared."""

Table = Mapping[CostKey, float]


class Drift:
    """The node times of the steps of one plan on this rank."""

    def __init__(self) -> None:
        self._noted: int | None = None
        self._before: list[Table] = []
        self._now: deque[Table] = deque(maxlen=TABLES)
        self._kept = (1.0, 1.0)  # changes for which the plan was the best still

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

    @property
    def left(self) -> bool:
        """Whether the changes of this rank have left what its plan was made for, or was found good for."""
        pairs = zip(self.changes, self._kept, strict=True)
        return any(not 1 / LEAVES <= change / kept <= LEAVES for change, kept in pairs)

    def keep(self) -> None:
        """Note that the plan is the best for the present changes, too."""
        if self._now:
            self._kept = self.changes

    def scaled(self, costs: NodeCosts, mesh: Mesh) -> NodeCosts:
        """Return costs with the changes of all ranks, the same on all of them, which must call this."""
        before, now = _medians(self._before), _medians(self._now)
        mine: LinkCosts = {key: (now[key] / before[key],) for key in before if before[key] and key in now}
        by_node = dict(costs.by_node)
        for key, changes in slowest(mine, mesh).items():
            cost = by_node.get(key, 0.0)
            if isinstance(cost, tuple) and len(cost) == len(changes):
                by_node[key] = tuple(one * change for one, change in zip(cost, changes, strict=True))
            elif not isinstance(cost, tuple):
                by_node[key] = cost * max(changes)
        return replace(costs, by_node=by_node)


class _EndedError(Exception):
    """Nobody wants the plans any more."""


class Search:
    """A search of plans on the first rank, beside its steps, for costs that have left those of the plan ``before``.

    ``make`` returns the plans, the fastest first, or raises ValueError where none keeps within the limit of memory. It
    calls its argument now and then, which ends it by an error. ``plans`` are None until they are :meth:`found`;
    ``windows`` counts the tables at which they have gained; ``changes`` are those of node times then, by rank.
    """

    def __init__(
        self, make: Callable[[Callable[[float], None]], list[Plan]], costs: NodeCosts, before: Plan, peers: Peers
    ) -> None:
        self.costs, self.before, self._peers = costs, before, peers
        self.plans: list[Plan] | None = None
        self.windows, self._wanted = 0, True
        self.changes: Mapping[int, tuple[float, float]] = {}
        self._made: list[Plan] | None = None
        self._make = make
        self._thread = Thread(target=self._run, name="overlap1f1b-search", daemon=True)
        if peers.mesh.is_first:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._made = self._make(self._go_on)
        except Exception:  # whatever it is, the run goes on with its plan
            self._made = []

    def _go_on(self, _: float) -> None:
        if not self._wanted:
            raise _EndedError

    def found(self) -> bool:
        """Return whether plans are there. All ranks must call this; until then once a step."""
        if self.plans is None and self._peers.agreed(self._peers.first(self._made is not None)):
            self.plans = self._peers.agreed(self._peers.first(self._made)) or [self.before]
        return self.plans is not None

    def gains(self, costs: NodeCosts, *, tried: int, counts_block: bool) -> bool:
        """Return whether the fastest plan gains more than it costs to try so many, by costs that all ranks have."""
        assert self.plans is not None
        before, after = (
            max(
                span.end
                for rank in play_ranks(plan.ranks, plan.program.placement, costs, counts_block=counts_block)
                for span in rank
            )
            for plan in (self.before, self.plans[0])
        )
        return PAYS * (before - after) > (1 + tried) * before

    def end(self) -> None:
        """End the thread, and wait for it, no longer than for another rank."""
        self._wanted = False
        if self._thread.is_alive():
            self._thread.join(self._peers.mesh.failures.limit.total_seconds())


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
