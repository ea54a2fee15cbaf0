"""List scheduling: several consecutive actions are open at once; the node that can start first comes next."""

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple

from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.clock import Clock, Span
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import RECOMPUTES, RESOURCE_OF, Node, Op, Resource, peer_of
from overlap1f1b.plan.plan import ends_backward, microbatch_of
from overlap1f1b.schedule import Action, Kind, Program

# The innermost loop uses these names, since looking up a member of an Enum runs Python code.
_F, _I, _W = Kind.F, Kind.I, Kind.W
_COMPUTE, _EXPERTS = Resource.COMPUTE, Op.EXPERTS


class RankScheduler(ABC):
    """A list scheduler of one rank, which takes turns with others. The result is the order of nodes, not the times."""

    given_up = False
    """Whether the step is known to end too late; then all ranks stop."""

    def __init__(self, clock: Clock, may_idle: float) -> None:
        self.clock = clock
        self.order: list[Node] = []
        self.worked, self.may_idle = 0.0, may_idle
        """Time of compute so far, and how long a rank may do nothing if the step shall end in time."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether everything has been issued."""

    @abstractmethod
    def step(self, horizon: float) -> float | None:
        """Issue a node of compute that starts by ``horizon``, or return the time until which the rank would wait.

        After ``horizon``, a message of another rank may let an earlier node start. The time is infinite if no input has
        arrived.
        """

    def expect(self, received: Node) -> None:  # noqa: B027  a scheduler in a program's order looks by itself
        """Take note of a message that another rank has sent."""

    def _issue(self, node: Node) -> Span:
        self.order.append(node)
        return self.clock.play(node)

    def _compute(self, node: Node) -> None:
        _, start, end = self._issue(node)
        self.worked += end - start
        self.given_up |= end - self.worked > self.may_idle


class Activations:
    """The (stage, microbatch) of a rank that hold activations.

    Attributes:
        alive: Those between the begin of their forward and the end of their input gradient.
        left: Those and others that have weight gradients to come, each with how much is to come.
    """

    def __init__(self) -> None:
        self.alive: set[tuple[int, ...]] = set()
        self.left: dict[tuple[int, ...], int] = {}

    def begin(self, place: tuple[int, ...]) -> None:
        """A forward begins."""
        self.alive.add(place)
        self.owe(place)

    def owe(self, place: tuple[int, ...]) -> None:
        """A weight gradient has become possible."""
        self.left[place] = self.left.get(place, 0) + 1

    def end(self, place: tuple[int, ...]) -> None:
        """An input gradient has ended; its forward may have run before this order."""
        if place in self.alive:
            self.alive.remove(place)
            self.settle(place)

    def settle(self, place: tuple[int, ...]) -> bool:
        """A weight gradient has ended; return whether nothing holds activations any more."""
        self.left[place] -= 1
        if not self.left[place]:
            del self.left[place]
        return place not in self.left


class _Sums:
    """Lets microbatches pass each node of the backwards in the program's order, so that sums have one order.

    Args:
        actions: Actions of a rank, in the program's order.
        parts: Whether calls of experts have several parts; these pass together, with the first as the last.
    """

    def __init__(self, actions: Sequence[Action], *, parts: bool) -> None:
        self.parts = parts
        self.turn = _turns(actions, (Kind.B, Kind.I))
        self.weight_turn = _turns(actions, (Kind.B, Kind.W))
        self.passed: dict[tuple[object, ...], int] = {}  # microbatches that have passed a node

    def _place(self, node: Node) -> tuple[object, ...]:
        if self.parts and node.op is _EXPERTS:
            node = node._replace(part=0)
        return node[:2] + node[3:]

    def in_turn(self, node: Node, turn: int) -> bool:
        """Return whether so many microbatches, all earlier ones, have passed a node."""
        return self.passed.get(self._place(node), 0) == turn

    def weight_in_turn(self, node: Node) -> bool:
        """Return whether all earlier microbatches have passed a weight gradient."""
        return self.in_turn(node, self.weight_turn[microbatch_of(node)])

    def passes(self, node: Node) -> None:
        """A microbatch passes a node."""
        if node.op is not _EXPERTS or not node.part:
            place = self._place(node)
            self.passed[place] = self.passed.get(place, 0) + 1


class Policy(NamedTuple):
    """The settings of the list scheduler.

    Args:
        open_actions: k, the number of consecutive actions that are open at once.
        counts_block: Whether the host must wait for counts before it launches a dispatch.
        deferred: Number of microbatches, beyond the program's live activations, that may wait for weight gradients
            alone. Unused if the program places weight gradients itself, since its activations then include them.
        patience: Least length of a wait in which a weight gradient is issued, as a fraction of the gradient's time. In
            a shorter wait the gradient would delay the awaited node by more than it saves.
    """

    open_actions: int
    counts_block: bool = False
    deferred: int = 1
    patience: float = 0.0


