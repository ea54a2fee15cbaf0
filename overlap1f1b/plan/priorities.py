"""List scheduling of all ranks in any order of actions: by priorities, within limits of live activations.

Contract: :func:`schedule_by_priorities` returns every node of a step once, for each rank in issue order. Microbatches
pass every stage in their order, so that sums have one order. No limit is exceeded, and no priorities can get stuck.

Each time that a rank may issue something::

    1. jobs whose next task can start by now become ready       (a job is a forward or backward whose input was sent)
    2. choose the ready task of the smallest key that is in turn and has room; none if a smaller key comes soon enough
    3. launch exchanges, the smallest key first, until their links have work for as long as the task takes
    4. compute the task: its transfers leave at once, its exchanges wait for 3, its weight gradient waits for 5
    5. without a task: compute the oldest weight gradient if the wait is long enough, else launch an exchange, else wait
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple

from overlap1f1b.plan.bounds import Alone
from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.clock import Clock, Key
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import RESOURCE_OF, Node, Op, Resource, awaited_by
from overlap1f1b.plan.scheduler import Activations, RankScheduler, run_together
from overlap1f1b.schedule import Action, Kind

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


class _Task(NamedTuple):
    """A node of compute, and what is launched behind it."""

    node: Node
    at_once: tuple[Node, ...]
    exchanges: tuple[Node, ...]  # launched when their links need them
    weight: Node | None
    gate: int  # number of tasks that the microbatch before must have done, so that sums keep their order
    needs: int  # number of the job's exchanges that it needs


@dataclass(slots=True, eq=False)
class _Job:
    """A forward or backward whose input has been sent; ``before`` is the same of the microbatch before."""

    key: Key
    tasks: tuple[_Task, ...]
    priority: float
    before: _Job | None
    done: int = 0
    queue: deque[Node] = field(default_factory=deque)  # exchanges that are not launched yet
    launches: float = -inf  # their key
    launched: int = 0
    blocked: _Job | None = None  # the next microbatch, if it waits for this one


class Tasks:
    """The tasks of every forward and backward, shared by all tries of a search."""

    def __init__(self, chains: Chains, costs: NodeCosts) -> None:
        self.chains, self.costs = chains, costs
        self.of = cache(self._of)
        stages, placement = range(chains.placement.stages), chains.placement
        alone = [[Alone(Action(kind, stage, 0), chains, costs) for kind in (_F, _I)] for stage in stages]
        self.loads: list[tuple[float, float]] = []
        """Time of one microbatch's compute, and of its exchanges, on each rank."""
        for rank in range(placement.ranks):
            ways = [way for _, stage in placement.places(rank) for way in alone[stage]]
            self.loads.append((sum(way.compute + way.weights for way in ways), sum(way.exchange for way in ways)))

    def _of(self, kind: Kind, stage: int, microbatch: int) -> tuple[_Task, ...]:
        """Return the tasks of an action: each computation, what is launched behind it, and what it waits for."""
        nodes = [node for node in self.chains.of(Action(kind, stage, microbatch)) if node.op is not _RECEIVE]
        at = [index for index, node in enumerate(nodes) if RESOURCE_OF[node.op] is _COMPUTE]
        computes = [nodes[index] for index in at]
        tasks: list[_Task] = []
        sent: list[Node] = []
        for number, (begin, end) in enumerate(zip(at, [*at[1:], len(nodes)], strict=True)):
            gate, node = number + 1, nodes[begin]
            shape = self.chains.shapes[stage][node.block]
            if node.op is _EXPERTS:  # the last part of its call
                gate = computes.index(node._replace(part=shape.parts - 1 if kind is _F else 0)) + 1
            behind = nodes[begin + 1 : end]
            exchanges = tuple(other for other in behind if RESOURCE_OF[other.op] is _EXCHANGE)
            at_once = tuple(other for other in behind if RESOURCE_OF[other.op] is not _EXCHANGE)
            awaited, needs = awaited_by(node), len(sent)
            # Of several parts each needs its own; a block's own exchanges come one after another.
            of_parts = [other.place for other in sent if other.block == node.block and not shape.exchanges]
            if awaited in of_parts:
                needs += of_parts.index(awaited) + 1 - len(of_parts)
            sent += exchanges
            tasks.append(_Task(node, at_once, exchanges, self.chains.weight(node), gate, needs))
        return tuple(tasks)


