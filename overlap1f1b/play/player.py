"""Play the nodes of a plan, one after another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from overlap1f1b.plan import Node, Op, Place
from overlap1f1b.plan.turn import MicrobatchKey, Turn, Turns, Way
from overlap1f1b.play import posting
from overlap1f1b.play.block import BlockRun
from overlap1f1b.play.gradients import accumulate
from overlap1f1b.play.microbatch import Microbatch, Phase
from overlap1f1b.play.observers import Observers
from overlap1f1b.play.offload import BlockOffload
from overlap1f1b.play.times import Times
from overlap1f1b.reduce.links import Links
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.failures import LostRankError
from overlap1f1b.transport.lanes import Flight
from overlap1f1b.transport.limits import DRAIN_S

_NOTHING: Mapping[Place, Any] = MappingProxyType({})
_FORWARD, _BACKWARD, _WEIGHTS, _LEFT = Way.FORWARD, Way.BACKWARD, Way.WEIGHTS, Phase.WEIGHTS  # read for every node


class Alive:
    """The microbatches that hold activations, and those that wait for weight gradients alone.

    Attributes:
        most: Most microbatches of a stage that were alive at once.
        most_held: The same, counting those that wait for weight gradients.
    """

    def __init__(self) -> None:
        self._live: set[Microbatch] = set()
        self._held: set[Microbatch] = set()
        self.most = self.most_held = 0

    def begin(self, microbatch: Microbatch) -> None:
        """Count a microbatch whose forward runs."""
        if microbatch not in self._live:
            live, held = self._live, self._held
            live.add(microbatch)
            held.add(microbatch)
            self.most, self.most_held = max(self.most, len(live)), max(self.most_held, len(held))

    def end(self, microbatch: Microbatch) -> None:
        """Release a microbatch whose last input gradient is there, once it has no weight gradients left."""
        self._live.discard(microbatch)
        if not microbatch.queues:
            self._held.discard(microbatch)
            microbatch.finish()


class Player:
    """Plays the nodes of one step in order. While a CPU thread waits, it runs weight gradients early.

    A plan places weight gradients in the gaps that it expects. Where ranks drift apart, other gaps open; a weight
    gradient needs no other rank, and can run as soon as its backward has left it. Sums stay bit-equal.

    Args:
        links: What the engine lends: lanes, the boundary between stages, sums of gradients.
        times: Has the nodes, and gets their times.
        observers: Who looks on.

    Attributes:
        alive: Counts microbatches.
    """

    def __init__(self, links: Links, times: Times, observers: Observers | None = None) -> None:
        self.links, self.times = links, times
        self.observers = observers or Observers()
        self.alive = Alive()
        self._microbatches: Mapping[MicrobatchKey, Microbatch] = {}
        self._begin: Callable[[MicrobatchKey], Microbatch]
        self._turns = Turns()
        looking = self.observers
        looked_at = looking.before or looking.ready or looking.after or links.gathers or links.host or times.watch
        self._handlers = (Player._play_observed,) * len(_HANDLERS) if looked_at else _HANDLERS
        self._position: int | None = None  # of the current turn in the list
        self._sends: deque[Flight[None]] = deque()
        self._late: deque[int] = deque()  # positions of weight gradients that may be played before their turn
        self._early: set[int] = set()  # of those that were

    @property
    def place(self) -> str | None:
        """The current node, or the last; None before the first."""
        at = self._position
        if at is None:
            return None
        node = self._turns[at].node
        return f"at {node}, position {self.times.nodes.index(node)} of its plan"

    def play(
        self,
        turns: Turns,
        microbatches: Mapping[MicrobatchKey, Microbatch],
        begin: Callable[[MicrobatchKey], Microbatch],
    ) -> None:
        """Play all turns, then wait for the sends that nobody here waited for.

        ``microbatches`` has those that were begun, by the numbers of stage and microbatch; ``begin`` adds another.

        After an error every suspended forward is unwound, and the exchanges in flight get a second to end.
        """
        failures, self._turns = self.links.failures, turns
        self._microbatches, self._begin = microbatches, begin
        self.times.untimed = len(self.times.nodes) - len(turns)
        if self.links.fills and self.times.watch is None and not self.observers.keep_order:
            self._late.extend(turns.late)
        handlers, early = self._handlers, self._early
        try:
            for position, turn in enumerate(turns):
                self._position = position
                if failures.lost is not None:  # transfers bring nothing any more
                    raise LostRankError(failures.lost)
                if position not in early:
                    handlers[turn.way](self, turn)
            while self._sends:
                self._sends.popleft().wait()
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        self.links.failures.fail(self.place)
        for microbatch in self._microbatches.values():
            microbatch.stop()
        deadline = time.monotonic() + DRAIN_S
        for flight in self.times.flights:
            flight.drain(max(0.0, deadline - time.monotonic()))

    def _play_observed(self, turn: Turn) -> None:
        """Play a turn while somebody looks on, or a device computes behind the thread."""
        times, observers = self.times, self.observers
        for tell in observers.before:
            tell(turn.node)
        if times.watch is not None:
            times.since = time.perf_counter()
        for tell in observers.ready if turn.way > Way.WEIGHTS else ():
            tell(turn.node, {})
        _HANDLERS[turn.way](self, turn)
        if times.watch is not None:
            times.launched(turn.node)
        for tell in observers.after:
            tell(turn.node)

    def _compute(self, turn: Turn) -> None:
        """Compute, behind the transfers that bring the turn's input."""
        way, times = turn.way, self.times
        microbatch = self._microbatches.get(turn.key) or self._begin(turn.key)
        if way is _FORWARD:
            self.alive.begin(microbatch)
        # 1. Wait for the exchange or transfer before it, perhaps with other weight gradients.
        received: Mapping[Place, Any] = self._await(turn, microbatch) if turn.awaits or turn.receives else _NOTHING
        looked_at = self._handlers is not _HANDLERS
        if looked_at:
            self._tell_ready(turn.node, microbatch.offload_of(turn.block), received)
        # 2. Compute.
        begun = times.stamp()
        if way is _WEIGHTS:
            accumulate(microbatch.queues.pop(queue_of(turn)).compute())
        else:
            run: BlockRun | None = microbatch.runs.get(turn.block)
            if run is None:
                run = microbatch.runs[turn.block] = BlockRun(microbatch, turn.block, turn.stretch)
            if way is _FORWARD:
                run.run_forward(received)
            elif way is _BACKWARD:
                run.run_backward(received)
            else:
                run.recompute(turn.node.op)
            if not run.segments:
                del microbatch.runs[turn.block]
        times.computed(turn.node, begun)
        if looked_at and way is _FORWARD and (offload := microbatch.offload_of(turn.block)) is not None:
            received = _NOTHING  # else it would hold them
            offload.end(turn.node)
        # 3. Release a microbatch that has ended.
        if microbatch.phase is _LEFT:
            self.alive.end(microbatch)

    def _tell_ready(self, node: Node, offload: BlockOffload | None, received: Mapping[Place, Any]) -> None:
        """Take what a compute node that is about to run needs from host memory, and its parameters; tell of it."""
        if offload is not None and node.kind is Kind.I:
            offload.come_back(node)
        gathers = self.links.gathers
        if gathers is not None and (gather := gathers.coming(node)) is not None:
            self._fill((gather,))
            gathers.take(node)
            for tell in self.observers.after:
                tell(gather.node)
        for tell in self.observers.ready:
            tell(node, received)

    def _await(self, turn: Turn, microbatch: Microbatch) -> dict[Place, Any]:
        """Wait for what a turn needs from other ranks; return what its exchanges bring."""
        kind, transfers = turn.node.kind, microbatch.transfers
        flying = transfers.exchanges[kind]
        if self._late:
            flights = [flying[place] for place in turn.awaits]
            self._fill([*flights, transfers.receives[kind]] if turn.receives else flights)
        if turn.receives:
            microbatch.await_input(kind)
        received = {}
        for place in turn.awaits:
            received[place] = flying.pop(place).wait()
        return received

    def _fill(self, flights: Iterable[Flight[Any]]) -> None:
        """Play weight gradients early, in plan order, until the flights have arrived or none is ready."""
        now, late = self._position, self._late
        assert now is not None
        for flight in flights:
            while late and not flight.arrived:
                if late[0] > now:
                    turn = self._turns[late[0]]
                    microbatch = self._microbatches.get(turn.key)
                    if microbatch is None or queue_of(turn) not in microbatch.queues:
                        return
                    self._position = late[0]
                    self._early.add(self._position)
                    self._handlers[turn.way](self, turn)
                    self._position = now
                late.popleft()

    def _start_for_parameters(self, turn: Turn) -> None:
        """Start a reduction or a gather, or release what was gathered."""
        links, node, flights = self.links, turn.node, self.times.flights
        if node.op is Op.REDUCE:
            for reduction in links.reductions:
                flights += reduction.launch(node)
        else:
            assert links.gathers is not None
            if node.op is Op.GATHER:
                flights.append(links.gathers.launch(node))
            else:
                links.gathers.release(node)

    def _send_or_receive(self, turn: Turn) -> None:
        """Start a send to a neighbouring stage, or take the receive from one (on a device: start it)."""
        boundary, node = self.links.boundary, turn.node
        assert boundary is not None
        microbatch = self._microbatches.get(turn.key) or self._begin(turn.key)
        if node.op is Op.RECEIVE:
            receiving = microbatch.transfers.receives[node.kind] = boundary.receive(node)
            self.times.flights.append(receiving)
            return
        while self._sends and self._sends[0].arrived:  # an earlier one's buffers are free
            self._sends.popleft().wait()
        send = boundary.send(node, *microbatch.take_passed(node.kind))
        self._sends.append(send)
        self.times.flights.append(send)

    def _move(self, turn: Turn) -> None:
        """Start to copy activations to host memory or back, or free what has left."""
        node = turn.node
        offload = self._microbatches[turn.key].offload_of(node.block)
        if offload is None:
            return
        segment = offload.segments[node.segment]
        if node.op is Op.FREE:
            segment.free()
            return
        post = segment.leave if node.op is Op.OFFLOAD else segment.fetch
        segment.flight = self.links.lanes[node.op, node.kind].launch(node, post)
        self.times.flights.append(segment.flight)

    def _launch_exchange(self, turn: Turn) -> None:
        """Start an exchange of rows or counts in its lane."""
        node, microbatch, times, counts = turn.node, self._microbatches[turn.key], self.times, None
        flying = microbatch.transfers.exchanges[node.kind]
        if times.watch is not None:
            counts = flying.get((Op.COUNTS, node.call, node.part)) if node.op is Op.DISPATCH else None
            times.since = time.perf_counter()
        lane_op, post = posting.post(turn, microbatch)
        flight = flying[turn.place] = self.links.lanes[lane_op, node.kind].launch(node, post)
        times.flights.append(flight)
        if counts is not None:
            times.since = max(times.since, counts.read)


_HANDLERS = (
    *[Player._compute] * 4,
    Player._launch_exchange,
    Player._send_or_receive,
    Player._start_for_parameters,
    Player._move,
)
"""What plays a turn, by its :class:`~overlap1f1b.plan.turn.Way`; not of a player, which would refer to itself."""


def queue_of(turn: Turn) -> tuple[Op, int, int]:
    """Return the key of the queue of a turn of weight gradients."""
    node = turn.node
    return node.op, node.block, node.call
