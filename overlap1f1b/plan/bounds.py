"""A lower bound of the makespan of any plan of a program, without compiling one."""

from dataclasses import replace
from functools import cache
from heapq import heappush, heappushpop
from itertools import accumulate, pairwise

from overlap1f1b.plan.chains import Chains, Shapes
from overlap1f1b.plan.clock import Clock
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import RECOMPUTES, Op, Resource
from overlap1f1b.plan.plan import SEARCHED_FROM, Overlap, parse_overlap
from overlap1f1b.schedule import Action, Kind, Placement, Program, actions_of
from overlap1f1b.schedule.program import flow
from overlap1f1b.schedule.values import check_size

_ANY = 1 << 30
"""More actions than a step has."""


def bound(program: Program, shape: Shapes, costs: NodeCosts, overlap: Overlap) -> float:
    """Return a lower bound of the makespan of the compiled plan. Time is linear in the number of actions.

    >>> from overlap1f1b.plan import BlockShape, compile
    >>> from overlap1f1b.schedule import build_schedule
    >>> costs, shape = NodeCosts.uniform(attention=3, experts=4, dispatch=5), (BlockShape(expert_calls=1),)
    >>> program = build_schedule("1f1b", ranks=4, microbatches=8)
    >>> [(bound(program, shape, costs, k), compile(program, shape, costs, k).predicted) for k in ("serial", 3)]
    [(377.0, 451.0), (377.0, 377.0)]

    The bound follows from three facts. First, below ``SEARCHED_FROM``, or if the schedule leaves no order open, at
    most k consecutive actions of a rank are open at once; else :func:`pipeline_bound` counts, too. An action begins
    only after all but k − 1 of the earlier actions have ended and its inputs from other ranks have arrived; on a rank
    with one stage, a forward also needs room for its activations. Second, an action takes at least as long as alone:
    without parts, the sum of the times in its chain of nodes. Third, after the time at which an action may begin, the
    rank still has to do all compute, and all exchange, of this action and of the later ones. Weight gradients, which
    may be issued in any wait, count only here.

    Args:
        program: A checked program.
        shape: Blocks of every stage, or a sequence with the blocks of each stage.
        costs: Costs of the nodes.
        overlap: ``"serial"``, ``"pairs"`` or k, which includes pairs.
    """
    chains = Chains(program.placement, shape)
    overlap = parse_overlap(overlap)
    window = 1 if overlap == "serial" else 2 if overlap == "pairs" else max(2, overlap)
    least = 0.0
    if window >= SEARCHED_FROM and program.open:
        window = _ANY  # orders are searched for
        if len(program.placement.pipes) == 1:
            least = pipeline_bound(program.placement, program.microbatches, chains.shapes, costs)
    stages = program.placement.stages

    @cache
    def alone(forward: bool, stage: int, pipe: int) -> Alone:
        return Alone(Action(Kind.F if forward else Kind.I, stage, 0, pipe), chains, costs)

    rows = [
        _RankBound(window, peak if len(program.placement.places(rank)) == 1 and not program.forward_only else None)
        for rank, peak in enumerate(program.peak_activations)
    ]
    ends: dict[tuple[bool, int, int, int], float] = {}  # end of every forward and input gradient
    for rank, slot in flow(program):
        for kind, stage, microbatch, pipe in actions_of(slot):
            if kind is Kind.W:
                continue
            forward = kind is Kind.F
            before = stage - 1 if forward else stage + 1
            ready = 0.0 if forward else ends.get((True, stage, microbatch, pipe), 0.0)
            if 0 <= before < stages:
                ready = max(ready, ends[forward, before, microbatch, pipe] + alone(forward, before, pipe).send)
            ends[forward, stage, microbatch, pipe] = rows[rank].run(alone(forward, stage, pipe), forward, ready)
    return max([least, *(row.end for row in rows)])


def pipeline_bound(placement: Placement, microbatches: int, shape: Shapes, costs: NodeCosts) -> float:
    """Return a lower bound of the makespan of any plan of any order of actions, with any number of live activations.

    >>> from overlap1f1b.plan import BlockShape
    >>> costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5.25)
    >>> shape = (BlockShape(expert_calls=1),)
    >>> [pipeline_bound(Placement.v(2), microbatches, shape, costs) for microbatches in (1, 8)]
    [143.0, 377.0]

    A rank has to do all of its compute, and all of its exchanges, of every microbatch. Before, the first microbatch
    has to come down to one of its stages; behind, the last one has to go up from one of them to the first stage.
    Weight gradients may come after that. If transfers between stages share the links of the exchanges, they count
    with them. The bound is the largest of these times over the ranks, or one microbatch's whole way.

    Args:
        placement: Rank of each stage, with one pipe.
        microbatches: Microbatches of the step.
        shape: Blocks of every stage, or a sequence with the blocks of each stage.
        costs: Costs of the nodes.

    Raises:
        ValueError: The placement has several pipes, or the shapes are of another number of stages.
    """
    if len(placement.pipes) > 1:
        raise ValueError(f"a placement with {len(placement.pipes)} pipes; allowed: one pipe, a loop or a V")
    check_size("microbatches", microbatches)
    chains = Chains(placement, shape)
    forwards, backwards = (  # of one microbatch, by stage
        [Alone(Action(kind, stage, 0), chains, costs) for stage in range(placement.stages)] for kind in (Kind.F, Kind.I)
    )
    down = [0.0, *accumulate(way.whole + way.send for way in forwards)]
    up = [0.0, *accumulate(way.whole + deeper.send for way, deeper in pairwise(backwards))]
    least = down[-1] + up[-1] + backwards[-1].whole + backwards[0].last_weight
    for rank in range(placement.ranks):
        stages = [stage for _, stage in placement.places(rank)]
        both = [ways[stage] for ways in (forwards, backwards) for stage in stages]
        head, tail = min(down[stage] for stage in stages), min(up[stage] for stage in stages)
        compute = microbatches * sum(way.compute for way in both)
        exchange = microbatches * sum(way.exchange for way in both)
        sends = microbatches * sum(way.send for way in both) if costs.shared_links else 0.0
        if exchange:
            first = min(down[stage] + forwards[stage].before for stage in stages)
            behind = min(up[stage] + backwards[stage].behind for stage in stages)
            least = max(least, first + exchange + behind, first + exchange + sends)
        weights = microbatches * sum(way.weights for way in both)
        least = max(least, head + compute + tail, head + compute + weights)
    return least