@dataclass(eq=False, slots=True)
class _Open:
    """An action whose nodes are being issued.

    Args:
        action: The action.
        chain: Its nodes that were not issued yet when it opened.
        turn: Position of its microbatch in the order in which gradients are summed.
        needs: Actions of this rank that must end before it begins.
    """

    action: Action
    chain: tuple[Node, ...]
    turn: int
    needs: tuple[tuple[bool, int, int, int], ...]
    issued: int = 0
    begun: bool = False  # whether it has computed
    next: Node = field(init=False)
    ended: bool = field(init=False)
    launches: bool = field(init=False)
    """Whether the next node is launched, and not computed."""

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> None:
        """Look at what comes next: the innermost loop only reads it."""
        self.ended = self.issued == len(self.chain)
        if not self.ended:
            self.next = self.chain[self.issued]
        self.launches = not self.ended and RESOURCE_OF[self.next.op] is not _COMPUTE


class ListScheduler(RankScheduler):
    """A list scheduler in a program's order of actions.

    - Among the next nodes of the open actions, it issues the node that can start first; on a tie the shorter, whose
      exchange can then travel behind the other; then the node of the older action.
    - A launch follows its producer at once. If the host must wait for counts, a dispatch follows when they have
      arrived and the device has enough work queued for the wait, or when there is nothing else to do.
    - Weight gradients are issued in waits of the compute resource, when a forward needs their room, and where the
      program places them. At most ``peak`` microbatches are between forward and backward, and at most
      ``policy.deferred`` more wait for weight gradients.
    - Waiting weight gradients hold activations. So with recomputation, if the program does not place weight gradients,
      the waiting ones are issued first.

    There is always a node to issue, or one to wait for from another rank: the oldest open action needs nothing of the
    younger ones, which leave room for it, and a weight gradient makes room. The same holds for input gradients if the
    program limits how many weight gradients may wait.

    Args:
        actions: Actions of this rank, in the program's order.
        chains: Nodes of the actions.
        costs: Costs of the nodes.
        policy: Settings of the scheduler.
        peak: Live activations that the program declares for this rank.
        clocks: Clocks of the ranks before this one.
        peak_weights: Waiting weight gradients that it declares, for backwards that it splits.
        may_idle: See :class:`RankScheduler`.
    """

    def __init__(
        self,
        actions: Iterable[Action],
        chains: Chains,
        costs: NodeCosts,
        policy: Policy,
        peak: int,
        clocks: list[Clock] | None = None,
        peak_weights: float = inf,
        may_idle: float = inf,
    ) -> None:
        clock = Clock(costs, counts_block=policy.counts_block, placement=chains.placement, clocks=clocks)
        super().__init__(clock, may_idle)
        self.chains, self.policy, self.peak, self.peak_weights = chains, policy, peak, peak_weights
        self.waiting = deque(actions)
        self.open: list[_Open] = []
        self.weights: dict[Node, None] = {}  # in the order in which they became possible
        self.issued_weights: set[Node] = set()
        self.unfinished = {_direction(action) for action in self.waiting if action.kind is not Kind.W}
        self.split = {microbatch_of(action) for action in self.waiting if action.kind is Kind.W}
        self.held = Activations()
        self.sums = _Sums(self.waiting, parts=any(block.parts > 1 for shape in chains.shapes for block in shape))

    def run(self) -> list[Node]:
        """Return the nodes in issue order, for a rank that needs nothing of other ranks."""
        while not self.ended:
            waits = self.step(inf)
            assert waits is None, "a plan always has a node that can be issued"
        return self.order

    @property
    def ended(self) -> bool:
        return self.given_up or not (self.open or self.waiting or self.weights)

    def step(self, horizon: float) -> float | None:
        self._open_next()
        self._launch()
        if self.ended:
            return None
        chosen, until = self._choose()
        if until > self.clock.now and (self._fill(until) or self._await_counts(until)):
            return None
        if chosen is None or until > max(horizon, self.clock.now):
            return until
        if chosen.next.op in RECOMPUTES and not self.split and self._fill(inf):
            return None
        self._advance(chosen)
        self._launch()
        return None

    def _open_next(self) -> None:
        while self.waiting and len(self.open) < self.policy.open_actions:
            action = self.waiting.popleft()
            chain = self.chains.of(action)
            if action.kind is _W:  # some of its nodes may have been issued in waits
                chain = tuple(node for node in chain if node not in self.issued_weights)
            if chain:
                turns = self.sums.weight_turn if action.kind is _W else self.sums.turn
                turn = turns.get(microbatch_of(action), 0)
                self.open.append(_Open(action, chain, turn, tuple(map(_direction, self.chains.local_needs(action)))))

    def _launch(self) -> None:
        for entry in [entry for entry in self.open if entry.launches]:
            while entry.launches:
                if self.policy.counts_block and self._awaits_counts(entry.next) and not self._may_wait(entry.next):
                    break
                self._advance(entry)

    def _may_wait(self, dispatch: Node) -> bool:
        """Return whether the host may wait for the counts of a dispatch now.

        They have come by the time that the device has computed what is queued, and with launch costs earlier: the
        device has work until the dispatch and the compute behind it are launched. Otherwise the dispatch comes behind
        another node of compute, unless the exchange is idle and would lose more than the compute gains.
        """
        clock, needed = self.clock, self.clock.needed(dispatch)
        launch = clock.launch.get((dispatch.op, dispatch.kind), 0.0)
        if needed > clock.now or not launch:
            return needed <= clock.now
        idle = max(clock.free[Resource.EXCHANGE], default=0.0) <= clock.now
        following = (entry.next for entry in self.open if not entry.launches)
        lead = launch + max((clock.launch.get((node.op, node.kind), 0.0) for node in following), default=launch)
        return idle or max(needed, clock.host) + lead <= clock.computed

    def _awaits_counts(self, node: Node) -> bool:
        return self.policy.counts_block and node.op is Op.DISPATCH and node.kind is _F

    def _choose(self) -> tuple[_Open | None, float]:
        """Return the action whose next node can start first (on a tie the shorter, then the older), and its start."""
        chosen, first, cost = None, inf, 0.0
        older_forwards = 0  # older forwards that have not begun, and need room first
        older_inputs = 0  # older input gradients that have not ended, and need room first
        for entry in self.open:
            node = entry.next
            if (  # it may run: its limits and the order of sums allow it; and it starts first, or is shorter
                not entry.launches
                and (entry.begun or self._may_begin(entry, older_forwards))
                and (node.kind is _F or self.sums.in_turn(node, entry.turn))
                and (entry.action.kind is not _I or not ends_backward(node) or self._has_room(older_inputs))
                and (start := self.clock.start(node)) <= first
                and ((its := self.clock.cost(node)[0]) < cost or start < first)
            ):
                chosen, first, cost = entry, start, its
            older_forwards += not entry.begun and entry.action.kind is _F
            older_inputs += entry.action.kind is _I
        return chosen, first

    def _may_begin(self, entry: _Open, older_forwards: int) -> bool:
        """Return whether the needed actions of this rank have ended and, for a forward, whether there is room."""
        for needed in entry.needs:
            if needed in self.unfinished:
                return False
        if entry.action.kind is not _F or not self.sums.turn:
            return True
        if len(self.held.alive) + older_forwards >= self.peak:
            return False
        limit = self.peak + (0 if self.split else self.policy.deferred)
        return len(self.held.left) + older_forwards < limit

    def _has_room(self, older_inputs: int) -> bool:
        """Return whether another input gradient may end and leave its weight gradient waiting."""
        if self.peak_weights == inf:
            return True
        late = sum(place in self.split and place not in self.held.alive for place in self.held.left)
        return late + older_inputs < self.peak_weights

    def _advance(self, entry: _Open) -> None:
        """Issue the next node of an open action, and note what begins, becomes possible, or ends with it."""
        node, launches = entry.next, entry.launches
        entry.issued += 1
        entry.look()
        if node.kind is _W:
            self._issue_weight(node)
        elif launches:
            self._issue(node)
        else:
            self._compute(node)
            self._computed(node, first=not entry.begun)
        entry.begun |= not launches
        if entry.ended:
            self.open.remove(entry)
            self.unfinished.discard(_direction(entry.action))
            if node.kind is _I:
                self.held.end(microbatch_of(node))

    def _computed(self, node: Node, *, first: bool) -> None:
        """Note that a forward holds activations from its first node on, or which weight gradient is possible."""
        if node.kind is _I:
            self.sums.passes(node)
            weight = self.chains.weight(node)
            if weight is not None:
                self.weights[weight] = None
                self.held.owe(microbatch_of(node))
        elif first and self.sums.turn:
            self.held.begin(microbatch_of(node))

    def _fill(self, until: float) -> bool:
        """Issue the oldest weight gradient in turn, if there is one and the wait is long enough."""
        node = next(filter(self.sums.weight_in_turn, self.weights), None)
        if node is None or until - self.clock.now < self.policy.patience * self.clock.costs(node):
            return False
        self._issue_weight(node)
        own = [entry for entry in self.open if node in entry.chain] if self.split else []
        for entry in own:  # the program's own W of that microbatch
            entry.chain = tuple(other for other in entry.chain if other != node)
            entry.look()
            if entry.ended:
                self.open.remove(entry)
        return True

    def _issue_weight(self, node: Node) -> None:
        del self.weights[node]
        self.issued_weights.add(node)
        self._compute(node)
        self.sums.passes(node)
        self.held.settle(microbatch_of(node))

    def _await_counts(self, until: float) -> bool:
        """Let the issuing thread wait for counts, if they arrive before any compute node can start."""
        dispatches = [entry for entry in self.open if self._awaits_counts(entry.next)]
        entry = min(dispatches, key=lambda e: self.clock.needed(e.next), default=None)
        if entry is None or self.clock.needed(entry.next) >= until:
            return False
        self._advance(entry)
        return True