class _Room(Activations):
    """What the activations of a rank leave room for, within the limits of the priorities.

    A forward has room if, afterwards, all forwards on this rank of the oldest microbatch that lacks some have room,
    too. So the oldest microbatch can always go on.
    """

    def __init__(self, priorities: Priorities, rank: int, stages: int, microbatches: int) -> None:
        super().__init__()
        self.limit, self.caps, self.deferred = priorities.limits[rank], priorities.caps, priorities.deferred
        self.stages = stages
        self.lacking = [stages] * microbatches  # forwards of each microbatch that have not begun
        self.oldest = 0  # microbatch that lacks forwards

    def fits(self, stage: int, microbatch: int) -> bool:
        """Return whether a forward may begin."""
        alive = self.alive
        if sum(1 for other, _ in alive if other == stage) >= self.caps[stage]:
            return False
        younger = sum(1 for _, other in alive if other > self.oldest)
        if microbatch != self.oldest and self.stages + younger >= self.limit:
            return False
        return len(alive) < self.limit and len(self.left) < self.limit + self.deferred

    def take(self, stage: int, microbatch: int) -> bool:
        """Let a forward begin; return whether another microbatch is now the oldest, for which others may have room."""
        self.begin((stage, microbatch))
        self.lacking[microbatch] -= 1
        before = self.oldest
        while self.oldest < len(self.lacking) and not self.lacking[self.oldest]:
            self.oldest += 1
        return self.oldest > before