class Alone:
    """Times of an action that finds every resource free.

    Attributes:
        whole: From its begin to its end, without transfers to other ranks.
        before: From its begin to its first exchange.
        behind: From the end of its last exchange to its end.
        compute: Of all computation but weight gradients.
        weights: Of the weight gradients.
        last_weight: Of the weight gradient behind its last node.
        exchange: Of all exchanges, on an average link.
        exchange_most: Of all exchanges, each on its slowest link.
        send: Of the transfer to the rank of the next stage.
    """

    def __init__(self, action: Action, chains: Chains, costs: NodeCosts) -> None:
        nodes = [node for node in chains.of(action) if node.op is not Op.RECEIVE]
        clock = Clock(replace(costs, launch={}, shared_links=False))
        # Recomputation needs neither gradient nor exchange: it may run beside them, or before they arrive.
        spans = [clock.play(node) for node in nodes if node.op not in (*RECOMPUTES, Op.SEND)]
        exchanges = [span for span in spans if span.node.resource is Resource.EXCHANGE]
        links = [costs.links(span.node) for span in exchanges]
        weights = [chains.weight(node) for node in nodes]
        self.whole = spans[-1].end
        self.before = min((span.start for span in exchanges), default=0.0)
        self.behind = self.whole - max((span.end for span in exchanges), default=0.0)
        self.compute = sum(costs(node) for node in nodes if node.resource is Resource.COMPUTE)
        self.weights = sum(costs(weight) for weight in weights if weight is not None)
        last = chains.weight(spans[-1].node)
        self.last_weight = 0.0 if last is None else costs(last)
        self.exchange = sum(sum(times) / len(times) for times in links)
        self.exchange_most = sum(map(max, links))
        self.send = sum(costs(node) for node in nodes if node.op is Op.SEND)


class _RankBound:
    """The actions of one rank, each as early as possible.

    Args:
        window: Largest number of open actions.
        peak: Largest number of live activations on a rank of one stage; None if this gives no bound.
    """

    def __init__(self, window: int, peak: int | None) -> None:
        self.window, self.peak = window, peak
        self.forwards = 0
        self.inputs: list[float] = []  # ends of input gradients, which keep their order
        self.latest: list[float] = []  # the latest ends, as many as actions may be open
        self.opens = 0.0
        self.compute, self.exchange, self.weights = _Load(window), _Load(window), _Load(window)
        self.last = 0.0

    def run(self, action: Alone, forward: bool, ready: float) -> float:
        """Add the next action, and return its end."""
        if forward and self.peak is not None and self.forwards >= self.peak:
            ready = max(ready, self.inputs[self.forwards - self.peak])
        if len(self.latest) == self.window:
            self.opens = max(self.opens, self.latest[0])
        self.opens = max(self.opens, self.compute.opens, self.exchange.opens)
        end = max(self.opens, ready) + action.whole
        (heappush if len(self.latest) < self.window else heappushpop)(self.latest, end)
        self.compute.add(self.opens, action.compute, action.compute)
        self.exchange.add(self.opens, action.exchange, action.exchange_most)
        with_weights = action.compute + action.weights
        self.weights.add(self.opens, with_weights, with_weights)
        self.last = max(self.last, end + action.last_weight)
        if forward:
            self.forwards += 1
        else:
            self.inputs.append(max([end, *self.inputs[-1:]]))
        return end

    @property
    def end(self) -> float:
        """Earliest time at which all actions can have ended."""
        return max(self.last, self.weights.end, self.exchange.end)


class _Load:
    """The load of a rank's actions on one resource."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.sum = self.longest = 0.0
        self.offset = float("-inf")  # latest opening of an action, minus the load of the earlier actions

    def add(self, opens: float, time: float, most: float) -> None:
        self.offset = max(self.offset, opens - self.sum)
        self.sum += time
        self.longest = max(self.longest, most)

    @property
    def end(self) -> float:
        """Earliest time at which all of the load can be done."""
        return max(0.0, self.offset + self.sum)

    @property
    def opens(self) -> float:
        """Earliest time at which enough can be done for another action to open."""
        return max(0.0, self.offset + self.sum - (self.window - 1) * self.longest)
