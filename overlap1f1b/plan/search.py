"""Search for an order of actions that is made for the costs, over all ranks of a pipeline.

Contract: :func:`found_orders` returns plans within the limits of live activations, the fastest first; none of the fixed
schedules that keep them, and were compiled in the time, is faster. Where the time suffices, the result depends on the
arguments alone.

A try is one set of priorities, which a list scheduler of all ranks plays::

    1. play the orders in which the fixed schedules begin their actions
    2. draw priorities at random, for SAMPLED of the nodes that the search may schedule
    3. change one of the KEPT best tries, until those nodes are used up or a step is NEAR the bound of all orders
    4. make a plan of the best try, with a program of its actions
    5. compile the fixed schedules that may be faster by their bounds, those first whose orders were played fastest

Tries get TRIES of the time at most. Where it ends, what was found so far is the result.
"""

import time
from bisect import insort, insort_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf
from operator import itemgetter
from random import Random
from types import MappingProxyType
from typing import Any

from overlap1f1b.plan.bounds import bound, pipeline_bound
from overlap1f1b.plan.budget import Budget
from overlap1f1b.plan.chains import Chains, Shapes
from overlap1f1b.plan.clock import Key, makespan, play_ranks
from overlap1f1b.plan.compiler import fastest, improved
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import Node, Resource
from overlap1f1b.plan.orders import receiving_in_order, with_gathers, with_reductions
from overlap1f1b.plan.plan import Plan, action_of, most_open
from overlap1f1b.plan.precedence import Precedence
from overlap1f1b.plan.priorities import Priorities, Tasks, schedule_by_priorities
from overlap1f1b.plan.scheduler import Policy, schedule_ranks
from overlap1f1b.schedule import (
    AUTO,
    SEARCH_SECONDS,
    Action,
    Kind,
    Placement,
    Program,
    build_schedule,
    check_search,
    variants,
)
from overlap1f1b.schedule.values import check_size, checked

NODES_PER_SECOND = 50_000
"""Nodes that tries schedule for each second of a search: a processor schedules about 150,000."""
TRIES = 0.6
"""Most of the time that tries may take, where a processor is slower than that."""
LEAST_SECONDS = 1.0
"""Time that any search may take."""
COMPILED = 30
"""A fixed schedule takes at most so many times as long to compile as to play its order once."""
COMPILED_PER_SECOND = 200_000
"""Nodes of the searches of a fixed schedule for each second, and of the improvement of what was found."""
LEAST_TRIES = 15
"""Tries of a search, however large the step."""
MOST_STEPS = 1500
"""Size of a search in whole steps, however small these are."""
NEAR = 1.001
"""A search ends when its best step is so near the bound of all orders."""
SAMPLED = 1 / 3
"""Share of the nodes for tries that are drawn at random; the others change the best ones."""
OVERLAP = 3
"""Open actions of the fixed schedules that are tried."""

KEPT = 8
"""Best tries that are kept and changed."""
LIKE = 8
"""Fixed schedules whose orders are tried first."""
SPREAD = 1.03
"""A random try is given up when it is so much slower than the best."""

SEED = 0
_Try = tuple[float, Priorities]  # with its time
_FIRST = ((0.0, 0.0), (2.0, 0.0), (0.0, 0.8))
_SETTINGS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "lookahead": (0.0, 0.0, 0.3, 0.6, 1.0),
        "patience": (0.0, 0.2, 0.4, 0.6, 0.8),
        "deferred": (0, 1, 2),
    }
)
"""Tried values of settings; see :class:`~overlap1f1b.plan.priorities.Priorities`. A unit of a key is a microbatch."""


