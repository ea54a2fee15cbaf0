"""List scheduling of all ranks with a free order of actions: by priorities, within a limit of live activations."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from overlap1f1b.plan.bounds import Alone
from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.clock import Clock, Key
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import RESOURCE_OF, Node, Op, Resource, awaited_by
from overlap1f1b.plan.scheduler import RankScheduler, run_together
from overlap1f1b.schedule import Action, Kind

_FOREVER = float("inf")
_F, _I = Kind.F, Kind.I
_COMPUTE, _EXCHANGE, _SEND, _RECEIVE, _EXPERTS = Resource.COMPUTE, Resource.EXCHANGE, Op.SEND, Op.RECEIVE, Op.EXPERTS


class Priorities(NamedTuple):
    """Priorities and limits that decide among nodes that can start.

    Args:
        keys: A number for every forward and backward, by its chain; the smallest comes first.
        limits: For every rank the number of (stage, microbatch) that may be alive at once: at least the rank's number
            of stages.
        caps: For every stage the number of microbatches that may be alive at once, at least 1.
        deferred: Number of (stage, microbatch) beyond the live ones that may wait for weight gradients alone.
        lookahead: Longest wait for an input of a smaller key, as a fraction of the time of the node that could start.
        patience: Least length of a wait in which a weight gradient is issued, as a fraction of the gradient's time.
    """

    keys: Mapping[Key, float]
    limits: Sequence[int]
    caps: Sequence[int]
    deferred: float = 0
    lookahead: float = 0.0
    patience: float = 0.0


class _Step(NamedTuple):
    """A node of compute, and what is launched behind it: at once, or when the links of the exchanges need it."""

    node: Node
    at_once: tuple[Node, ...]
    exchanges: tuple[Node, ...]
    weight: Node | None
    gate: int  # number of steps that the microbatch before must have made, so that sums keep their order
    needs: int  # number of the action's exchanges that it needs


@dataclass(slots=True, eq=False)
class _Work:
    """A forward or backward whose input has been sent; ``before`` is the same of the microbatch before."""

    key: Key
    steps: tuple[_Step, ...]
    priority: float
    before: _Work | None
    at: int = 0
    queue: deque[Node] = field(default_factory=deque)  # exchanges that are not launched yet
    launches: float = -_FOREVER  # their key
    launched: int = 0
    blocked: _Work | None = None  # the next microbatch, if it waits for this one


class Steps:
    """The chains of all actions as steps of compute, shared by all candidates of a search."""

    def __init__(self, chains: Chains, costs: NodeCosts) -> None:
        self.chains, self.costs = chains, costs
        self.of = cache(self._of)
        self.weights = [
            sum(chains.weight(node) is not None for node in chains.of(Action(_I, stage, 0)))
            for stage in range(chains.placement.stages)
        ]
        self.loads = [self._load(rank) for rank in range(chains.placement.ranks)]

    def _load(self, rank: int) -> tuple[float, float]:
        """Return the time of one microbatch's compute and of its exchanges on a rank."""
        places = self.chains.placement.places(rank)
        ways = [Alone(Action(kind, stage, 0), self.chains, self.costs) for _, stage in places for kind in (_F, _I)]
        return sum(way.compute + way.weights for way in ways), sum(way.exchange for way in ways)

    def _of(self, kind: Kind, stage: int, microbatch: int) -> tuple[_Step, ...]:
        nodes = [node for node in self.chains.of(Action(kind, stage, microbatch)) if node.op is not _RECEIVE]
        at = [index for index, node in enumerate(nodes) if RESOURCE_OF[node.op] is _COMPUTE]
        computes = [nodes[index] for index in at]
        steps: list[_Step] = []
        sent: list[Node] = []
        for number, (begin, end) in enumerate(zip(at, [*at[1:], len(nodes)], strict=True)):
            gate, node = number + 1, nodes[begin]
            blocks = self.chains.shapes[stage][node.block]
            if node.op is _EXPERTS:  # the last part of its call
                gate = computes.index(node._replace(part=blocks.parts - 1 if kind is _F else 0)) + 1
            weight = self.chains.weight(node) if kind is _I else None
            behind = nodes[begin + 1 : end]
            exchanges = tuple(other for other in behind if RESOURCE_OF[other.op] is _EXCHANGE)
            one = awaited_by(node)
            # Of several parts each needs its own; a block's own exchanges come one after another.
            of_parts = [other.place for other in sent if other.block == node.block and not blocks.exchanges]
            needs = len(sent) - len(of_parts) + of_parts.index(one) + 1 if one in of_parts else len(sent)
            sent += exchanges
            at_once = tuple(other for other in behind if RESOURCE_OF[other.op] is not _EXCHANGE)
            steps.append(_Step(node, at_once, exchanges, weight, gate, needs))
        return tuple(steps)


