"""The order of a rank's nodes, by a beam search: the best beginnings of a step go on side by side.

Contract: :func:`search` returns every node of a step once, in issue order. The result depends on the arguments alone,
so it is the same on all ranks. Backwards come in the program's order of microbatches, so sums have one order. No limit
that the program declares is exceeded, and at most k consecutive actions are open.

A beginning of a step says which nodes each lane has played, in their order: compute is one lane, exchanges of rows are
the other. In every round::

    1. each beginning finds the lane on which a next node can end first        (Giffler and Thompson's active schedules)
    2. each node that this lane could begin before that makes a beginning that is one node longer
    3. of beginnings that have played the same nodes, the few stay that no other is ahead of
    4. of all beginnings the ``width`` stay whose bounds are the smallest: no step that begins so ends earlier

Some order of this kind is the fastest. Of equal bounds the smaller is that of the lanes that have been idle for less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import add, itemgetter
from random import Random
from typing import NamedTuple

from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import RECOMPUTES, RESOURCE_OF, Node, Op, Resource, awaited_by
from overlap1f1b.schedule import Action, Kind, Program

_FOREVER = float("inf")
_F, _I, _W = Kind.F, Kind.I, Kind.W
_SCORE = itemgetter(0)
_TASK, _ROW, _WEIGHT = range(3)
IDLE = 0.05
"""Weight of the time in which lanes were idle, beside the bound."""
ALIKE = 4
"""Beginnings that stay of those that have played the same nodes."""


class _Task(NamedTuple):
    """A node of compute on a microbatch's way through the stages and back.

    Args:
        node: Of microbatch 0.
        time: Its time.
        needs: Exchanges of the way that must be there before it; of a recomputation, that must be launched.
        gate: Tasks that the microbatch before must have played, so that sums keep their order.
        ends: Tasks of the way when its action ends.
        counts: Of each exchange behind it, the nodes of its counts and their time.
        weight: Its weight gradient, if there is one, and the time of that.
        limited: Whether its action begins or ends with it, or it is a recomputation.
        rest: Least time from its end to the end of the step.
    """

    node: Node
    time: float
    needs: int
    gate: int
    ends: int
    counts: tuple[tuple[tuple[Node, ...], float], ...]
    weight: Node | None
    gradient: float
    limited: bool
    rest: float = 0.0


class _Row(NamedTuple):
    """An exchange of rows on a microbatch's way: its time on every link, and the number of tasks before it."""

    node: Node
    times: tuple[float, ...]
    behind: int


class _Job(NamedTuple):
    """How far a microbatch is on its way.

    Args:
        done: Tasks that are played.
        sent: Exchanges that are played.
        end: End of the last task.
        taken: Exchanges that tasks have waited for.
        arrivals: Ends of the others that are played.
        waiting: Times from which on further exchanges could begin.
        ready: Time from which on the next task can begin; infinite while an exchange is not played.
    """

    done: int = 0
    sent: int = 0
    end: float = 0.0
    taken: int = 0
    arrivals: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()
    ready: float = 0.0


class _Lanes(NamedTuple):
    """Times from which on lanes are free, and what they have to do.

    Args:
        compute: Time at which compute is free.
        exchange: Times at which the links are free.
        control: Time at which counts can travel.
        weights: Weight gradients that wait: job and task of each.
        tasks: Time of the tasks to come.
        gradients: Time of the weight gradients to come.
        rows: Time of the exchanges to come, on each link.
        ended: Actions at the begin of the program's order that have ended.
    """

    compute: float
    exchange: tuple[float, ...]
    control: float
    weights: tuple[tuple[int, int], ...]
    tasks: float
    gradients: float
    rows: tuple[float, ...]
    ended: int


class _Beginning(NamedTuple):
    """A beginning of a step, and the node that it has played last.

    Args:
        score: What the smallest of is the best.
        bound: Lower bound of the step.
        idle: Time in which lanes were idle.
        jobs: How far each microbatch is.
        lanes: How far the lanes are.
        first: The first job that has not ended.
        begun: Number of jobs that have begun.
        played: The sum of numbers that stand for the nodes.
        before: The same without its last node: a task or exchange of ``job``, or a weight gradient, from ``start`` on.
    """

    score: float
    bound: float
    idle: float
    jobs: tuple[_Job, ...]
    lanes: _Lanes
    first: int = 0
    begun: int = 0
    played: int = 0
    before: _Beginning | None = None
    what: int = _TASK
    job: int = 0
    start: float = 0.0


