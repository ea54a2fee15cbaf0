"""Play the nodes of a plan, one after another."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from overlap1f1b.engine.graph.autograd import accumulate
from overlap1f1b.engine.play.device import StepTimes
from overlap1f1b.engine.play.filler import Filler
from overlap1f1b.engine.play.memory import ByteCount
from overlap1f1b.engine.reduce.fsdp import Gathers
from overlap1f1b.engine.reduce.reduction import Reduction
from overlap1f1b.engine.run import posting
from overlap1f1b.engine.run.again import RecomputedRun
from overlap1f1b.engine.run.microbatch import Microbatch
from overlap1f1b.plan import OF_PARAMETERS, RECOMPUTES, RESOURCE_OF, Node, Op, Place, Resource, Span
from overlap1f1b.schedule import Kind
from overlap1f1b.transport import devices
from overlap1f1b.transport.boundary import Boundary
from overlap1f1b.transport.devices import Watch
from overlap1f1b.transport.exchange import Exchange
from overlap1f1b.transport.failures import Failures, LostRankError
from overlap1f1b.transport.lanes import Flight, Lane, Observer
from overlap1f1b.transport.limits import DRAIN_S

MicrobatchKey = tuple[int, int]
"""Numbers of stage and microbatch."""

Around = Callable[[Node], AbstractContextManager[object]]
Issue = Callable[[Node, Mapping[MicrobatchKey, Microbatch]], None]
Compute = Callable[[Node, Microbatch, Mapping[Place, Any]], None]


class PlayObserver(Observer, Protocol):
    """Observer of a player: it is told of every node that is played."""

    def step(self) -> AbstractContextManager[None]:
        """Return the context of a step."""

    def issuing(self, nodes: Sequence[Node], issue: Issue) -> Issue:
        """Return the function that plays each of these nodes in place of ``issue``."""

    def computing(self, around: Around | None) -> Around:
        """Return the context of every compute node; the player's own ``around`` goes inside."""


