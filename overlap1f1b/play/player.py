"""Play the nodes of a plan, one after another."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from overlap1f1b.cut.weights import accumulate
from overlap1f1b.learn.memory import ByteCount
from overlap1f1b.plan import OF_PARAMETERS, RECOMPUTES, RESOURCE_OF, Node, Op, Place, Plan, Resource, Span
from overlap1f1b.play import posting
from overlap1f1b.play.microbatch import Microbatch
from overlap1f1b.play.recompute import RecomputedRun
from overlap1f1b.reduce.fsdp import Gathers
from overlap1f1b.reduce.reduction import Reduction
from overlap1f1b.schedule import Kind
from overlap1f1b.transport import devices
from overlap1f1b.transport.boundary import Boundary
from overlap1f1b.transport.devices import Watch
from overlap1f1b.transport.exchange import Exchange
from overlap1f1b.transport.failures import Failures, LostRankError
from overlap1f1b.transport.lanes import Flight, Lane
from overlap1f1b.transport.limits import DRAIN_S

MicrobatchKey = tuple[int, int]
"""Numbers of stage and microbatch."""

Around = Callable[[Node], AbstractContextManager[object]]
T = TypeVar("T")
Issue = Callable[[Node, Mapping[MicrobatchKey, Microbatch]], None]
Compute = Callable[[Node, Microbatch, Mapping[Place, Any]], None]


class Player:
    """Runs the plan in order. While a CPU thread waits, it runs weight gradients early; sums stay bit-equal.

    A plan places weight gradients in the gaps that it expects. Where ranks drift apart, other gaps open; a weight
    gradient needs no other rank, and can run as soon as its backward has left it. None runs early while nodes are
    measured, or if ``around`` or the program itself sets their order.

    Args:
        failures: Where ranks report that they failed; it has the limit of every wait for another rank.
        exchange: Between the ranks that share the experts.
        boundary, reductions, gathers: Carry out transfers between stages, sums of gradients, and FSDP2's gathers.
        watch: Clock of a device that computes while the thread goes on.
        fills: Whether weight gradients may run early on a CPU.

    Attributes:
        before_launch: Called before every exchange. While nodes are measured it is a barrier, so that the time of a
            transfer does not contain one rank's wait for another.
        around: Context of every compute node.
        compute: Carries out a compute node with what its exchanges have brought.
        recorder: A :class:`~overlap1f1b.record.recorder.Recorder`, or None.
        position: Of the current node in the list; None before the first.
        flights: All that the last :meth:`play` sent and received.
        launches: Times in which the thread launched the nodes of the last :meth:`play` on a device, without waits for
            counts; seconds of ``time.perf_counter``. Empty on a CPU, where the thread computes.
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
            return Lane(name, failures, background=background, stamp=watch and watch.stamp, abort=abort)

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
        self.recorder: Any = None
        self.position: int | None = None
        self.watch, self._fills = watch, fills
        self._count: ByteCount | None = None
        self._notes: ByteCount | None = None  # the same while it notes what each node holds
        self._since = 0.0  # when the thread had nothing to await any more for the current node
        self._around: Around | None = None
        self._issue_node: Issue | None = None  # while nodes are played
        self._reset()

    def _reset(self) -> None:
        self.begun = time.perf_counter()
        self._stamp: Callable[[], Any] = time.perf_counter if self.watch is None else self.watch.stamp
        self._origin = self.begun if self.watch is None else self._stamp()
        self._computed: list[Node] = []
        # Begin and end of each of these; of numbers Python collects no garbage.
        self._stamps: Any = array("d") if self.watch is None else []
        self.launches: list[Span] = []
        self.flights: list[Flight[Any]] = []
        self._sends: deque[Flight[None]] = deque()
        self._late: deque[int] = deque()  # positions of weight gradients that may be played before their turn
        self._early: set[int] = set()  # of those that were
        self._live: set[Microbatch] = set()
        self._held: set[Microbatch] = set()
        self.peak_activations = self.peak_held = 0

    @contextmanager
    def counting(self, count: ByteCount | None, *, notes: bool) -> Iterator[None]:
        """Count the bytes of the steps in the body, with ``notes`` also what each node holds."""
        with nullcontext() if count is None else count:
            self._count, self._notes = count, count if notes else None
            try:
                yield
            finally:
                self._count = self._notes = None

    @property
    def peak_bytes(self) -> int | None:
        """Most bytes so far in the body of :meth:`counting`; None outside."""
        if self._count is None:
            return None
        self._count.read()
        return self._count.peak

    def recorded(self, step: Callable[[Plan], T]) -> Callable[[Plan], T]:
        """Return a function that plays a step, and records it if there is a recorder."""

        def recorded(plan: Plan) -> T:
            with nullcontext() if self.recorder is None else self.recorder.step():
                return step(plan)

        return recorded

    def play(self, nodes: Sequence[Node], microbatches: Mapping[MicrobatchKey, Microbatch]) -> None:
        """Play the nodes in order.

        After an error every suspended forward is unwound, and the exchanges in flight get a second to end.
        """
        # 1. Nothing has been played yet.
        self._reset()
        # 2. Who looks on, and what may run early.
        issue: Issue = self._issue if self.watch is None else self._timed
        self._around = _outside_autocast(self.around)
        if self.recorder is not None:
            issue, self._around = self.recorder.issuing(nodes, issue), self.recorder.computing(self._around)
        if self._fills and not any((self.watch, self.around, self.before_launch, self._notes)):
            weights = (at for at, node in enumerate(nodes) if node.kind is Kind.W and node.resource is Resource.COMPUTE)
            self._late.extend(weights)
        self._nodes, self._issue_node = nodes, issue
        # 3. Every node in order; then the sends that nobody here waited for.
        try:
            for self.position, node in enumerate(nodes):
                if self.failures.lost is not None:  # transfers bring nothing any more
                    raise LostRankError(self.failures.lost)
                if self.position not in self._early:
                    issue(node, microbatches)
                    if self._notes is not None:
                        self._notes.note(node)
            while self._sends:
                self._sends.popleft().wait()
        except BaseException:
            self._stop(microbatches)
            raise
        finally:
            self._issue_node = None

    def _stop(self, microbatches: Mapping[MicrobatchKey, Microbatch]) -> None:
        self.failures.failed = True
        for microbatch in microbatches.values():
            microbatch.stop()
        self._live, self._held = set(), set()
        deadline = time.monotonic() + DRAIN_S
        for flight in self.flights:
            flight.drain(max(0.0, deadline - time.monotonic()))

    def _fill(self, flights: Iterable[Flight[Any]], microbatches: Mapping[MicrobatchKey, Microbatch]) -> None:
        """Play weight gradients early, in plan order, until the flights have arrived or none is ready."""
        now, late, issue = self.position, self._late, self._issue_node
        assert now is not None
        assert issue is not None
        for flight in flights:
            while late and not flight.arrived:
                if late[0] > now:
                    node = self._nodes[late[0]]
                    microbatch = microbatches.get((node.stage, node.microbatch))
                    if microbatch is None or (node.op, node.block, node.call) not in microbatch.queues:
                        return
                    self.position = late[0]
                    self._early.add(self.position)
                    issue(node, microbatches)
                    self.position = now
                late.popleft()

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
        received: dict[Place, Any] = {}
        if node.op not in RECOMPUTES and node.kind is not Kind.W:
            coming, receiving = microbatch.coming(node), microbatch.receiving.get(node.kind)
            if coming or receiving is not None:
                if self._late:
                    self._fill((*coming.values(), *(() if receiving is None else (receiving,))), microbatches)
                received = microbatch.await_input(node.kind, coming)
        if self._notes is not None:
            self._notes.came(node, received)
        if self.gathers is not None and (gather := self.gathers.coming(node)) is not None:
            self._fill((gather,), microbatches)
            with nullcontext() if self._notes is None else self._notes.held_by(gather.node):
                self.gathers.take(node)
        # 3. Compute.
        if self.watch is not None and self.before_launch is not None:
            self.watch.hold()
        begun = self._stamp()
        if self._around is None:
            self.compute(node, microbatch, received)
        else:
            with self._around(node):
                self.compute(node, microbatch, received)
        self._computed.append(node)
        self._stamps.append(begun)
        self._stamps.append(self._stamp())
        # 4. Release a microbatch that has ended.
        if microbatch.ended:
            self._live.discard(microbatch)
            if not microbatch.queues:
                self._held.discard(microbatch)
                microbatch.finish()

    def _timed(self, node: Node, microbatches: Mapping[MicrobatchKey, Microbatch]) -> None:
        self._since = time.perf_counter()
        self._issue(node, microbatches)
        self.launches.append(Span(node, self._since, time.perf_counter()))

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
        ends = () if self.watch is None else zip(self._computed, self._stamps[1::2], strict=True)
        return next((node for node, ended in ends if not ended.event.query()), None)

    def measured(self) -> Callable[[], tuple[Span, ...]]:
        """Return a function that gives the spans of the last :meth:`play`, in seconds from its start.

        It may be called once everything has arrived. On a GPU the spans are the device's, and the first call waits for
        the device.
        """
        watch, origin, flights = self.watch, self._origin, self.flights
        computed, stamps = self._computed, self._stamps

        def spans() -> tuple[Span, ...]:
            nodes = zip(computed, stamps[::2], stamps[1::2], strict=True)
            if watch is None:
                arrived = [(f.node, f.departed_at, f.arrived_at) for f in flights if f.arrived_at]
                return tuple(Span(node, start - origin, end - origin) for node, start, end in (*nodes, *arrived))
            watch.settle()
            since, stamped = partial(watch.between, origin), [(f.node, f.begun, f.ended) for f in flights]
            marked = ((node, start, end) for node, start, end in stamped if start is not None and end is not None)
            return tuple(Span(node, since(start), since(end)) for node, start, end in (*nodes, *marked))

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


@contextmanager
def carved_out(blocks: int) -> Iterator[None]:
    """Let torch's products leave multiprocessors alone that ``blocks`` of transfers may hold, where this torch can.

    A grouped product launches one block for each multiprocessor, in clusters of two. Beside a single block of a
    transfer it runs in two waves, 1.7 times as long; if two are left alone for each such block, 1.07 times (measured
    on an H200, with 8). Its sums, and those of other products, have the same bits.
    """
    put = getattr(torch._C, "_set_sm_carveout_experimental", None) if blocks else None
    if put is None:
        yield
        return
    before = torch._C._get_sm_carveout_experimental()
    put(2 * blocks)
    try:
        yield
    finally:
        put(before)