def search(
    program: Program,
    chains: Chains,
    costs: NodeCosts,
    open_actions: int,
    width: int,
    *,
    peak: int,
    deferred: int = 1,
    counts_block: bool = False,
) -> list[Node] | None:
    """Return the nodes of the only rank in issue order; None if no beginning leads to the end.

    It is None, too, if the program sums weight gradients in another order of microbatches than input gradients.

    Args:
        program: A checked program.
        chains: Nodes of its actions.
        costs: Costs of the nodes; launches are free.
        open_actions: k, the number of consecutive actions that are open at once.
        width: Beginnings that go on side by side.
        peak: Live (stage, microbatch), at most as many as the program declares.
        deferred: Number of them, beyond the live ones, that may wait for weight gradients alone. Unused if the program
            places weight gradients itself, since its activations then include them.
        counts_block: Whether the host waits for counts: then a dispatch is issued when they have arrived.
    """
    found = _Search(program, chains, costs, open_actions, peak, deferred)
    return found.run(width, counts_block=counts_block) if found.possible else None


class _Search:
    def __init__(
        self, program: Program, chains: Chains, costs: NodeCosts, open_actions: int, peak: int, deferred: int
    ) -> None:
        self.open_actions, self.peak, self.trains = open_actions, peak, not program.forward_only
        self.split = program.splits(0)
        self.held = peak + (0 if self.split else deferred)
        self.late = program.peak_weights[0] if self.split and program.peak_weights else _FOREVER
        self.tasks: list[_Task] = []
        self.rows: list[_Row] = []
        self.begins: dict[int, tuple[Kind, int]] = {}  # kind and stage of the action that begins with a task
        stages = program.placement.stages
        for kind in (_F, _I) if self.trains else (_F,):
            for stage in range(stages) if kind is _F else reversed(range(stages)):
                self._add(Action(kind, stage, 0), chains, costs)
        links = max((len(row.times) for row in self.rows), default=1)
        self.rows = [row._replace(times=row.times * (links // len(row.times))) for row in self.rows]
        self._look_ahead()
        ending = (Kind.B, _I) if self.trains else (_F,)
        orders = {
            tuple(action.microbatch for action in program.actions(0) if action.stage == stage and action.kind in kinds)
            for stage in range(stages)
            for kinds in (ending, (Kind.B, _W if self.trains else _F))
        }
        self.microbatches, *others = orders
        self.possible = not others
        if others:
            return
        self._order(program)
        count, draw = len(self.microbatches), Random(0)
        self.size = count * (len(self.tasks) + len(self.rows) + sum(task.weight is not None for task in self.tasks))
        self.marks = [
            [[draw.getrandbits(60) for _ in of] for of in (self.tasks, self.rows, self.tasks)] for _ in range(count)
        ]
        load = [count * sum(times) for times in zip(*(row.times for row in self.rows), strict=True)] or [0.0]
        lanes = _Lanes(
            0.0,
            (0.0,) * links,
            0.0,
            (),
            count * sum(task.time for task in self.tasks),
            count * sum(task.gradient for task in self.tasks),
            tuple(load),
            0,
        )
        self.start = _Beginning(0.0, 0.0, 0.0, (_Job(),) * count, lanes)

    # ------------------------------------------------------------------------------------------ a microbatch's way

    def _add(self, action: Action, chains: Chains, costs: NodeCosts) -> None:
        """Add the tasks and exchanges of an action."""
        nodes, first = chains.of(action), len(self.tasks)
        at = [index for index, node in enumerate(nodes) if RESOURCE_OF[node.op] is Resource.COMPUTE]
        own, sent = [nodes[index] for index in at], list[Node]()
        self.begins[first] = action.kind, action.stage
        for number, (begin, end) in enumerate(zip(at, [*at[1:], len(nodes)], strict=True)):
            node, behind = nodes[begin], nodes[begin + 1 : end]
            shape, needs, gate = chains.shapes[action.stage][node.block], len(self.rows), first + number + 1
            if node.op is Op.EXPERTS and not shape.exchanges:  # each part needs its own; the parts pass together
                gate = first + own.index(node._replace(part=shape.parts - 1 if action.kind is _F else 0)) + 1
                places = [other.place if other.block == node.block else None for other in sent]
                needs += places.index(awaited_by(node)) + 1 - len(sent)
            rows = [other for other in behind if RESOURCE_OF[other.op] is Resource.EXCHANGE]
            counted = [other for other in behind if other.op is Op.COUNTS]
            counts: list[tuple[tuple[Node, ...], float]] = [((count,), costs(count)) for count in counted]
            behind_it = tuple(counts or [((), 0.0)] * len(rows))
            weight = chains.weight(node)
            gradient = 0.0 if weight is None else costs(weight)
            limited = number in (0, len(at) - 1) or node.op in RECOMPUTES
            self.tasks.append(
                _Task(node, costs(node), needs, gate, first + len(at), behind_it, weight, gradient, limited)
            )
            self.rows += [_Row(row, costs.links(row), len(self.tasks)) for row in rows]
            sent += rows

    def _look_ahead(self) -> None:
        """Find what must come behind each task, and behind the last exchange."""
        rest, self.behind = max(task.gradient for task in self.tasks[-1:]), 0.0
        for at in reversed(range(len(self.tasks))):
            task = self.tasks[at] = self.tasks[at]._replace(rest=rest)
            if task.needs == len(self.rows):
                self.behind = rest + task.time
            rest += task.time
            before = self.tasks[at - 1].needs if at else 0
            if task.node.op not in RECOMPUTES and before < task.needs and self.tasks[at - 1].node.op not in RECOMPUTES:
                rest += max(max(row.times) for row in self.rows[before : task.needs])

    def _order(self, program: Program) -> None:
        """Take the program's order of actions: for each its job, first task, and number of tasks at its end."""
        jobs = {microbatch: job for job, microbatch in enumerate(self.microbatches)}
        firsts = {action: first for first, action in self.begins.items()}
        self.actions: list[tuple[int, int, int, bool]] = []
        self.places: dict[tuple[int, int], int] = {}
        for kind, stage, microbatch, _ in program.actions(0):
            if kind is not _W:
                first = firsts[_F if kind is _F else _I, stage]
                self.places[jobs[microbatch], first] = len(self.actions)
                self.actions.append((jobs[microbatch], first, self.tasks[first].ends, kind is _F))
        self.alive = [0] * (len(self.tasks) + 1)  # stages of a job that are alive before each task
        for first, (kind, stage) in self.begins.items():
            if kind is _F and self.trains:
                for at in range(first + 1, self.tasks[firsts[_I, stage]].ends):
                    self.alive[at] += 1

    # ------------------------------------------------------------------------------------------------ the search

    def run(self, width: int, *, counts_block: bool) -> list[Node] | None:
        stay = [self.start]
        for _ in range(self.size):
            alike: dict[int, list[_Beginning]] = {}
            for one in stay:
                for longer in self._longer(one):
                    alike.setdefault(longer.played, []).append(longer)
            stay = []
            for several in alike.values():
                stay += several if len(several) == 1 else _ahead(several)
            if len(stay) > width:
                stay.sort(key=_SCORE)
                del stay[width:]
        best = min(stay, key=_SCORE, default=None)
        return None if best is None else self._issued(best, counts_block=counts_block)

    def _longer(self, one: _Beginning) -> Iterator[_Beginning]:
        """Yield the beginnings that are one node longer, on the lane whose next node can end first."""
        jobs, tasks, rows, lanes = one.jobs, self.tasks, self.rows, one.lanes
        compute, exchange = lanes.compute, lanes.exchange
        computes, travels = list[tuple[float, float, int]](), list[tuple[float, float, int]]()  # start, end, and job
        computed = travelled = _FOREVER  # first ends on both lanes
        before = _ALL
        for number in range(one.first, min(len(jobs), one.begun + 1)):
            job = jobs[number]
            if job.waiting and before.sent > job.sent:
                start, times = job.waiting[0], rows[job.sent].times
                end = max(
                    [(start if start > free else free) + time for free, time in zip(exchange, times, strict=True)]
                )
                travelled = min(travelled, end)
                travels.append((max(start, min(exchange)), end, number))
            start = job.ready
            if start < _FOREVER:
                task = tasks[job.done]
                if before.done >= task.gate and (not task.limited or self._is_allowed(one, number, task)):
                    start = max(start, compute)
                    end = start + task.time
                    computed = min(computed, end)
                    computes.append((start, end, number))
            before = job
        if lanes.weights:
            number, at = lanes.weights[0]
            computed = min(computed, compute + tasks[at].gradient)
        if computed <= travelled:
            for start, end, number in computes:
                if start < computed or end == computed:
                    yield self._with_task(one, number, start)
            if lanes.weights:
                yield self._with_weight(one)
        else:
            for start, end, number in travels:
                if start < travelled or end == travelled:
                    yield self._with_row(one, number, start)

    def _is_allowed(self, one: _Beginning, number: int, task: _Task) -> bool:
        """Return whether a task keeps the limits that hold where an action begins or ends.

        Waiting weight gradients hold activations. So they come before what is recomputed, unless the program places
        them.
        """
        jobs, done = one.jobs, one.jobs[number].done
        if task.node.op in RECOMPUTES and one.lanes.weights and not self.split:
            return False
        if done in self.begins:
            older = forwards = 0
            for job, first, end, forward in self.actions[one.lanes.ended : self.places[number, done]]:
                if jobs[job].done < end:
                    older += 1
                    if older >= self.open_actions:
                        return False
                    forwards += forward and jobs[job].done <= first  # it needs room first
            if task.node.kind is _F and self.trains:
                alive = forwards + sum([self.alive[jobs[job].done] for job in range(one.first, one.begun)])
                if alive >= self.peak or alive + len(self._late(one)) >= self.held:
                    return False
        if done + 1 == task.ends and task.node.kind is _I and self.late < _FOREVER:
            place = self.places[number, next(first for first in reversed(self.begins) if first <= done)]
            older = sum(
                jobs[job].done < end and not forward for job, _, end, forward in self.actions[one.lanes.ended : place]
            )
            return len(self._late(one)) + older < self.late
        return True

    def _late(self, one: _Beginning) -> set[tuple[int, int]]:
        """Return the jobs, with the ends of their backwards, that wait for weight gradients alone."""
        ends = ((job, self.tasks[at].ends) for job, at in one.lanes.weights)
        return {(job, end) for job, end in ends if one.jobs[job].done >= end}

    def _with_task(self, one: _Beginning, number: int, start: float) -> _Beginning:
        done, sent, _, taken, arrivals, waiting, _ = one.jobs[number]
        compute, exchange, control, weights, tasks, gradients, rows, ended = one.lanes
        task = self.tasks[done]
        end = start + task.time
        if task.needs > taken and task.node.op not in RECOMPUTES:
            arrivals, taken = arrivals[task.needs - taken :], task.needs
        for _, counts in task.counts:
            if counts:
                control = max(control, end) + counts
            waiting = (*waiting, control if counts else end)
        if task.weight is not None:
            weights = (*weights, (number, done))
        played = one.played + self.marks[number][_TASK][done]
        done += 1
        ready = self._ready(done, sent, end, taken, arrivals)
        jobs = (*one.jobs[:number], _Job(done, sent, end, taken, arrivals, waiting, ready), *one.jobs[number + 1 :])
        if done == task.ends:
            while ended < len(self.actions) and jobs[self.actions[ended][0]].done >= self.actions[ended][2]:
                ended += 1
        first, begun = one.first, max(one.begun, number + 1)
        while first < begun and jobs[first].done == len(self.tasks):
            first += 1
        tasks -= task.time
        lanes = _Lanes(end, exchange, control, weights, tasks, gradients, rows, ended)
        bound = max(one.bound, end + tasks + gradients, end + task.rest)
        idle = one.idle + start - compute
        score = bound + IDLE * idle
        return _Beginning(score, bound, idle, jobs, lanes, first, begun, played, one, _TASK, number, start)

    def _with_row(self, one: _Beginning, number: int, start: float) -> _Beginning:
        done, sent, end, taken, arrivals, waiting, _ = one.jobs[number]
        times, free, tasks = self.rows[sent].times, one.lanes.exchange, self.tasks
        ready = waiting[0]
        exchange = tuple([(ready if ready > at else at) + time for at, time in zip(free, times, strict=True)])
        arrival = max(exchange)
        rows = tuple([left - time for left, time in zip(one.lanes.rows, times, strict=True)])
        played = one.played + self.marks[number][_ROW][sent]
        sent, arrivals = sent + 1, (*arrivals, arrival)
        job = _Job(done, sent, end, taken, arrivals, waiting[1:], self._ready(done, sent, end, taken, arrivals))
        jobs = (*one.jobs[:number], job, *one.jobs[number + 1 :])
        behind = self.behind if max(rows) > 1e-9 else 0.0
        bound = max(one.bound, max(map(add, exchange, rows)) + behind, arrival + tasks[done].time + tasks[done].rest)
        idle = one.idle + sum(exchange) - sum(free) - sum(times)
        compute, _, control, weights, left, gradients, _, ended = one.lanes
        lanes = _Lanes(compute, exchange, control, weights, left, gradients, rows, ended)
        score = bound + IDLE * idle
        return _Beginning(score, bound, idle, jobs, lanes, one.first, one.begun, played, one, _ROW, number, start)

    def _with_weight(self, one: _Beginning) -> _Beginning:
        (number, at), *_ = one.lanes.weights
        start, exchange, control, weights, tasks, gradients, rows, ended = one.lanes
        end, gradients = start + self.tasks[at].gradient, gradients - self.tasks[at].gradient
        lanes = _Lanes(end, exchange, control, weights[1:], tasks, gradients, rows, ended)
        bound = max(one.bound, end + tasks + gradients)
        played = one.played + self.marks[number][_WEIGHT][at]
        score = bound + IDLE * one.idle
        return _Beginning(
            score, bound, one.idle, one.jobs, lanes, one.first, one.begun, played, one, _WEIGHT, number, start
        )

    def _ready(self, done: int, sent: int, end: float, taken: int, arrivals: Sequence[float]) -> float:
        """Return the time from which on the next task of a job can begin."""
        if done == len(self.tasks) or self.tasks[done].needs > sent:
            return _FOREVER
        task = self.tasks[done]
        if task.needs > taken and task.node.op not in RECOMPUTES:
            return max(end, arrivals[task.needs - 1 - taken])
        return end

    # ------------------------------------------------------------------------------------------ the order of nodes

    def _issued(self, one: _Beginning, *, counts_block: bool) -> list[Node]:
        """Return the nodes in issue order: an exchange follows its producer at once, behind those before on its lane.

        A dispatch whose counts hold up the host comes where they have arrived.
        """
        computed: list[tuple[int, int, int, float]] = []  # kind, job, task or exchange, and start
        launched: list[tuple[int, int, float]] = []  # job, exchange, and when it could start
        while one.before is not None:
            before, of = one.before, one.before.jobs[one.job]
            if one.what == _ROW:
                launched.append((one.job, of.sent, of.waiting[0]))
            else:
                at = before.lanes.weights[0][1] if one.what == _WEIGHT else of.done
                computed.append((one.what, one.job, at, one.start))
            one = before
        order: list[Node] = []
        done = [0] * len(self.microbatches)
        sent = [0] * len(self.microbatches)

        def launch(until: float, needs: int = 0, by: int = 0) -> None:
            """Launch what can be by now, and in any case so many exchanges of a job."""
            while launched:
                job, row, ready = launched[-1]
                node = self.rows[row].node
                blocks = counts_block and node.op is Op.DISPATCH and node.kind is _F and ready > until
                if sent[by] >= needs and (blocks or self.rows[row].behind > done[job]):
                    return
                order.append(node._replace(microbatch=self.microbatches[job]))
                sent[job] += 1
                launched.pop()

        for what, job, at, start in reversed(computed):
            task, microbatch = self.tasks[at], self.microbatches[job]
            launch(start, task.needs if what == _TASK else 0, job)
            if what == _WEIGHT:
                assert task.weight is not None
                order.append(task.weight._replace(microbatch=microbatch))
                continue
            order.append(task.node._replace(microbatch=microbatch))
            order += [count._replace(microbatch=microbatch) for counts, _ in task.counts for count in counts]
            done[job] += 1
        launch(_FOREVER)
        return order


_ALL = _Job(done=1 << 60, sent=1 << 60)
"""What comes before the first microbatch."""


def _ahead(several: list[_Beginning]) -> list[_Beginning]:
    """Return the best few of beginnings that have played the same nodes, without those that another is ahead of."""
    several.sort(key=_SCORE)
    kept: list[_Beginning] = []
    for one in several:
        if not any(_is_ahead(other, one) for other in kept):
            kept.append(one)
            if len(kept) == ALIKE:
                break
    return kept


def _is_ahead(one: _Beginning, other: _Beginning) -> bool:
    """Return whether each lane is free, and each job can go on, as early as in another beginning."""
    mine, its = one.lanes, other.lanes
    if mine.compute > its.compute or mine.exchange > its.exchange:
        return False
    return not any(
        (job.ready > same.ready and job.ready > its.compute)
        or (job.waiting > same.waiting and job.waiting[0] > its.exchange[0])
        for job, same in zip(one.jobs[one.first : one.begun], other.jobs[one.first : one.begun], strict=True)
    )