def _direction(action: Action) -> tuple[bool, int, int, int]:
    """Return (whether it is a forward, stage, microbatch, pipe), which is equal for a B and its I."""
    return (action.kind is Kind.F, *action[1:])


def _turns(actions: Iterable[Action], kinds: tuple[Kind, ...]) -> dict[tuple[int, int, int], int]:
    """Return the position of each microbatch among the actions of these kinds on its (pipe, stage)."""
    positions: dict[tuple[int, int], Iterator[int]] = defaultdict(count)
    return {microbatch_of(one): next(positions[one.pipe, one.stage]) for one in actions if one.kind in kinds}


def schedule_ranks(
    program: Program,
    chains: Chains,
    costs: NodeCosts,
    policy: Policy,
    limit: float = inf,
    loads: Sequence[float] = (),
) -> tuple[list[list[Node]], float]:
    """Return the nodes of every rank in issue order, all ranks scheduled in one common time, and the time of the step.

    It is infinite if the step would take longer than ``limit``; then nodes are missing. ``loads`` are the times of all
    compute of each rank, which a limit needs.
    """
    clocks: list[Clock] = []  # each scheduler adds its own, and sees those of the others
    may_idle = [limit - load for load in loads] or [inf] * len(program.ranks)
    peaks = zip(program.peak_activations, program.peak_weights or [inf] * len(program.ranks), strict=True)
    schedulers = [
        ListScheduler(program.actions(rank), chains, costs, policy, peak, clocks, peak_weights, may_idle[rank])
        for rank, (peak, peak_weights) in enumerate(peaks)
    ]
    if len(schedulers) > 1:
        return run_together(schedulers, chains)
    schedulers[0].run()
    return _orders(schedulers)