class PriorityScheduler(RankScheduler):
    """A list scheduler of one rank that chooses among all actions whose inputs are there; see the module.

    The pipe is the first; its microbatches are numbered from 0.

    Args:
        rank: Number of the rank.
        microbatches: Microbatches of the step.
        tasks: Tasks of all actions.
        priorities: What decides.
        clocks: Clocks of the ranks before this one.
        limit: Time of a step from which on it is of no interest.
    """

    def __init__(
        self, rank: int, microbatches: int, tasks: Tasks, priorities: Priorities, clocks: list[Clock], limit: float
    ) -> None:
        placement, stages = tasks.chains.placement, len(tasks.chains.placement.places(rank))
        # Times in which compute, and the exchanges, may do nothing if the step shall end within the limit.
        may_idle, self.links_may_idle = (limit - microbatches * load for load in tasks.loads[rank])
        super().__init__(Clock(tasks.costs, placement=placement, clocks=clocks), may_idle)
        self.tasks, self.priorities, self.microbatches = tasks, priorities, microbatches
        self.room = _Room(priorities, rank, stages, microbatches)
        self.pending: list[tuple[float, int, _Job]] = []  # by the time at which the next task can start
        self.ready: list[tuple[float, int, _Job]] = []  # by key
        self.roomless: list[_Job] = []  # forwards without room
        self.launches: list[tuple[float, int, _Job]] = []  # jobs with exchanges to launch, by key
        self.weights: list[tuple[int, int, Node]] = []  # by microbatch
        self.number = count()  # on a tie the first comes first
        self.latest: dict[tuple[Kind, int], _Job] = {}  # of every stage and direction
        self.left = 2 * stages * microbatches
        if placement.pipes[0][0] == rank:
            self._open((0, 0, 0, _F))

    @property
    def ended(self) -> bool:
        return self.given_up or not (self.left or self.weights)

    def expect(self, received: Node) -> None:
        self._issue(received)
        self._open(received.chain)

    def step(self, horizon: float) -> float | None:
        """Issue what comes next, and return None; if nothing can start by ``horizon``, return when something can."""
        time, pending = max(self.clock.now, horizon), self.pending
        while pending and pending[0][0] <= time:
            job = heappop(pending)[2]
            if self.clock.needed(job.tasks[job.done].node) > time:  # exchanges have delayed a transfer
                self._await(job)
            else:
                self._make_ready(job)
        chosen = self._choose()
        until = pending[0][0] if pending else inf
        if chosen is not None and self._smaller_key_comes(chosen, time):
            self._make_ready(chosen)
        elif chosen is not None:
            self._launch(time + self._cost(chosen.tasks[chosen.done].node))
            self._advance(chosen)
            return None
        if self.weights:
            cost = self._cost(self.weights[0][2])
            if until - time >= self.priorities.patience * cost:
                self._launch(time + cost)
                _, _, weight = heappop(self.weights)
                self._compute(weight)
                if self.room.settle((weight.stage, weight.microbatch)):
                    self._retry()
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

    def _open(self, key: Key) -> None:
        """Begin a job whose input has been sent."""
        _, stage, microbatch, kind = key
        before = self.latest.get((kind, stage)) if microbatch else None
        job = _Job(key, self.tasks.of(kind, stage, microbatch), self.priorities.keys[key], before)
        self.latest[kind, stage] = job
        self._await(job)

    def _await(self, job: _Job) -> None:
        heappush(self.pending, (self.clock.needed(job.tasks[job.done].node), next(self.number), job))

    def _make_ready(self, job: _Job) -> None:
        heappush(self.ready, (job.priority, next(self.number), job))

    def _choose(self) -> _Job | None:
        """Take the first ready job whose task may be issued; the others wait for another microbatch, or for room."""
        while self.ready:
            job = heappop(self.ready)[2]
            before = job.before
            if before is not None and before.done < job.tasks[job.done].gate:
                before.blocked = job
            elif not job.done and job.key[3] is _F and not self.room.fits(job.key[1], job.key[2]):
                self.roomless.append(job)
            else:
                return job
        return None

    def _smaller_key_comes(self, job: _Job, time: float) -> bool:
        """Return whether a job of a smaller key can start so soon that it is worth the wait."""
        if not self.priorities.lookahead:
            return False
        latest = time + self.priorities.lookahead * self._cost(job.tasks[job.done].node)
        return any(at < latest and other.priority < job.priority for at, _, other in self.pending)

    def _launch(self, until: float) -> None:
        """Launch exchanges, the smallest key first, until their links have work up to a time."""
        free = self.clock.free[_EXCHANGE]
        while self.launches and min(free, default=0.0) <= until:
            job = heappop(self.launches)[2]
            before = max(free, default=0.0)
            self._issue(job.queue.popleft())
            job.launched += 1
            self.links_may_idle -= max(0.0, self.clock.now - before)
            self.given_up |= self.links_may_idle < 0
            if not job.queue:
                job.launches = -inf
            if job.done < len(job.tasks) and job.launched == job.tasks[job.done].needs:
                self._await(job)

    def _advance(self, job: _Job) -> None:
        """Compute the next task of a job, and let all go on that waits for it."""
        _, stage, microbatch, kind = job.key
        node, at_once, exchanges, weight, *_ = job.tasks[job.done]
        if not job.done and kind is _F:
            self._begin(stage, microbatch)
        job.done += 1
        self._compute(node)
        for other in at_once:
            self._issue(other)
        if weight is not None:
            heappush(self.weights, (microbatch, next(self.number), weight))
            self.room.owe((stage, microbatch))
        if exchanges:
            self._queue(job, exchanges)
        if job.done == len(job.tasks):
            self._end(job, sent=bool(at_once) and at_once[-1].op is _SEND)
        elif job.launched >= job.tasks[job.done].needs:
            self._await(job)
        if job.blocked is not None:
            self._make_ready(job.blocked)
            job.blocked = None

    def _queue(self, job: _Job, exchanges: tuple[Node, ...]) -> None:
        """Let exchanges wait for their launch; those of backwards in the order of microbatches."""
        job.launches = max(job.launches, job.priority)
        if job.key[3] is _I and job.before is not None:
            job.launches = max(job.launches, job.before.launches)
        job.queue.extend(exchanges)
        for _ in exchanges:
            heappush(self.launches, (job.launches, next(self.number), job))

    def _begin(self, stage: int, microbatch: int) -> None:
        """Take the room of a forward; in the first stage the next microbatch follows."""
        if self.room.take(stage, microbatch):
            self._retry()
        if not stage and microbatch + 1 < self.microbatches:
            self._open((0, 0, microbatch + 1, _F))

    def _end(self, job: _Job, *, sent: bool) -> None:
        """Open what a job's end allows on this rank; a backward gives back its room, but for its weight gradients."""
        _, stage, microbatch, kind = job.key
        job.before = None
        self.left -= 1
        if kind is _F:
            if not sent:
                last = stage + 1 == self.tasks.chains.placement.stages
                self._open((0, stage, microbatch, _I) if last else (0, stage + 1, microbatch, _F))
            return
        if stage and not sent:
            self._open((0, stage - 1, microbatch, _I))
        self.room.end((stage, microbatch))
        self._retry()

    def _retry(self) -> None:
        for job in self.roomless:
            self._make_ready(job)
        self.roomless.clear()


def schedule_by_priorities(
    microbatches: int, tasks: Tasks, priorities: Priorities, limit: float = inf
) -> tuple[list[list[Node]], float]:
    """Return the nodes of every rank in issue order, and the time of the step.

    The time is infinite if it is known before the end that it is beyond the limit; then nodes are missing.
    """
    clocks: list[Clock] = []
    schedulers = [
        PriorityScheduler(rank, microbatches, tasks, priorities, clocks, limit)
        for rank in range(tasks.chains.placement.ranks)
    ]
    return run_together(schedulers, tasks.chains)
