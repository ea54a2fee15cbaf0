"""Play the nodes of a plan, one after another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from overlap1f1b.plan import OF_PARAMETERS, RECOMPUTES, RESOURCE_OF, Node, Op, Place, Resource
from overlap1f1b.play import posting
from overlap1f1b.play.block import BlockRun
from overlap1f1b.play.feed import MicrobatchKey
from overlap1f1b.play.gradients import accumulate
from overlap1f1b.play.microbatch import Microbatch
from overlap1f1b.play.observers import Observers
from overlap1f1b.play.passage import Phase
from overlap1f1b.play.times import Times
from overlap1f1b.reduce.links import Links
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.failures import LostRankError
from overlap1f1b.transport.lanes import Flight
from overlap1f1b.transport.limits import DRAIN_S


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
            self._live.add(microbatch)
            self._held.add(microbatch)
            self.most = max(self.most, len(self._live))
            self.most_held = max(self.most_held, len(self._held))

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
        self._position: int | None = None  # of the current node in the list
        self._sends: deque[Flight[None]] = deque()
        self._late: deque[int] = deque()  # positions of weight gradients that may be played before their turn
        self._early: set[int] = set()  # of those that were

    @property
    def _each(self) -> Callable[[Node], None]:
        looked_at = self.observers.before or self.observers.after or self.times.watch is not None
        return self._tell if looked_at else self._play

    @property
    def place(self) -> str | None:
        """The current node, or the last; None before the first."""
        at = self._position
        return None if at is None else f"at {self.times.nodes[at]}, position {at} of its plan"

    def play(self, microbatches: Mapping[MicrobatchKey, Microbatch]) -> None:
        """Play all nodes, then wait for the sends that nobody here waited for.

        ``microbatches`` are given by the numbers of stage and microbatch.

        After an error every suspended forward is unwound, and the exchanges in flight get a second to end.
        """
        nodes, failures, self._microbatches = self.times.nodes, self.links.failures, microbatches
        if self.links.fills and self.times.watch is None and not self.observers.keep_order:
            weights = (at for at, node in enumerate(nodes) if node.kind is Kind.W and node.resource is Resource.COMPUTE)
            self._late.extend(weights)
        each = self._each
        try:
            for self._position, node in enumerate(nodes):
                if failures.lost is not None:  # transfers bring nothing any more
                    raise LostRankError(failures.lost)
                if self._position not in self._early:
                    each(node)
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

    def _tell(self, node: Node) -> None:
        """Play a node while somebody looks on, or a device computes behind the thread."""
        times, observers = self.times, self.observers
        for tell in observers.before:
            tell(node)
        if times.watch is not None:
            times.since = time.perf_counter()
        self._play(node)
        if times.watch is not None:
            times.launched(node)
        for tell in observers.after:
            tell(node)

    def _play(self, node: Node) -> None:
        """Start a transfer; or compute, behind the transfers that bring the node's input."""
        if RESOURCE_OF[node.op] is not Resource.COMPUTE:
            for tell in self.observers.ready:
                tell(node, {})
            self._start_transfer(node)
            return
        microbatch, times = self._microbatches[node.stage, node.microbatch], self.times
        if node.kind is Kind.F:
            self.alive.begin(microbatch)
        # 1. Wait for the exchange or transfer before it, perhaps with other weight gradients.
        received: dict[Place, Any] = {}
        if node.op not in RECOMPUTES and node.kind is not Kind.W:
            coming, receiving = microbatch.transfers.coming(node), microbatch.transfers.receives.get(node.kind)
            if coming or receiving is not None:
                if self._late:
                    self._fill((*coming.values(), *(() if receiving is None else (receiving,))))
                received = microbatch.await_input(node.kind, coming)
        gathers = self.links.gathers
        if gathers is not None and (gather := gathers.coming(node)) is not None:
            self._fill((gather,))
            gathers.take(node)
            for tell in self.observers.after:
                tell(gather.node)
        for tell in self.observers.ready:
            tell(node, received)
        # 2. Compute.
        begun = times.stamp()
        compute(node, microbatch, received)
        times.computed(node, begun)
        # 3. Release a microbatch that has ended.
        if microbatch.phase is Phase.WEIGHTS:
            self.alive.end(microbatch)

    def _fill(self, flights: Iterable[Flight[Any]]) -> None:
        """Play weight gradients early, in plan order, until the flights have arrived or none is ready."""
        now, late, nodes = self._position, self._late, self.times.nodes
        assert now is not None
        for flight in flights:
            while late and not flight.arrived:
                if late[0] > now:
                    node = nodes[late[0]]
                    microbatch = self._microbatches.get((node.stage, node.microbatch))
                    if microbatch is None or (node.op, node.block, node.call) not in microbatch.queues:
                        return
                    self._position = late[0]
                    self._early.add(self._position)
                    self._each(node)
                    self._position = now
                late.popleft()

    def _start_transfer(self, node: Node) -> None:
        """Start a reduction, a gather, a transfer between stages, or an exchange; release what was gathered."""
        links, flights = self.links, self.times.flights
        if node.op is Op.REDUCE:
            for reduction in links.reductions:
                flights += reduction.launch(node)
        elif node.op in OF_PARAMETERS:
            assert links.gathers is not None
            if node.op is Op.GATHER:
                flights.append(links.gathers.launch(node))
            else:
                links.gathers.release(node)
        elif RESOURCE_OF[node.op] is Resource.PEER:
            flights.append(self._send_or_receive(node))
        else:
            flights.append(self._launch_exchange(node))

    def _send_or_receive(self, node: Node) -> Flight[Any]:
        """Start a send to a neighbouring stage, or take the receive from one (on a device: start it)."""
        boundary = self.links.boundary
        assert boundary is not None
        microbatch = self._microbatches[node.stage, node.microbatch]
        if node.op is Op.RECEIVE:
            receiving = microbatch.transfers.receives[node.kind] = boundary.receive(node)
            return receiving
        while self._sends and self._sends[0].arrived:  # an earlier one's buffers are free
            self._sends.popleft().wait()
        send = boundary.send(node, *microbatch.take_passed(node.kind))
        self._sends.append(send)
        return send

    def _launch_exchange(self, node: Node) -> Flight[Any]:
        microbatch = self._microbatches[node.stage, node.microbatch]
        flying, times = microbatch.transfers.exchanges[node.kind], self.times
        counts = flying.get((Op.COUNTS, node.call, node.part)) if node.op is Op.DISPATCH else None
        if times.watch is not None:
            times.since = time.perf_counter()
        lane_op, post = posting.post(node, microbatch)
        flight = flying[node.place] = self.links.lanes[lane_op, node.kind].launch(node, post)
        if counts is not None:
            times.since = max(times.since, counts.read)
        return flight


def compute(node: Node, microbatch: Microbatch, received: Mapping[Place, Any]) -> None:
    """Carry out a compute node; ``received`` are the rows that the exchanges before it brought, if there are any."""
    if node.kind is Kind.W:
        accumulate(microbatch.queues.pop((node.op, node.block, node.call)).compute())
        return
    run = microbatch.runs.get(node.block)
    if run is None:
        run = microbatch.runs[node.block] = BlockRun(microbatch, node.block)
    if node.op in RECOMPUTES:
        run.recompute(node.op)
    elif node.kind is Kind.F:
        run.run_forward(received)
    else:
        run.run_backward(received)
    if run.ended:
        del microbatch.runs[node.block]