def run_together(schedulers: Sequence[RankScheduler], chains: Chains) -> tuple[list[list[Node]], float]:
    """Let every rank issue its nodes, all in one common time; return them, and the end: infinite if one gave up.

    The rank whose time is earliest issues its next node. It never waits beyond the time of the other ranks, since one
    of them may send a message that lets an earlier node start.
    """
    wakes = [0.0] * len(schedulers)  # time at which each rank looks for a node again
    heap = [(0.0, rank) for rank in range(len(schedulers))]
    while heap:
        wake, rank = heappop(heap)
        scheduler = schedulers[rank]
        if scheduler.given_up:
            return _orders(schedulers)
        if wake != wakes[rank] or scheduler.ended:  # it was woken earlier
            continue
        before = len(scheduler.order)
        waits = scheduler.step(wake)
        wakes[rank] = scheduler.clock.now if waits is None else waits
        if wakes[rank] < inf:
            heappush(heap, (wakes[rank], rank))
        for node in scheduler.order[before:]:
            if node.op is Op.SEND:
                peer = peer_of(node, chains.placement)
                received = chains.receive(node)
                schedulers[peer].expect(received)
                arrival = max(scheduler.clock.arrivals[received.chain].end, schedulers[peer].clock.now)
                if arrival < wakes[peer]:
                    wakes[peer] = arrival
                    heappush(heap, (arrival, peer))
    assert all(scheduler.ended for scheduler in schedulers), "a checked program has no ranks that wait for each other"
    return _orders(schedulers)


def _orders(schedulers: Sequence[RankScheduler]) -> tuple[list[list[Node]], float]:
    clocks = (scheduler.clock for scheduler in schedulers)
    end = max(max(clock.now, *(max(free, default=0.0) for free in clock.free.values())) for clock in clocks)
    given_up = any(scheduler.given_up for scheduler in schedulers)
    return [scheduler.order for scheduler in schedulers], inf if given_up else end