class Player:
    """Runs the plan in order. While a CPU thread waits it may run weight gradients early: see :class:`Filler`.

    It runs none early while nodes are measured, or if ``around`` or the program itself sets their order.

    Args:
        failures: Where ranks report that they failed; it has the limit of every wait for another rank.
        exchange: Between the ranks that share the experts.
        boundary: Carries out the ``send`` and ``receive`` nodes.
        reductions: Carry out the ``reduce`` nodes.
        gathers: Carry out the ``gather`` and ``release`` nodes.
        watch: Clock of a device that computes while the thread goes on.
        fills: Whether weight gradients may run early.

    Attributes:
        before_launch: Called before every exchange. While nodes are measured it is a barrier, so that the time of a
            transfer does not contain one rank's wait for another.
        around: Context of every compute node.
        compute: Carries out a compute node with what its exchanges have brought.
        recorder: Is told of every node.
        count: Counts the bytes of a step, or None.
        position: Of the current node in the list; None before the first.
        flights: All that the last :meth:`play` sent and received.
        begun: Start of the last :meth:`play`, by ``time.perf_counter``.
        peak_activations: Most microbatches of a stage that were alive at once.
        peak_held: The same, counting microbatches that wait for weight gradients alone.
    """

    def __init__(
        self,
        failures: Failures,
        *,
        exchange: Exchange,
        boundary: Boundary | None = None,
        reductions: Sequence[Reduction] = (),
        gathers: Gathers | None = None,
        watch: Watch | None = None,
        fills: bool = True,
    ) -> None:
        abort = partial(exchange.abort, ending=True)

        def lane(name: str, *, background: bool = exchange.background) -> Lane:
            stamp = watch and watch.stamp
            return Lane(name, failures, background=background, stamp=stamp, abort=abort)

        back = lane("combine")
        self.lanes = {
            # A few bytes: sending them takes less time than handing them to a thread. The dispatch waits for them.
            (Op.COUNTS, Kind.F): lane("counts", background=False),
            # A dispatch that waits for its counts must not hold up the others; tags keep them apart on the wire.
            (Op.DISPATCH, Kind.F): lane("dispatch"),
            (Op.COMBINE, Kind.F): back,
            (Op.COMBINE, Kind.I): back,
            (Op.DISPATCH, Kind.I): back,
        }
        self.failures = failures
        self.boundary, self.reductions, self.gathers = boundary, reductions, gathers
        self.before_launch: Callable[[], None] | None = None
        self.around: Around | None = None
        self.compute: Compute = compute
        self.recorder: PlayObserver | None = None
        self.count: ByteCount | None = None
        self._notes = False
        self.position: int | None = None
        self.watch, self._fills = watch, fills and watch is None
        self._since = 0.0  # when the thread had nothing to await any more for the current node
        self._times: StepTimes | None = None
        self._around: Around | None = None
        self._filler: Filler | None = None
        self._reset()

    def _reset(self) -> None:
        """Forget what was played before."""
        self._computed: list[Node] = []
        self._clock = array("d")  # begin and end of each of these; of numbers Python collects no garbage
        self.flights: list[Flight[Any]] = []
        self._sends: deque[Flight[None]] = deque()
        self.begun = time.perf_counter()
        self._live: set[Microbatch] = set()
        self._held: set[Microbatch] = set()
        self.peak_activations = self.peak_held = 0

    @contextmanager
    def counting(self, count: ByteCount | None, *, notes: bool) -> Iterator[None]:
        """Count the bytes of the steps in the body, with ``notes`` also what each node holds."""
        with nullcontext() if count is None else count:
            self.count, self._notes = count, notes
            try:
                yield
            finally:
                self.count, self._notes = None, False

    @property
    def peak_bytes(self) -> int | None:
        """Most bytes so far in the body of :meth:`counting`; None outside."""
        if self.count is None:
            return None
        self.count.read()
        return self.count.peak

    def recorded_step(self) -> AbstractContextManager[None]:
        """Return the context of a step: it is recorded if there is a recorder."""
        return nullcontext() if self.recorder is None else self.recorder.step()

    def play(self, nodes: Sequence[Node], microbatches: Mapping[MicrobatchKey, Microbatch]) -> None:
        """Play the nodes in order.

        After an error every suspended forward is unwound, and the exchanges in flight get a second to end.
        """
        # 1. Nothing has been played yet.
        self._reset()
        self._times = None if self.watch is None else StepTimes(self.watch)
        # 2. Who looks on, and what may run early.
        issue: Issue = self._issue if self._times is None else self._timed
        self._around = _outside_autocast(self.around)
        if self.recorder is not None:
            issue, self._around = self.recorder.issuing(nodes, issue), self.recorder.computing(self._around)
        fills = self._fills and self.around is None and self.before_launch is None and not self._notes
        self._filler = filler = self._filling(nodes, microbatches, issue) if fills else None
        # 3. Every node in order; then the sends that nobody here waited for.
        try:
            for self.position, node in enumerate(nodes):
                if self.failures.lost is not None:  # transfers bring nothing any more
                    raise LostRankError(self.failures.lost)
                if filler is None or self.position not in filler.taken:
                    issue(node, microbatches)
                    if self._notes and self.count is not None:
                        self.count.note(node)
            while self._sends:
                self._sends.popleft().wait()
        except BaseException:
            self._stop(microbatches)
            raise
        finally:
            self._filler = None  # it refers to the microbatches

    def _stop(self, microbatches: Mapping[MicrobatchKey, Microbatch]) -> None:
        self.failures.failed = True
        for microbatch in microbatches.values():
            microbatch.stop()
        self._live, self._held = set(), set()
        deadline = time.monotonic() + DRAIN_S
        for flight in self.flights:
            flight.drain(max(0.0, deadline - time.monotonic()))

    def _filling(self, nodes: Sequence[Node], microbatches: Mapping[MicrobatchKey, Microbatch], issue: Issue) -> Filler:
        def ready(node: Node) -> bool:
            microbatch = microbatches.get((node.stage, node.microbatch))
            return microbatch is not None and (node.op, node.block, node.call) in microbatch.queues

        def play(position: int) -> None:
            waiting, self.position = self.position, position
            issue(nodes[position], microbatches)
            self.position = waiting

        return Filler(nodes, ready, play)

    def _issue(self, node: Node, microbatches: Mapping[MicrobatchKey, Microbatch]) -> None:
        """Start a transfer; or compute, behind the transfers that bring its input."""
        if RESOURCE_OF[node.op] is not Resource.COMPUTE:
            self._start_transfer(node, microbatches)
            return
        microbatch = microbatches[node.stage, node.microbatch]
        # 1. Count microbatches that hold activations.
        if node.kind is Kind.F and microbatch not in self._live:
            self._live.add(microbatch)
            self._held.add(microbatch)
            self.peak_activations = max(self.peak_activations, len(self._live))
            self.peak_held = max(self.peak_held, len(self._held))
        # 2. Wait for the exchange or transfer before it, perhaps with other weight gradients.
        takes = node.op not in RECOMPUTES and node.kind is not Kind.W
        received = self._await_input(node, microbatch) if takes else {}
        if self._notes and self.count is not None:
            self.count.came(node, received)
        if self.gathers is not None and (gather := self.gathers.coming(node)) is not None:
            if self._filler is not None and self.position is not None:
                self._filler.fill((gather,), self.position)
            noted = self.count if self._notes else None
            with nullcontext() if noted is None else noted.held_by(gather.node):
                self.gathers.take(node)
        # 3. Compute.
        start, times = time.perf_counter(), self._times
        if times is not None and self.before_launch is not None:
            times.watch.hold()
        begun = None if times is None else times.watch.stamp()
        if self._around is None:
            self.compute(node, microbatch, received)
        else:
            with self._around(node):
                self.compute(node, microbatch, received)
        if times is not None:
            times.computed(node, begun)
        else:
            self._computed.append(node)
            self._clock.append(start)
            self._clock.append(time.perf_counter())
        # 4. Release a microbatch that has ended.
        if microbatch.ended:
            self._live.discard(microbatch)
            if not microbatch.queues:
                self._held.discard(microbatch)
                microbatch.finish()

    def _await_input(self, node: Node, microbatch: Microbatch) -> dict[Place, Any]:
        coming, receiving = microbatch.coming(node), microbatch.receiving.get(node.kind)
        if not coming and receiving is None:
            return {}
        if self._filler is not None and self.position is not None:
            flights = coming.values() if receiving is None else (*coming.values(), receiving)
            self._filler.fill(flights, self.position)
        return microbatch.await_input(node.kind, coming)

    def _timed(self, node: Node, microbatches: Mapping[MicrobatchKey, Microbatch]) -> None:
        """Play a node, and note when the thread had launched it."""
        assert self._times is not None
        self._since = time.perf_counter()
        self._issue(node, microbatches)
        self._times.launches.append(Span(node, self._since, time.perf_counter()))

    def _send_or_receive(self, node: Node, microbatches: Mapping[MicrobatchKey, Microbatch]) -> None:
        """Start a send to a neighbouring stage, or take the receive from one (on a device: start it)."""
        assert self.boundary is not None
        microbatch = microbatches[node.stage, node.microbatch]
        if node.op is Op.RECEIVE:
            receiving = microbatch.receiving[node.kind] = self.boundary.receive(node)
            self.flights.append(receiving)
            return
        while self._sends and self._sends[0].arrived:  # an earlier one's buffers are free
            self._sends.popleft().wait()
        send = self.boundary.send(node, *microbatch.take_passed(node.kind))
        self._sends.append(send)
        self.flights.append(send)

    def _launch_exchange(self, node: Node, microbatches: Mapping[MicrobatchKey, Microbatch]) -> None:
        """Launch an exchange between the ranks that share the experts."""
        if self.before_launch is not None:
            self.before_launch()
        microbatch = microbatches[node.stage, node.microbatch]
        flying = microbatch.flights[node.kind]
        counts = flying.get((Op.COUNTS, node.call, node.part)) if node.op is Op.DISPATCH else None
        self._since = time.perf_counter()
        lane_op, post = posting.post(node, microbatch)
        flight = self.lanes[lane_op, node.kind].launch(node, post)
        if node.op is Op.COUNTS and self.before_launch is not None and self.watch is None:
            flight.arrive()  # the dispatch that waits for them comes after a barrier of all ranks
        flying[node.place] = flight
        self.flights.append(flight)
        if counts is not None:
            self._since = max(self._since, counts.read)

    def _start_transfer(self, node: Node, microbatches: Mapping[MicrobatchKey, Microbatch]) -> None:
        """Start a reduction, a gather, a transfer between stages, or an exchange; release what was gathered."""
        if node.op is Op.REDUCE:
            for reduction in self.reductions:
                self.flights += reduction.launch(node)
        elif node.op in OF_PARAMETERS:
            assert self.gathers is not None
            if node.op is Op.GATHER:
                self.flights.append(self.gathers.launch(node))
            else:
                self.gathers.release(node)
        elif RESOURCE_OF[node.op] is Resource.PEER:
            self._send_or_receive(node, microbatches)
        else:
            self._launch_exchange(node, microbatches)

    def first_pending(self) -> Node | None:
        """Return the first node that the device has not computed; None if it has computed all."""
        return None if self._times is None else self._times.first_pending()

    @property
    def launches(self) -> Sequence[Span]:
        """Times in which the thread launched the nodes of the last :meth:`play` on a device, without waits for counts.

        Seconds of ``time.perf_counter``. Empty on a CPU, where the thread computes.
        """
        return () if self._times is None else self._times.launches

    def measured(self) -> Callable[[], tuple[Span, ...]]:
        """Return a function that gives the spans of the last :meth:`play`, in seconds from its start.

        It may be called once everything has arrived. On a GPU the spans are the device's, and the first call waits for
        the device.
        """
        times, flights, begun = self._times, self.flights, self.begun
        computed, clock = self._computed, self._clock
        if times is not None:
            return lambda: times.spans(flights)

        def spans() -> tuple[Span, ...]:
            nodes = zip(computed, clock[::2], clock[1::2], strict=True)
            arrived = ((f.node, f.departed_at, f.arrived_at) for f in flights if f.arrived_at)
            return tuple(Span(node, start - begun, end - begun) for node, start, end in (*nodes, *arrived))

        return spans


