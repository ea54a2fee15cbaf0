"""A lower bound of the makespan of any plan of a program, without compiling one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from heapq import heappush, heappushpop
from typing import NamedTuple

from overlap1f1b.plan import RECOMPUTES, Chains, Node, NodeCosts, Op, Overlap, Resource, parse_overlap
from overlap1f1b.plan.chains import Shapes
from overlap1f1b.plan.clock import Clock
from overlap1f1b.schedule import Action, Kind, Program, actions_of
from overlap1f1b.schedule.rows import flow


class _Chain(NamedTuple):
    """Time of an action from its first computation to its last, and its load on each resource."""

    whole: float
    compute: float
    exchange: float  # on an average link
    exchange_most: float  # on the slowest link
    weights: float  # compute and weight gradients
    last_weight: float
    send: float


def bound(program: Program, shape: Shapes, costs: NodeCosts, overlap: Overlap) -> float:
    """Return a lower bound of the makespan of the compiled plan. Time is linear in the number of actions.

    >>> from overlap1f1b.plan import BlockShape, compile
    >>> from overlap1f1b.schedule import build_schedule
    >>> costs, shape = NodeCosts.uniform(attention=3, experts=4, dispatch=5), (BlockShape(seams=1),)
    >>> program = build_schedule("1f1b", ranks=4, microbatches=8)
    >>> [(bound(program, shape, costs, k), compile(program, shape, costs, k).predicted) for k in ("serial", 3)]
    [(377.0, 451.0), (377.0, 377.0)]

    The bound follows from three facts. First, at most k consecutive actions of a rank are open at once: an action
    begins only after all but k − 1 of the earlier actions have ended and its inputs from other ranks have arrived; on a
    rank with one stage, a forward also needs room for its activations. Second, an action takes at least as long as
    alone: without parts, the sum of the times in its chain of nodes. Third, after the time at which an action may
    begin, the rank still has to do all compute, and all exchange, of this action and of the later ones. Weight
    gradients, which may be issued in any wait, count only here.

    Args:
        program: A checked program.
        shape: Blocks of every stage, or a sequence with the blocks of each stage.
        costs: Costs of the nodes.
        overlap: ``"serial"``, ``"pairs"`` or k, which includes pairs.
    """
    chains = Chains(program.placement, shape)
    overlap = parse_overlap(overlap)
    window = 1 if overlap == "serial" else 2 if overlap == "pairs" else max(2, overlap)
    stages = program.placement.stages

    @cache
    def chain(forward: bool, stage: int, pipe: int) -> _Chain:
        return _chain(Action(Kind.F if forward else Kind.B, stage, 0, pipe), chains, costs)

    rows = [
        _RankBound(window, peak if len(program.placement.places(rank)) == 1 and not program.forward_only else None)
        for rank, peak in enumerate(program.peak_activations)
    ]
    ends: dict[tuple[bool, int, int, int], float] = {}  # end of every forward and input gradient
    for rank, _, slot in flow(program):
        for kind, stage, microbatch, pipe in actions_of(slot):
            if kind is Kind.W:
                continue
            forward = kind is Kind.F
            before = stage - 1 if forward else stage + 1
            ready = 0.0 if forward else ends.get((True, stage, microbatch, pipe), 0.0)
            if 0 <= before < stages:
                source = chain(forward, before, pipe)
                ready = max(ready, ends[forward, before, microbatch, pipe] + source.send)
            ends[forward, stage, microbatch, pipe] = rows[rank].run(chain(forward, stage, pipe), forward, ready)
    return max((row.end for row in rows), default=0.0)


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

    def run(self, chain: _Chain, forward: bool, ready: float) -> float:
        """Add the next action, and return its end."""
        if forward and self.peak is not None and self.forwards >= self.peak:
            ready = max(ready, self.inputs[self.forwards - self.peak])
        if len(self.latest) == self.window:
            self.opens = max(self.opens, self.latest[0])
        self.opens = max(self.opens, self.compute.opens, self.exchange.opens)
        end = max(self.opens, ready) + chain.whole
        (heappush if len(self.latest) < self.window else heappushpop)(self.latest, end)
        self.compute.add(self.opens, chain.compute, chain.compute)
        self.exchange.add(self.opens, chain.exchange, chain.exchange_most)
        self.weights.add(self.opens, chain.weights, chain.weights)
        self.last = max(self.last, end + chain.last_weight)
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


def _chain(action: Action, chains: Chains, costs: NodeCosts) -> _Chain:
    nodes = [node for node in chains.of(action) if node.op not in (Op.SEND, Op.RECEIVE)]
    compute = sum(costs(node) for node in nodes if node.resource is Resource.COMPUTE)
    exchanges = [costs.links(node) for node in nodes if node.resource is Resource.EXCHANGE]
    weights = [weight for node in nodes if (weight := chains.weight(node)) is not None]
    last = chains.weight(nodes[-1])
    return _Chain(
        # Recomputation needs neither gradient nor exchange: it may run beside them, or before they arrive.
        whole=_alone(action, [node for node in nodes if node.op not in RECOMPUTES], chains, costs),
        compute=compute,
        exchange=sum(sum(links) / len(links) for links in exchanges),
        exchange_most=sum(map(max, exchanges)),
        weights=compute + sum(map(costs, weights)),
        last_weight=costs(last) if last is not None else 0.0,
        send=sum(costs(node) for node in chains.of(action) if node.op is Op.SEND),
    )


def _alone(action: Action, nodes: list[Node], chains: Chains, costs: NodeCosts) -> float:
    """Return the time that an action takes if it finds every resource free."""
    if all(block.parts == 1 for block in chains.shapes[action.stage]):
        return sum(map(costs, nodes))
    clock = Clock(replace(costs, launch={}, shared_links=False))
    return max(clock.play(node).end for node in nodes)