@checked
def found_orders(
    placement: Placement,
    microbatches: int,
    shape: Shapes,
    costs: NodeCosts,
    *,
    peak_activations: float | None = None,
    seconds: float = SEARCH_SECONDS,
    counts_block: bool = False,
    timed: bool = True,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Plan]:
    """Return the plans that a search has compared, the fastest first, each with a program made for the costs.

    The search plays a list scheduler of all ranks with priorities of the actions and limits of live activations: first
    with the priorities of fixed schedules, then with random ones, then with changes of the best. It is never slower
    than the fixed schedules of the same placement within the same limit that it has the time to compile, with up to
    ``OVERLAP`` open actions: if one of them is faster, its plan is the first.

    >>> from overlap1f1b.plan import BlockShape
    >>> costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5.25)
    >>> plan = found_orders(Placement.v(2), 4, (BlockShape(expert_calls=1),), costs, peak_activations=3, seconds=0.1)[0]
    >>> plan.program.name, plan.program.peak_activations
    ('auto', (6, 6))

    Args:
        placement: Rank of each stage, with one pipe: a loop or a V, with any number of chunks.
        microbatches: Microbatches of the step.
        shape: Blocks of every stage, or a sequence with the blocks of each stage.
        costs: Costs of the nodes.
        peak_activations: Limit of live activations on any rank, from the forward to the end of the input gradient; the
            unit is a rank's whole share of the model for one microbatch. By default twice the number of ranks, at
            least 3.
        seconds: Processor time of the search, at least ``LEAST_SECONDS``. Tries schedule ``NODES_PER_SECOND`` nodes
            for each second, in at least ``LEAST_TRIES`` tries, and at most the nodes of ``MOST_STEPS`` steps: where
            that, and compiling the fixed schedules, ends in the time, the result does not depend on the machine.
        counts_block: Whether the host waits for counts, as on a GPU.
        timed: Whether the clock ends the search. Without, several ranks that search find the same, whatever it takes.
        progress: Called with the share of the search that is done: a half with tries, a half with fixed schedules.

    Raises:
        ValueError: The placement has two pipes, no order can keep the limit, or a size is out of range.
    """
    check_size("microbatches", microbatches)
    limits = check_search(placement, peak_activations, seconds)
    chains = Chains(placement, shape)
    limits = [min(limit, len(placement.places(rank)) * microbatches) for rank, limit in enumerate(limits)]
    limit = max(seconds, LEAST_SECONDS) if timed else inf
    search = _Search(_Draws(placement, microbatches, limits), chains, costs, counts_block, progress, limit)
    found = search.best(int(seconds * NODES_PER_SECOND))
    return sorted((found, *search.fixed(found.predicted)), key=lambda plan: plan.predicted)


class _Draws:
    """Draws priorities at random, and changes them."""

    def __init__(self, placement: Placement, microbatches: int, limits: Sequence[int]) -> None:
        self.placement, self.microbatches, self.limits = placement, microbatches, limits
        self.most = [min(limits[rank], microbatches) for rank in placement.pipes[0]]  # live ones of every stage
        self.random = Random(SEED)

    def regular(self, later: float, slope: float, **settings: Any) -> Priorities:
        """Return a try whose forwards come ``later``, with ``slope`` between a microbatch's begin and its end."""
        stages = self.placement.stages
        usual: dict[str, Any] = {"caps": self.most, "deferred": 2, "patience": 0.4}
        keys = {
            (0, stage, microbatch, kind): slope * position / (2 * stages) + late + microbatch
            for stage in range(stages)
            for kind, position, late in ((Kind.F, stage, later), (Kind.I, 2 * stages - 1 - stage, 0.0))
            for microbatch in range(self.microbatches)
        }
        return Priorities(keys, self.limits, **usual | settings)

    def drawn(self, number: int) -> Priorities:
        """Return a random try; the first ones are microbatch first, backward first, and by distance from the start."""
        draw = self.random
        span = float(min(self.microbatches, 4 * self.placement.ranks))
        if number < len(_FIRST):
            later, slope = _FIRST[number]
            return self.regular(later * span, slope * span)
        caps = [draw.choice((limit, max(1, int(limit * draw.uniform(0.3, 1.0))))) for limit in self.most]
        return self.regular(
            draw.choice((0.0, 0.0, draw.uniform(-0.5, 0.5) * span)),
            draw.choice((0.0, draw.uniform(-1.0, 1.0), draw.uniform(0.2, 1.2), draw.uniform(0.2, 1.2))) * span,
            caps=caps if draw.random() < 0.5 else self.most,
            **{name: draw.choice(values) for name, values in _SETTINGS.items()},
        )

    def changed(self, tried: Priorities) -> Priorities:
        """Return a try with one random change: of a setting, of the keys of whole stages, or of single keys."""
        draw, stages = self.random, self.placement.stages
        what = draw.random()
        if what < 0.35:
            return self._changed_setting(tried)
        keys = dict(tried.keys)
        if what < 0.7:
            for _ in range(draw.choice((1, 1, 2, 3))):
                kind, stage = draw.choice((Kind.F, Kind.I)), draw.randrange(stages)
                later = draw.gauss(0, draw.choice((0.5, 1.0, 2.0)))
                for microbatch in range(self.microbatches):
                    keys[0, stage, microbatch, kind] += later
            return tried._replace(keys=keys)
        around, width = draw.randrange(self.microbatches), draw.choice((0.5, 1.0, 2.0))
        for _ in range(draw.choice((1, 3, 10, 30))):
            microbatch = min(self.microbatches - 1, max(0, int(draw.gauss(around, 2))))
            key = 0, draw.randrange(stages), microbatch, draw.choice((Kind.F, Kind.I))
            keys[key] += draw.gauss(0, width)
        return tried._replace(keys=keys)

    def _changed_setting(self, tried: Priorities) -> Priorities:
        """Return the priorities with another setting, slope, or cap of a stage."""
        draw = self.random
        what = draw.choice(("later", "slope", *_SETTINGS, "caps", "caps", "caps"))
        if what in _SETTINGS:
            changed: dict[str, Any] = {what: draw.choice(_SETTINGS[what])}
            return tried._replace(**changed)
        if what != "caps":
            amount = draw.gauss(0, 1 if what == "later" else self.microbatches / 8)
            more = self.regular(amount, 0.0) if what == "later" else self.regular(0.0, amount)
            return tried._replace(keys={key: at + more.keys[key] - key[2] for key, at in tried.keys.items()})
        caps, stage = list(tried.caps), draw.randrange(self.placement.stages)
        caps[stage] = max(1, min(self.most[stage], caps[stage] + draw.choice((-2, -1, 1, 2))))
        return tried._replace(caps=caps)