def _outside_autocast(around: Around | None) -> Around | None:
    """Return the context of a compute node: autocast around a step is for its forwards alone.

    A backward has the dtypes of its forward already.
    """
    kinds = [kind for kind in ("cpu", *devices.KINDS) if torch.is_autocast_enabled(kind)]
    if not kinds:
        return around

    @contextmanager
    def within(node: Node) -> Iterator[None]:
        with ExitStack() as stack:
            for kind in kinds if node.kind is not Kind.F and node.op not in RECOMPUTES else ():
                stack.enter_context(torch.autocast(kind, enabled=False))
            if around is not None:
                stack.enter_context(around(node))
            yield

    return within


def compute(node: Node, microbatch: Microbatch, received: Mapping[Place, Any]) -> None:
    """Carry out a compute node; ``received`` are the rows that the exchanges before it brought, if there are any."""
    if node.kind is Kind.W:
        accumulate(microbatch.queues.pop((node.op, node.block, node.call)).compute())
        return
    if node.block not in microbatch.runs:
        microbatch.runs[node.block] = RecomputedRun(microbatch, node.block)
    run = microbatch.runs[node.block]
    if node.op in RECOMPUTES:
        run.recompute(node.op)
    elif node.kind is Kind.F:
        run.run_forward(received)
    else:
        run.run_backward(received)