class FreeScheduler(RankScheduler):
    """A list scheduler of one rank that chooses among all actions whose inputs are there.

    - Of the nodes that can start, it issues the one whose action has the smallest key.
    - Exchanges, each part by itself, are launched in the same order, as late as leaves no link without work.
    - Microbatches pass every stage in their order, so that sums have one order.
    - Weight gradients are issued in waits, the oldest microbatch first.
    - A forward begins only if there is room for it and, afterwards, for all forwards on this rank of the oldest
      microbatch that lacks some. So the oldest microbatch can always go on, and no order of priorities can get stuck.

    The pipe is the first; its microbatches are numbered from 0.
    """

    def __init__(
        self,
        rank: int,
        microbatches: int,
        steps: Steps,
        priorities: Priorities,
        clocks: list[Clock],
        limit: float = _FOREVER,
    ) -> None:
        placement = steps.chains.placement
        super().__init__(Clock(steps.costs, placement=placement, clocks=clocks))
        self.steps, self.priorities, self.microbatches = steps, priorities, microbatches
        self.pipe, self.rank = placement.pipes[0], rank
        self.worked = 0.0
        # Times in which compute, and the exchanges, may do nothing if the step shall end within the limit.
        self.may_idle, self.links_may_idle = (limit - microbatches * load for load in steps.loads[rank])
        self.pending: list[tuple[float, int, _Work]] = []  # by the time at which the next step can start
        self.ready: list[tuple[float, int, _Work]] = []  # by key
        self.roomless: list[_Work] = []  # forwards without room
        self.launches: list[tuple[float, int, _Work]] = []  # work with exchanges to launch, by key
        self.weights: list[tuple[int, int, Node]] = []
        self.number = count()
        self.latest: dict[tuple[Kind, int], _Work] = {}  # of every stage and direction
        stages = len(placement.places(rank))
        self.stages, self.limit = stages, priorities.limits[rank]
        self.owned = [0] * microbatches  # (stage, microbatch) of a microbatch that hold activations
        self.lacking = [stages] * microbatches  # forwards that have not begun
        self.oldest = self.live = self.older = 0  # oldest microbatch that lacks forwards; live in all, and up to it
        self.alive = [0] * len(self.pipe)  # of each stage
        self.held = 0  # live, or with weight gradients to come
        self.left = 2 * stages * microbatches
        self.unweighted: dict[tuple[int, int], int] = {}
        if self.pipe[0] == rank:
            self._open((0, 0, 0, _F))

    @property
    def ended(self) -> bool:
        return self.given_up or not (self.left or self.weights)

    def expect(self, received: Node) -> None:
        self._issue(received)
        self._open((0, received.stage, received.microbatch, received.kind))

    def step(self, horizon: float) -> float | None:
        time, pending = max(self.clock.now, horizon), self.pending
        while pending and pending[0][0] <= time:
            work = heappop(pending)[2]
            needed = self.clock.needed(work.steps[work.at].node)
            if needed > time:  # exchanges have delayed a transfer
                heappush(pending, (needed, next(self.number), work))
            else:
                heappush(self.ready, (work.priority, next(self.number), work))
        chosen = self._choose()
        until = pending[0][0] if pending else _FOREVER
        if chosen is not None and self.priorities.lookahead and until < _FOREVER:
            latest = time + self.priorities.lookahead * self._cost(chosen.steps[chosen.at].node)
            if until < latest and any(at < latest and work.priority < chosen.priority for at, _, work in pending):
                heappush(self.ready, (chosen.priority, next(self.number), chosen))
                chosen = None
        if chosen is not None:
            self._launch(time + self._cost(chosen.steps[chosen.at].node))
            self._advance(chosen)
            return None
        if self.weights:
            cost = self._cost(self.weights[0][2])
            if until - time >= self.priorities.patience * cost:
                self._launch(time + cost)
                microbatch, _, weight = heappop(self.weights)
                self._compute(weight)
                self._release(weight.stage, microbatch)
                return None
        if self.launches:
            free = max(self.clock.free[_EXCHANGE], default=0.0)
            if free > time:
                return min(until, free)
            self._launch(time)
            return time
        return until

    def _cost(self, node: Node) -> float:
        return self.clock.cost(node)[0]

    def _launch(self, until: float) -> None:
        """Launch exchanges, the smallest key first, until their links have work up to a time."""
        free = self.clock.free[_EXCHANGE]
        while self.launches and min(free, default=0.0) <= until:
            work = heappop(self.launches)[2]
            before = max(free, default=0.0)
            node = work.queue.popleft()
            self._issue(node)
            work.launched += 1
            self.links_may_idle -= max(0.0, self.clock.now - before)
            self.given_up |= self.links_may_idle < 0
            if not work.queue:
                work.launches = -_FOREVER
            if work.at < len(work.steps) and work.launched == work.steps[work.at].needs:
                self._await(work)

    def _await(self, work: _Work) -> None:
        heappush(self.pending, (self.clock.needed(work.steps[work.at].node), next(self.number), work))

    def _open(self, key: Key) -> None:
        _, stage, microbatch, kind = key
        before = self.latest.get((kind, stage)) if microbatch else None
        work = _Work(key, self.steps.of(kind, stage, microbatch), self.priorities.keys[key], before)
        self.latest[kind, stage] = work
        self._await(work)

    def _choose(self) -> _Work | None:
        """Take the first work whose next step may be issued; the others wait until it may."""
        while self.ready:
            work = heappop(self.ready)[2]
            before = work.before
            if before is not None and before.at < work.steps[work.at].gate:
                before.blocked = work
            elif not work.at and work.key[3] is _F and not self._has_room(work):
                self.roomless.append(work)
            else:
                return work
        return None

    def _has_room(self, work: _Work) -> bool:
        _, stage, microbatch, _ = work.key
        if self.alive[stage] >= self.priorities.caps[stage]:
            return False
        if microbatch != self.oldest and self.stages + self.live - self.older >= self.limit:
            return False
        return self.live < self.limit and self.held < self.limit + self.priorities.deferred

    def _advance(self, work: _Work) -> None:
        _, _, microbatch, kind = work.key
        if not work.at and kind is _F:
            self._begin(work)
        node, at_once, exchanges, weight, *_ = work.steps[work.at]
        work.at += 1
        self._compute(node)
        for other in at_once:
            self._issue(other)
        if weight is not None:
            heappush(self.weights, (microbatch, next(self.number), weight))
        if exchanges:
            work.launches = max(work.launches, work.priority)
            if kind is _I and work.before is not None:  # in the order of microbatches
                work.launches = max(work.launches, work.before.launches)
            work.queue.extend(exchanges)
            for _ in exchanges:
                heappush(self.launches, (work.launches, next(self.number), work))
        if work.at == len(work.steps):
            self.left -= 1
            self._end(work, sent=bool(at_once) and at_once[-1].op is _SEND)
        elif work.launched >= work.steps[work.at].needs:
            self._await(work)
        if work.blocked is not None:
            heappush(self.ready, (work.blocked.priority, next(self.number), work.blocked))
            work.blocked = None

    def _compute(self, node: Node) -> None:
        _, start, end = self._issue(node)
        self.worked += end - start
        self.given_up |= end - self.worked > self.may_idle

    def _begin(self, work: _Work) -> None:
        _, stage, microbatch, _ = work.key
        self.live += 1
        self.alive[stage] += 1
        self.held += 1
        self.owned[microbatch] += 1
        self.older += microbatch <= self.oldest
        self.lacking[microbatch] -= 1
        if not self.lacking[self.oldest]:
            while self.oldest < self.microbatches and not self.lacking[self.oldest]:
                self.oldest += 1
            self.older = sum(self.owned[: self.oldest + 1])
            self._retry()
        if not stage and microbatch + 1 < self.microbatches:
            self._open((0, 0, microbatch + 1, _F))

    def _end(self, work: _Work, *, sent: bool) -> None:
        _, stage, microbatch, kind = work.key
        work.before = None
        if kind is _F:
            if not sent:
                last = stage + 1 == len(self.pipe)
                self._open((0, stage, microbatch, _I) if last else (0, stage + 1, microbatch, _F))
            return
        if stage and not sent:
            self._open((0, stage - 1, microbatch, _I))
        self.live -= 1
        self.alive[stage] -= 1
        self.owned[microbatch] -= 1
        self.older -= microbatch <= self.oldest
        self._release(stage, microbatch)
        self._retry()

    def _release(self, stage: int, microbatch: int) -> None:
        """Count an input gradient or a weight gradient that has ended; behind the last one there is room again."""
        key = stage, microbatch
        left = self.unweighted.get(key, 1 + self.steps.weights[stage]) - 1
        if left:
            self.unweighted[key] = left
            return
        self.unweighted.pop(key, None)
        self.held -= 1
        self._retry()

    def _retry(self) -> None:
        for work in self.roomless:
            heappush(self.ready, (work.priority, next(self.number), work))
        self.roomless.clear()


def schedule_freely(
    microbatches: int, steps: Steps, priorities: Priorities, limit: float = _FOREVER
) -> tuple[list[list[Node]], float]:
    """Return the nodes of every rank in issue order, and the time of the step.

    The time is infinite if it is known before the end that it is beyond the limit; then nodes are missing.
    """
    clocks: list[Clock] = []
    schedulers = [
        FreeScheduler(rank, microbatches, steps, priorities, clocks, limit)
        for rank in range(steps.chains.placement.ranks)
    ]
    run_together(schedulers, steps.chains)
    ranks = [scheduler.order for scheduler in schedulers]
    if any(scheduler.given_up for scheduler in schedulers):
        return ranks, _FOREVER
    ends = [max(s.clock.now, *(max(free, default=0.0) for free in s.clock.free.values())) for s in schedulers]
    return ranks, max(ends)