class _Search:
    """One search over the tries of ``draws``."""

    def __init__(
        self,
        draws: _Draws,
        chains: Chains,
        costs: NodeCosts,
        counts_block: bool,
        progress: Callable[[float], None],
        seconds: float,
    ) -> None:
        self.draws, self.chains, self.costs = draws, chains, costs
        self.counts_block, self.progress = counts_block, progress
        self.begun, self.seconds = time.thread_time(), seconds
        self.orders: dict[Program, tuple[float, float]] = {}  # time of a fixed schedule's order, and of playing it here
        self.free = replace(costs, launch={})
        self._schedule = partial(schedule_by_priorities, draws.microbatches, Tasks(chains, self.free))
        self._makespan = partial(makespan, placement=chains.placement, costs=costs, counts_block=counts_block)
        self.programs = self._programs()
        self.scheduled = 0  # nodes so far
        every = (Action(kind, stage, 0) for stage in range(chains.placement.stages) for kind in (Kind.F, Kind.I))
        self.size = draws.microbatches * sum(len(chains.of(action)) for action in every)

    def _left(self, share: float, *, after: float = 0.0) -> bool:
        """Whether a share of the time is not over yet, and will not be after some seconds."""
        return time.thread_time() + after < self.begun + share * self.seconds

    def _programs(self) -> list[tuple[float, Program]]:
        """Return the fixed schedules of the placement, with their bounds, smallest first."""
        placement, programs = self.chains.placement, []
        for name, options in variants(chunks=(placement.stages // placement.ranks,)):
            try:
                program = build_schedule(name, ranks=placement.ranks, microbatches=self.draws.microbatches, **options)
            except ValueError:  # impossible for these sizes
                continue
            if program.placement == placement:
                programs.append((bound(program, self.chains.shapes, self.free, OVERLAP), program))
        return sorted(programs, key=itemgetter(0))

    def best(self, nodes: int) -> Plan:
        """Return the plan of the best try of a search that schedules about so many nodes."""
        draws, placement, first = self.draws, self.chains.placement, itemgetter(0)
        whole = min(nodes, MOST_STEPS * self.size)
        near = NEAR * pipeline_bound(placement, draws.microbatches, self.chains.shapes, self.free)
        alike = self.programs[:LIKE]
        pool: list[_Try] = [(inf, draws.drawn(len(_FIRST) - 1))]  # the best tries, the fastest first
        played = 0

        def play(priorities: Priorities, limit: float) -> _Try:
            nonlocal played
            played += 1
            end = self._play(priorities, limit)
            self.progress(min(played / (LEAST_TRIES + len(alike)), self.scheduled / max(1, whole), 1.0) / 2)
            return end, priorities

        for _, program in alike:
            if self._left(TRIES):
                insort(pool, play(self._like(program), pool[0][0] * SPREAD), key=first)
        tries = 0
        while pool[0][0] > near and (tries < LEAST_TRIES or self.scheduled < whole) and self._left(TRIES):
            if tries <= LEAST_TRIES // 2 or self.scheduled < whole * SAMPLED:
                insort(pool, play(draws.drawn(tries), pool[0][0] * SPREAD), key=first)
            else:
                del pool[KEPT:]
                start = pool[min(draws.random.randrange(len(pool)), draws.random.randrange(len(pool)))]
                changed = play(draws.changed(start[1]), pool[-1][0])
                if changed[0] <= pool[-1][0]:
                    if changed[0] <= start[0]:
                        pool.remove(start)
                    insort_left(pool, changed, key=first)
            tries += 1
        found = self._plan(pool[0][1])
        if not self._left(TRIES):
            return found
        return improved(found, self.costs, counts_block=self.counts_block, budget=self._budget())

    def _budget(self) -> Budget:
        """Return what one compilation may schedule: as always, or what it has the time for."""
        budget = Budget(progress=lambda share: self.progress((1 + share) / 2))
        if self.seconds < inf:
            budget.left = min(budget.left, int(self.seconds * COMPILED_PER_SECOND / 4))
        return budget

    def fixed(self, best: float) -> Iterator[Plan]:
        """Yield plans of the fixed schedules that may be faster than the best so far."""
        options: dict[str, Any] = {"counts_block": self.counts_block}
        unplayed = inf, max((took for _, took in self.orders.values()), default=0.0)
        played = [(*self.orders.get(program, unplayed), least, program) for least, program in self.programs]
        for _, took, least, program in sorted(played, key=itemgetter(0, 2)):
            budget = self._budget()
            if least >= best or not self._left(
                1.1, after=took * (budget.left / self.size if program.open else COMPILED)
            ):
                continue
            plan = fastest(program, self.chains.shapes, self.costs, OVERLAP, budget=budget, **options)[0]
            if all(plan.live(rank) <= limit for rank, limit in enumerate(self.draws.limits)):
                best = min(best, plan.predicted)
                yield plan

    def _like(self, program: Program) -> Priorities:
        """Return a try with the order in which a fixed schedule begins its actions."""
        since = time.thread_time()
        ranks, _ = schedule_ranks(program, self.chains, self.free, Policy(OVERLAP))
        self.scheduled += sum(map(len, ranks))
        begins, end = dict[Key, float](), 0.0
        for span in chain.from_iterable(play_ranks(ranks, self.chains.placement, self.free)):
            end = max(end, span.end)
            if _begins(span.node):
                begins.setdefault(span.node.chain, span.start)
        self.orders[program] = end, time.thread_time() - since
        distance = max(begins.values()) / (self.draws.microbatches + self.chains.placement.ranks) or 1.0
        keys = {key: begin / distance for key, begin in begins.items()}
        return self.draws.regular(0.0, 0.0)._replace(keys=keys)

    def _play(self, priorities: Priorities, limit: float) -> float:
        """Return the time of a try; infinite beyond the limit."""
        ranks, end = self._schedule(priorities, limit * (1 + 1e-9))
        self.scheduled += sum(map(len, ranks))
        parameters = any(block.reduced or block.gathered for stage in self.chains.shapes for block in stage)
        # The times are played again only where they differ from the scheduler's.
        if end < inf and (self.costs.launch or self.costs.shared_links or parameters):
            return self._makespan(_with_parameters(ranks, self.chains))
        return end

    def _plan(self, priorities: Priorities) -> Plan:
        ranks, _ = self._schedule(priorities)
        if not self.counts_block:  # else a dispatch that waits for its counts would hold up the host
            needs = Precedence(self.chains, self.free, ranks)
            ranks = needs.issued(needs.starts(ranks), counts_block=False)
        plan = plan_of(ranks, self.chains, self.draws.microbatches)
        return replace(plan, predicted=self._makespan(plan.ranks), peak_bytes=self.costs.peak_bytes(plan.ranks))


def plan_of(ranks: Sequence[Sequence[Node]], chains: Chains, microbatches: int) -> Plan:
    """Return the plan of nodes that are scheduled freely, with the program of their actions in order of their begin."""
    ranks = _with_parameters(ranks, chains)
    begun = [list(filter(_begins, nodes)) for nodes in ranks]
    of = partial(action_of, backward=Kind.B)
    rows = tuple(tuple(dict.fromkeys(map(of, nodes))) for nodes in begun)
    program = Program(AUTO, microbatches, rows, (0,) * len(rows), chains.placement)
    overlap = max(most_open(nodes, of) for nodes in begun)
    plan = Plan(program, overlap, "found", chains.shapes, receiving_in_order(ranks, chains), inf)
    return replace(plan, program=replace(program, peak_activations=tuple(map(plan.live, range(len(ranks))))))


def _with_parameters(ranks: Sequence[Sequence[Node]], chains: Chains) -> list[list[Node]]:
    return [with_gathers(with_reductions(nodes, chains), chains) for nodes in ranks]


def _begins(node: Node) -> bool:
    return node.kind is not Kind.W and node.resource is Resource.COMPUTE
