"""The planner's problem as an exact model for a constraint solver, so that orders are compared with proven optima.

The model has the nodes, chains, lanes and rules of a plan: compute and exchanges of a rank one after another, each
chain in its order, gradients in microbatch order, at most so many live microbatches. It knows nothing of how orders
are found, and its times are those of :func:`~overlap1f1b.plan.play_ranks` with costs of no launches.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from overlap1f1b.plan import (
    RECOMPUTES,
    Chains,
    Held,
    Node,
    NodeCosts,
    Op,
    Resource,
    awaited_by,
    cost_key,
    peer_of,
    play_ranks,
)
from overlap1f1b.plan.chains import Shapes
from overlap1f1b.schedule import Action, Kind, Placement

SCALE = 64
"""Costs are multiples of one part in so many: a solver has whole numbers."""


class Optimum(NamedTuple):
    """The best order that was found, and what none is better than: times in the unit of the costs, or bytes."""

    value: float
    bound: float
    ranks: list[list[Node]]

    @property
    def proven(self) -> bool:
        return self.value == self.bound


def optimum(
    placement: Placement,
    microbatches: int,
    shape: Shapes,
    costs: NodeCosts,
    *,
    live: Sequence[int] | None = None,
    known: Sequence[Sequence[Node]] = (),
    within: float | None = None,
    seconds: float = 60.0,
    workers: int = 1,
) -> Optimum:
    """Return the fastest order of one pipe, with at most ``live`` (stage, microbatch) alive on each rank.

    With a time, that ``within`` which a step shall end, return the order of which a rank holds the fewest bytes at
    most: by costs of which computations alone hold bytes, and leave none behind.

    Nodes of one place pass in the order of microbatches: of forwards too, which delays nothing, since microbatches cost
    the same. The solver starts from an order that is ``known``; ``seconds`` and ``workers`` are its own.
    """
    problem = _Problem(Chains(placement, shape), microbatches, costs)
    for rank, limit in enumerate(live or ()):
        problem.limit(rank, limit)
    for node, start, _ in chain.from_iterable(play_ranks(known, placement, costs) if known else ()):
        if node in problem.start:  # it is no receive
            problem.model.add_hint(problem.start[node], round(start * SCALE))
    if within is None:
        return problem.solved(problem.end, SCALE, seconds, workers)
    problem.model.add(problem.end <= int(within * SCALE))
    return problem.solved(problem.held(), 1, seconds, workers)


class _Problem:
    def __init__(self, chains: Chains, microbatches: int, costs: NodeCosts) -> None:
        self.chains, self.costs, self.model = chains, costs, cp_model.CpModel()
        self.start: dict[Node, Any] = {}
        self.time: dict[Node, int] = {}
        self.lanes: dict[tuple[int, Resource, int], list[Node]] = {}
        self.ends: dict[tuple[int, int, Kind], Node] = {}
        self.begins: dict[tuple[int, int, Kind], Node] = {}
        self.begun: dict[tuple[int, int, Kind], Node] = {}  # the same with recomputations
        self.rank: dict[Node, int] = {}
        self.producer: dict[Node, Node | None] = {}  # of each exchange
        stages = range(chains.placement.stages)
        actions = [Action(k, s, m) for m in range(microbatches) for k in (Kind.F, Kind.I) for s in stages]
        self.horizon = 1
        for action in actions:
            for node in chains.of(action):
                self.horizon += self._time(node) + sum(map(self._time, filter(None, [chains.weight(node)])))
        self.end = self.model.new_int_var(0, self.horizon, "end")
        for action in actions:
            self._add(action)
        for action in actions:
            self._join(action)
        places: dict[Node, Node] = {}
        for node in self.start:  # microbatch after microbatch
            parts_pass_together = node.op is Op.EXPERTS and node.kind is Kind.I
            place = (node._replace(part=0) if parts_pass_together else node)._replace(microbatch=0)
            before = places.get(place)
            if before is not None:
                self._after(before, node)
            places[place] = node
        for nodes in self.lanes.values():
            self.model.add_no_overlap([self._interval(node) for node in nodes])

    def _time(self, node: Node) -> int:
        time = self.costs(node) * SCALE
        assert abs(time - round(time)) < 1e-6, "costs are multiples of 1 / SCALE"
        return round(time)

    def _interval(self, node: Node) -> Any:
        return self.model.new_fixed_size_interval_var(self.start[node], self.time[node], str(node))

    def _after(self, before: Node, node: Node) -> None:
        self.model.add(self.start[node] >= self.start[before] + self.time[before])

    def _new(self, node: Node, rank: int) -> None:
        self.time[node] = self._time(node)
        self.start[node] = self.model.new_int_var(0, self.horizon, str(node))
        self.model.add(self.start[node] + self.time[node] <= self.end)
        self.rank[node] = rank
        to = peer_of(node, self.chains.placement) if node.op is Op.SEND else 0
        self.lanes.setdefault((rank, node.resource, to), []).append(node)

    def _add(self, action: Action) -> None:
        """Add an action's chain: compute in order, exchanges in order, each with the nodes before that it needs."""
        rank = self.chains.placement.rank(0, action.stage)
        nodes = [node for node in self.chains.of(action) if node.op is not Op.RECEIVE]
        for node in nodes:
            self._new(node, rank)
        computed: Node | None = None
        travels: list[Node] = []  # since the compute that needed all before
        last: dict[Resource, Node] = {}  # of counts and of exchanges
        for node in nodes:
            needs = [last.get(node.resource)]
            if node.resource is not Resource.COMPUTE:
                needs += [computed, node._replace(op=Op.COUNTS) if node.op is Op.DISPATCH else None]
                self.producer[node] = computed
                travels += [node] if node.op is not Op.SEND else []
            else:
                if node.op not in RECOMPUTES:
                    of_part = [other for other in travels if other.place == awaited_by(node)]
                    needs += of_part or travels
                    travels = [other for other in travels if other not in of_part] if of_part else []
                computed = node
            last[node.resource] = node
            for other in needs:
                if other in self.start:
                    self._after(other, node)
            if (weight := self.chains.weight(node)) is not None:
                self._new(weight, rank)
        for node in nodes:
            if (weight := self.chains.weight(node)) is not None:
                parts = [other for other in nodes if other[:5] == node[:5]]
                for part in parts:
                    self._after(part, weight)
        key = action.stage, action.microbatch, action.kind
        self.begins[key] = next(node for node in nodes if node.op not in RECOMPUTES)
        self.ends[key] = nodes[-1]
        self.begun[key] = nodes[0]

    def _join(self, action: Action) -> None:
        """Let a chain begin after the one before it, and a backward after its forward."""
        key, forward = (action.stage, action.microbatch, action.kind), action.kind is Kind.F
        before = (action.stage - 1 if forward else action.stage + 1, *key[1:])
        if before in self.ends:
            end = self.ends[before]
            self._after(end, self.begins[key] if end.op is Op.SEND else self.begun[key])
        if not forward:
            end = self.ends[action.stage, action.microbatch, Kind.F]
            self._after(end, self.begins[key])
            if end.op is not Op.SEND:
                self._after(end, self.begun[key])

    def limit(self, rank: int, live: int) -> None:
        """Let at most so many (stage, microbatch) be alive: from the forward to the end of the input gradient."""
        spans = []
        for (stage, microbatch, kind), node in self.begun.items():
            if kind is Kind.F and self.chains.placement.rank(0, stage) == rank:
                last = self.ends[stage, microbatch, Kind.I]
                if last.op is Op.SEND:
                    last = self.chains.of(Action(Kind.I, stage, microbatch))[-2]
                size, until = (self.model.new_int_var(0, self.horizon, "") for _ in range(2))
                self.model.add(until == self.start[last] + self.time[last])
                spans.append(self.model.new_interval_var(self.start[node], size, until, ""))
        if live < len(spans):
            self.model.add_cumulative(spans, [1] * len(spans), live)

    def held(self) -> Any:
        """Return the most bytes that a rank holds: what a forward leaves, its backward and weight gradient free."""
        most = self.model.new_int_var(0, 1 << 40, "bytes")
        for rank in range(self.chains.placement.ranks):
            spans, sizes = list[Any](), list[int]()
            for node in self.start:
                held = self.costs.bytes.get(cost_key(node), Held())
                if self.rank[node] != rank or held == Held():
                    continue
                assert node.resource is Resource.COMPUTE
                if held.most:
                    spans.append(self._interval(node))
                    sizes.append(int(held.most))
                if node.kind is Kind.F:
                    backward = node._replace(kind=Kind.I)
                    left = held.kept + self.costs.bytes.get(cost_key(backward), Held()).kept
                    weight = self.chains.weight(backward)
                    assert left == 0 or -self.costs.bytes[cost_key(weight)].kept == left
                    for frees, size in ((backward, held.kept - left), (weight, left)):
                        if size:
                            spans.append(self._between(node, frees))
                            sizes.append(int(size))
            self.model.add_cumulative(spans, sizes, most)
        return most

    def _between(self, first: Node, last: Node) -> Any:
        """Return the time from the end of a node to the end of another."""
        size, until = (self.model.new_int_var(0, self.horizon, "") for _ in range(2))
        self.model.add(until == self.start[last] + self.time[last])
        return self.model.new_interval_var(self.start[first] + self.time[first], size, until, "")

    def solved(self, value: Any, scale: int, seconds: float, workers: int) -> Optimum:
        self.model.minimize(value)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = workers
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # in so few seconds
            return Optimum(float("inf"), solver.best_objective_bound / scale, [])
        at = {node: solver.value(start) for node, start in self.start.items()}
        ranks = [self._issued(rank, at) for rank in range(self.chains.placement.ranks)]
        return Optimum(solver.objective_value / scale, solver.best_objective_bound / scale, ranks)

    def _issued(self, rank: int, at: dict[Node, int]) -> list[Node]:
        """Return a rank's nodes in an order by which each can start in time: exchanges right behind their producers."""
        mine = [node for node in self.start if self.rank[node] == rank]
        number = {node: place for place, node in enumerate(self.start)}

        def turn(node: Node) -> tuple[int, bool, int]:  # one that takes no time before one that starts with it
            return at[node], self.time[node] > 0, number[node]

        computes = sorted((node for node in mine if node.resource is Resource.COMPUTE), key=turn)
        place = {node: index for index, node in enumerate(computes)}
        behind: dict[int, list[Node]] = {}
        for resource in (Resource.CONTROL, Resource.EXCHANGE, Resource.PEER):
            latest = -1
            for node in sorted((node for node in mine if node.resource is resource), key=turn):
                latest = max(latest, place[self.producer[node]])
                behind.setdefault(latest, []).append(node)
        received = [
            node
            for (stage, microbatch, kind) in self.begins
            for node in self.chains.of(Action(kind, stage, microbatch))[:1]
            if node.op is Op.RECEIVE and self.chains.placement.rank(0, stage) == rank
        ]
        return received + [node for index, compute in enumerate(computes) for node in (compute, *behind.get(index, ()))]
