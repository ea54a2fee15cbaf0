"""The compiler: from a program to the fastest known plan, and of those as fast to the one that holds the least.

::

    1. the fixed orders, and one of list scheduling for every number of open actions and every policy
    2. where the schedule leaves the order open, and the budget lasts: a faster one, by a beam and by an improvement
    3. with that, nearly as fast ones that hold less: by beams in less and less room, and by an improvement

All of them use one budget of scheduled nodes, so the same arguments give the same plan. Large steps end at 1.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter

from overlap1f1b.plan.beam import KEPT, Beam
from overlap1f1b.plan.budget import Budget
from overlap1f1b.plan.chains import Chains, Shapes
from overlap1f1b.plan.clock import makespan
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.justification import justified, lightened
from overlap1f1b.plan.node import OF_PARAMETERS, Node, Resource
from overlap1f1b.plan.offload import leaving
from overlap1f1b.plan.orders import pairs, receiving_in_order, serial, with_gathers, with_reductions
from overlap1f1b.plan.plan import SEARCHED_FROM, Overlap, Plan, parse_overlap
from overlap1f1b.plan.precedence import Precedence
from overlap1f1b.plan.scheduler import Policy, schedule_ranks
from overlap1f1b.schedule import Program
from overlap1f1b.schedule.values import checked

PATIENCES = (0.0, 0.2, 0.4, 0.6)
"""Tried values of ``Policy.patience``: how long a wait must be, relative to a weight gradient, to issue it there."""

DEFERRED = (1, 2)
"""Tried values of ``Policy.deferred``: microbatches beyond the live ones that wait for weight gradients alone."""

GATHERED = (2.0, 3.0, 4.0, math.inf)
"""Tried numbers of blocks whose sharded parameters are there at once; without a bound each is gathered once a step."""

ROUNDING = 1e-9
"""Times that differ by less are equal."""

NEAR = 1.1
"""An order whose first policy takes more than this multiple of the fastest is tried with no other."""

WIDTH, LEAST_WIDTH = 100, 8
"""Most beginnings that go on side by side in a beam, and the fewest for which it is worth it."""

BEAMS, IMPROVED = 0.5, 0.2
"""Most shares of the budget for beams and for the improvement; policies may use all of it."""

TRIED = ((0.0, True), (0.05, False))
"""Tried settings of a beam: the weight of idle time, and whether few microbatches are alive: no more than two beyond
those that the pipeline needs."""

AGAIN = (0.15, 0.3, 0.5, 0.7)
"""Shares of the best step so far behind which beams begin once more."""

NO_SLOWER = 1.005
"""Of orders that take at most this multiple of the fastest, the one that holds the fewest bytes is played."""

ROOMS, LIGHTER = 8, 0.25
"""Rooms in which a beam looks for a lighter order, from that of one microbatch to what the lightest so far holds; and
the share of what is left of the budget that a beam may use: where there is too little room it ends early."""

RETRIED = 6
"""One of so many policies, the best, is tried once more for a host whose launches cost time."""

_time = attrgetter("predicted")


@checked
def compile(program: Program, shape: Shapes, costs: NodeCosts, overlap: Overlap, *, counts_block: bool = False) -> Plan:
    """Return the plan of a program: the order of every node on every rank.

    For a number k, the compiler builds the fixed orders and an order for every number of open actions up to k, plays
    each with the costs, and keeps the fastest: list scheduling is greedy, and a smaller k is sometimes better. Each
    number is tried with all of ``PATIENCES`` and ``DEFERRED``; for large programs with the first of each. If the host
    waits for counts and launches cost time, the best are tried once more, with these waits behind queued work.

    If the schedule leaves the order open, ``SEARCHED_FROM`` open actions or more let memory alone limit it: a beam
    search and an improvement look for a faster order, and for as fast ones that hold less. If costs have bytes, of
    orders that take at most ``NO_SLOWER`` times the fastest, and no longer than what list scheduling found, that is
    returned which holds the least; else of the fastest. All of this has one :class:`Budget` of nodes, so steps of many
    nodes are left as they are.

    >>> from overlap1f1b.plan import BlockShape
    >>> from overlap1f1b.schedule import build_schedule
    >>> program = build_schedule("combined_1f1b", microbatches=8)
    >>> costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5)
    >>> [compile(program, (BlockShape(expert_calls=1),) * 4, costs, k).predicted for k in ("serial", "pairs", 3)]
    [1312.0, 880.0, 699.0]

    Args:
        program: A checked program, on any number of ranks.
        shape: Blocks of every stage, or a sequence with the blocks of each stage.
        costs: Costs of the nodes.
        overlap: ``"serial"``, ``"pairs"`` or k.
        counts_block: Whether the host waits for counts, as on a GPU.

    Raises:
        ValueError: The program breaks a rule, the overlap is unknown, the shapes are of another number of stages, a
            stage has no blocks, or the costs are of the wrong kind.
    """
    return fastest(program, shape, costs, overlap, counts_block=counts_block)[0]


def fastest(
    program: Program,
    shape: Shapes,
    costs: NodeCosts,
    overlap: Overlap,
    *,
    counts_block: bool = False,
    rooms: Sequence[float] = (),
    every: bool = True,
    progress: Callable[[float], None] = lambda _: None,
    budget: Budget | None = None,
) -> list[Plan]:
    """Return the fastest plan of each order that :func:`compile` tries, the one that it returns first.

    ``rooms`` are the bytes that each pipeline rank may hold beyond those before the step: plans that would hold more
    are left out. Where blocks' activations may leave to host memory, ``every`` says whether all of them do, or those
    that have to. ``progress`` is called between two tries and in searches, and may end them by an error. The ``budget``
    of all searches is by default that of :func:`compile`.
    """
    overlap = parse_overlap(overlap)
    program.check()
    budget = Budget(progress=progress) if budget is None else budget
    tries = _Tries(program, Chains(program.placement, shape), costs, overlap, counts_block, rooms, budget)
    tries.schedule(progress)
    if program.open and isinstance(overlap, int) and overlap >= SEARCHED_FROM:
        tries.search()
    if tries.leaves:
        for plan in leaving(tries.played, costs, rooms, every=every, counts_block=counts_block):
            tries.keep(plan)
    return [replace(plan, ranks=receiving_in_order(plan.ranks, tries.chains)) for plan in tries.ordered()]


def improved(plan: Plan, costs: NodeCosts, *, counts_block: bool, budget: Budget) -> Plan:
    """Return the plan of an order that leaves no less room for others, or a better one within its limits of memory."""
    chains = Chains(plan.program.placement, plan.shapes)
    tries = _Tries(plan.program, chains, costs, plan.overlap, counts_block, (), budget)
    ranks = [[node for node in nodes if node.op not in OF_PARAMETERS] for nodes in plan.ranks]
    tries.listed = makespan(ranks, plan.program.placement, tries.free), ranks
    tries.best[plan.order], tries.scheduled = plan, plan.predicted
    tries.search()
    return tries.ordered()[0]


class _Tries:
    """The orders of one plan: ``best`` has the fastest plan of each name that keeps within the rooms."""

    def __init__(
        self,
        program: Program,
        chains: Chains,
        costs: NodeCosts,
        overlap: Overlap,
        counts_block: bool,
        rooms: Sequence[float],
        budget: Budget,
    ) -> None:
        self.program, self.chains, self.costs, self.overlap = program, chains, costs, overlap
        self.counts_block, self.rooms, self.budget = counts_block, rooms, budget
        self.free = replace(costs, launch={})
        self.slower = NO_SLOWER if costs.bytes else 1.0  # without bytes less is only counted
        self.serial = [list(serial(program.actions(rank), chains)) for rank in range(len(program.ranks))]
        self.best: dict[str, Plan] = {}
        self.played: list[Plan] = []
        """All plans whose activations are yet to leave to host memory."""
        self.scheduled = math.inf
        """Time of the fastest plan before a search; no slower one is played."""
        self.listed: tuple[float, list[list[Node]]] = math.inf, []
        """The fastest order of list scheduling, and its time for a host that is always ahead."""
        blocks = [block for blocks in chains.shapes for block in blocks]
        self.gathered = GATHERED if any(block.gathered for block in blocks) else GATHERED[-1:]
        self.leaves = any(block.offload for block in blocks)
        added = self.leaves or any(block.gathered or block.reduced for block in blocks)
        self.replayed = bool(costs.launch or costs.shared_links or added)
        """Whether the time of a schedule is not the plan's."""

    def add(self, order: str, candidate: Sequence[list[Node]], end: float | None = None) -> Plan:
        """Play an order that may have taken until an end as it was scheduled; return its fastest plan."""
        ranks, found = [with_reductions(rank, self.chains) for rank in candidate], list[Plan]()
        for at_once in self.gathered:
            nodes = tuple(tuple(with_gathers(rank, self.chains, at_once)) for rank in ranks)
            if self.costs.launch:  # then a receive takes time of the host, so its place counts
                nodes = receiving_in_order(nodes, self.chains)
            if end is None or self.replayed:
                end = makespan(nodes, self.program.placement, self.costs, counts_block=self.counts_block)
            peak = self.costs.peak_bytes(nodes)
            plan = Plan(self.program, self.overlap, order, self.chains.shapes, nodes, end, peak)
            found.append(plan)
            if not self.leaves:
                self.keep(plan)
        self.played += found if self.leaves else []
        return min(found, key=_time)

    def keep(self, plan: Plan) -> None:
        """Keep a plan that is the fastest of its name."""
        best = self.best.get(plan.order)
        if plan.fits(self.rooms) and (best is None or plan.predicted < best.predicted):
            self.best[plan.order] = plan

    def ordered(self) -> list[Plan]:
        """Return the plans, the fastest first, but for the one that is played: of those as fast it holds the least."""
        ordered = sorted(self.best.values(), key=_time)  # of equals the simplest
        if self.scheduled < math.inf:
            limit = self.limit(ordered)
            first = min((plan for plan in ordered if plan.predicted <= limit), key=Plan.memory)
            ordered = [first, *(plan for plan in ordered if plan is not first)]
        return ordered

    def limit(self, plans: Iterable[Plan]) -> float:
        """Return the time of a plan that is as fast as the fastest of several."""
        fastest = min(map(_time, plans))
        return max(fastest, min(self.slower * fastest, self.scheduled))

    def schedule(self, progress: Callable[[float], None]) -> None:
        """Add the fixed orders, and those of list scheduling."""
        program, chains, overlap, rows = self.program, self.chains, self.overlap, range(len(self.program.ranks))
        if overlap != "pairs":
            self.add("serial", self.serial)
        if overlap != "serial":
            self.add("pairs", [list(pairs(program.ranks[rank], chains)) for rank in rows])
        if not isinstance(overlap, int):
            return
        loads = [sum(self.costs(node) for node in nodes if node.resource is Resource.COMPUTE) for nodes in self.serial]
        ends: list[tuple[float, Policy]] = []
        most = min(overlap, max(len(list(program.actions(rank))) for rank in rows))  # more actions cannot be open
        for number, (deferred, patience) in enumerate(product(DEFERRED, PATIENCES)):
            for k in range(1, most + 1):
                if number and self.budget.left <= 0:
                    break
                progress(0.0)
                order, policy, limit = f"k={k}", Policy(k, self.counts_block, deferred, patience), math.inf
                if not self.replayed and order in self.best:  # of each name the fastest is kept: another may give up
                    limit = self.best[order].predicted
                    if limit > NEAR * min(map(_time, self.best.values())):
                        continue
                ranks, end = schedule_ranks(program, chains, self.free, policy, limit * (1 + ROUNDING), loads)
                self.budget.spend(sum(map(len, ranks)))
                if end < self.listed[0] * (1 - ROUNDING):
                    self.listed = end, ranks
                if end < math.inf:
                    ends.append((self.add(order, ranks, end).predicted, policy))
        if self.counts_block and self.costs.launch:
            for _, policy in sorted(ends)[: -(-len(ends) // RETRIED)]:
                self.add(f"k={policy.open_actions}", schedule_ranks(program, chains, self.costs, policy)[0])
        self.scheduled = min(map(_time, self.best.values()), default=math.inf)

    def search(self) -> None:
        """Add a faster order than that of list scheduling, if one is found, and as fast ones that hold less."""
        program, chains, budget, rows = self.program, self.chains, self.budget, range(len(self.program.ranks))
        end, ranks = self.listed
        size, late, peaks = KEPT * sum(map(len, ranks)), max(DEFERRED), program.peak_activations
        runs = len(TRIED) * (1 + sum(1 - share for share in AGAIN))
        width = min(WIDTH, int(budget.share(BEAMS) / (size * runs)))
        if width < LEAST_WIDTH:
            return
        stages = [len(program.placement.places(rank)) for rank in rows]
        few = [min(peak, stages[rank] * (len(rows) - rank + 2)) for rank, peak in enumerate(peaks)]
        needs = Precedence(chains, self.free, ranks, peaks, late)
        fewer = needs if few == list(peaks) else Precedence(chains, self.free, ranks, few, late)
        best = end, needs.starts(ranks)
        for share, (idle, lives_few) in product((0.0, *AGAIN), TRIED):
            if best[0] > needs.bound * (1 + 1e-9):
                begun = needs.in_order(best[1])[: int(share * len(best[1]))]
                beam = Beam(fewer if lives_few and not begun else needs)
                found = beam.run(width, idle, best[0] * (1 - 1e-9), budget, [(node, best[1][node]) for node in begun])
                best = min(best, found)
        best = min(best, justified(needs, best[1], budget, budget.share(IMPROVED)))
        if best[0] < end:
            self.add(f"k={self.overlap}", needs.issued(best[1], counts_block=self.counts_block))
        self.lighten(needs)

    def lighten(self, needs: Precedence) -> None:
        """Add orders that hold less than the lightest of those that are as fast, and are as fast, too."""
        plans = self.played or list(self.best.values())
        if not plans:  # none keeps within the rooms
            return
        fast = self.limit(plans) * (1 + ROUNDING)
        light = min((plan for plan in plans if plan.predicted <= fast), key=Plan.memory)
        ranks = [[node for node in nodes if node.op not in OF_PARAMETERS] for nodes in light.ranks]
        starts = needs.starts(ranks, counts_block=self.counts_block)
        limit = max(map(sum, zip(starts, needs.times, strict=True))) * fast / (light.predicted or 1.0)
        alone = [[node for node in nodes if not node.microbatch] for nodes in self.serial]
        least, most = max(self.costs.peak_bytes(alone), default=1.0), light.memory()
        rooms = [least + share / ROOMS * (most - least) for share in range(ROOMS + 1)]
        for room in rooms if self.costs.bytes else dict.fromkeys(map(math.floor, rooms)):
            width = min(WIDTH, int(LIGHTER * self.budget.left / (KEPT * len(needs.nodes))))
            if width < LEAST_WIDTH:
                break
            end, found = Beam(needs, [room] * len(alone)).run(width, 0.0, limit, self.budget)
            if end <= limit:
                starts = found
                self.add(f"k={self.overlap}", needs.issued(starts, counts_block=self.counts_block))  # perhaps faster
                break
        starts = lightened(needs, starts, limit, self.budget, self.budget.left)
        self.add(f"k={self.overlap}, lighter", needs.issued(starts, counts_block=self.counts_block))
