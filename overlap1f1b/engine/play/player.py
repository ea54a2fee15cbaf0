"""Plays the nodes of a plan, one after another."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch

from overlap1f1b.engine.play.timing import StepTimes, Watch
from overlap1f1b.engine.reduce.reduction import Reduction
from overlap1f1b.engine.run.autograd import accumulate
from overlap1f1b.engine.run.microbatch import Microbatch
from overlap1f1b.engine.run.recompute import run_of
from overlap1f1b.plan import RECOMPUTES, Node, Op, Resource, Span
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.boundary import Boundary
from overlap1f1b.transport.exchange import Exchange
from overlap1f1b.transport.failures import Failures
from overlap1f1b.transport.lanes import Flight, Lane, Observer

Pace = Callable[[Node], float]
Around = Callable[[Node], AbstractContextManager[object]]
Issue = Callable[[Node, Mapping[Any, Any]], None]
Place = tuple[int, int]
"""Stage and microbatch."""


class PlayObserver(Observer, Protocol):
    """Is told of every node that a player plays."""

    def step(self) -> AbstractContextManager[None]:
        """Return the context of a step."""

    def issuing(self, nodes: Sequence[Node], issue: Issue) -> Issue:
        """Return what plays a node of these instead of ``issue``."""

    def computing(self, around: Around | None) -> Around:
        """Return the context of every compute node, with the player's own inside."""


_METHOD = {(op, kind): f"{op.value}_{'f' if kind is Kind.F else 'b'}" for op in Op for kind in (Kind.F, Kind.I)}
_NO_CONTEXT = nullcontext()


def _step(node: Node, microbatch: Microbatch) -> Callable[[Any], Any]:
    """The method that is the node, of the block's run."""
    run = microbatch.runs.get(node.block)
    if run is None:
        run = microbatch.runs[node.block] = run_of(microbatch, node.block)
    return getattr(run, _METHOD[node.op, node.kind])


def _plain_backwards(around: Around | None) -> Around | None:
    """What is around a compute node: autocast around a step is for its forwards alone.

    A backward has the dtypes of its forward already.
    """
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not devices:
        return around

    @contextmanager
    def within(node: Node) -> Iterator[None]:
        with ExitStack() as stack:
            for device in devices if node.kind is not Kind.F and node.op not in RECOMPUTES else ():
                stack.enter_context(torch.autocast(device, enabled=False))
            if around is not None:
                stack.enter_context(around(node))
            yield

    return within


class Player:
    """A machine that walks a list of nodes. It decides nothing but what to do while it has to wait.

    Where the thread itself waits for what travels, on a CPU, it takes the next weight gradients early: see
    :class:`Filler`. Not while nodes are measured, nor where ``around`` or the program itself sets their order.

    Args:
        timeout: Limit of every wait for another rank.
        failures: Where other ranks say that they failed.
        exchange: Between the ranks that share the experts.
        boundary: Carries out the ``send`` and ``receive`` nodes.
        reductions: Carry out the ``reduce`` nodes.
        pace: Seconds that a compute node must last at least; a stand-in for a slower processor.
        watch: Clock of a device that computes while the thread goes on.
        fills: Whether weight gradients may be taken early.

    ``before_launch`` is called before every exchange; while nodes are measured it lets the ranks meet, so that the time
    of a transfer does not contain one rank's wait for another. ``around`` gives the context of every compute node. A
    ``recorder`` is told of every node.
    """

    def __init__(
        self,
        timeout: timedelta,
        failures: Failures,
        *,
        exchange: Exchange,
        boundary: Boundary | None = None,
        reductions: Sequence[Reduction] = (),
        pace: Pace | None = None,
        watch: Watch | None = None,
        fills: bool = True,
    ) -> None:
        def lane(name: str, *, background: bool = exchange.background) -> Lane:
            stamp = watch and watch.stamp
            ends = partial(exchange.abort, ending=True)
            return Lane(name, timeout, failures, background=background, stamp=stamp, abort=ends)

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
        self.boundary, self.reductions, self.pace = boundary, reductions, pace
        self._watch, self._carveout, self._fills = watch, Carveout(exchange.sms), fills and watch is None
        self._times: StepTimes | None = None
        self.before_launch: Callable[[], None] | None = None
        self.around: Around | None = None
        self._around: Around | None = None
        self.recorder: PlayObserver | None = None
        self._filler: Filler | None = None
        self.position: int | None = None
        """Of the node that is played, in the list; None before the first."""
        self.peak_activations = self.peak_held = 0
        self._computed: list[Node] = []
        self._clock = array("d")  # when each of those began and ended: of numbers Python collects no garbage
        self.flights: list[Flight[Any]] = []
        """What the last :meth:`play` sent and received."""
        self._sends: deque[Flight[None]] = deque()
        self.begun = 0.0
        """Time of ``time.perf_counter`` from which spans count."""
        self._live: set[Microbatch] = set()
        self._held: set[Microbatch] = set()

    def play(self, nodes: Sequence[Node], microbatches: Mapping[Place, Microbatch]) -> None:
        """Plays the nodes.

        On an error every suspended forward is unwound; all exchanges in flight together have a second to end.
        """
        self._computed, self._clock = [], array("d")
        self.flights, self._sends, self.begun = [], deque(), time.perf_counter()
        self._live, self._held = set(), set()
        self.peak_activations = self.peak_held = 0
        self._times = None if self._watch is None else StepTimes(self._watch)
        issue: Issue = self._issue
        self._around = _plain_backwards(self.around)
        if self.recorder is not None:
            issue, self._around = self.recorder.issuing(nodes, issue), self.recorder.computing(self._around)
        fills = self._fills and self.around is None and self.before_launch is None
        self._filler = filler = self._filling(nodes, microbatches, issue) if fills else None
        try:
            for self.position, node in enumerate(nodes):
                if filler is None or filler.reached(self.position):
                    issue(node, microbatches)
            while self._sends:
                self._sends.popleft().wait()
        except BaseException:
            self.failures.failed = True
            for microbatch in microbatches.values():
                microbatch.stop()
            self._live, self._held = set(), set()
            deadline = time.monotonic() + 1.0
            for flight in self.flights:
                flight.drain(max(0.0, deadline - time.monotonic()))
            self._carveout.clear()
            raise
        finally:
            self._filler = None  # which knows the microbatches

    def observed_step(self) -> AbstractContextManager[None]:
        """Return the context of a step, for the recorder if there is one."""
        return nullcontext() if self.recorder is None else self.recorder.step()

    def _filling(self, nodes: Sequence[Node], microbatches: Mapping[Place, Microbatch], issue: Issue) -> Filler:
        def ready(node: Node) -> bool:
            microbatch = microbatches.get((node.stage, node.microbatch))
            return microbatch is not None and (node.op, node.block, node.seam) in microbatch.queues

        def play(position: int) -> None:
            waiting, self.position = self.position, position
            issue(nodes[position], microbatches)
            self.position = waiting

        return Filler(nodes, ready, play)

    def _issue(self, node: Node, microbatches: Mapping[Place, Microbatch]) -> None:
        resource = node.resource
        if resource is Resource.COMPUTE:
            self._compute(node, microbatches[node.stage, node.microbatch])
        elif node.op is Op.REDUCE:
            for reduction in self.reductions:
                self.flights += reduction.launch(node)
        elif resource is Resource.PEER:
            self._pass(node, microbatches[node.stage, node.microbatch])
        else:
            self._launch(node, microbatches[node.stage, node.microbatch])

    def _pass(self, node: Node, microbatch: Microbatch) -> None:
        """Sends to a neighbouring stage, or takes what it sends."""
        assert self.boundary is not None
        if node.op is Op.RECEIVE:
            arriving = microbatch.arriving[node.kind] = self.boundary.receive(node)
            self.flights.append(arriving)
            return
        while self._sends and self._sends[0].arrived:  # an earlier one's buffers are free
            self._sends.popleft().wait()
        send = self.boundary.send(node, *microbatch.take_passed(node.kind))
        self._sends.append(send)
        self.flights.append(send)

    def _launch(self, node: Node, microbatch: Microbatch) -> None:
        """Has an exchange started."""
        if self.before_launch is not None:
            self.before_launch()
        flight = self.lanes[node.op, node.kind].launch(node, _step(node, microbatch)(node))
        microbatch.flights[node.kind] = flight
        if node.op is not Op.COUNTS:
            self._carveout.launched()
        self.flights.append(flight)

    def _compute(self, node: Node, microbatch: Microbatch) -> None:
        if node.kind is Kind.F:
            self._live.add(microbatch)
            self._held.add(microbatch)
            self.peak_activations = max(self.peak_activations, len(self._live))
            self.peak_held = max(self.peak_held, len(self._held))
        received = None
        if node.op not in RECOMPUTES:
            if node.kind in microbatch.flights:
                self._carveout.awaited()
            if self._filler is not None:
                coming = microbatch.arriving.get(node.kind) or microbatch.flights.get(node.kind)
                if coming is not None:
                    self._filler.fill(coming)
            received = microbatch.await_input(node.kind)
        start, times = time.perf_counter(), self._times
        begun = None if times is None else times.watch.stamp()
        with self._around(node) if self._around is not None else _NO_CONTEXT:
            if node.kind is Kind.W:
                accumulate(microbatch.queues.pop((node.op, node.block, node.seam)).compute())
            else:
                _step(node, microbatch)(received)
            if self.pace is not None:
                time.sleep(max(0.0, start + self.pace(node) - time.perf_counter()))
        if times is not None:
            times.computed(node, begun)
        else:
            self._computed.append(node)
            self._clock.append(start)
            self._clock.append(time.perf_counter())
        if microbatch.ended:
            self._live.discard(microbatch)
            if not microbatch.queues:
                self._held.discard(microbatch)
                microbatch.finish()

    def measured(self) -> Callable[[], tuple[Span, ...]]:
        """What gives the spans of the last :meth:`play`, in seconds from its start, once everything has arrived.

        On CUDA they are those of the device, for which the first look waits.
        """
        times, flights, begun = self._times, self.flights, self.begun
        computed, clock = self._computed, self._clock
        if times is not None:
            return lambda: times.spans(flights)

        def seen() -> tuple[Span, ...]:
            spans = zip(computed, clock[::2], clock[1::2], strict=True)
            landed = ((f.node, f.departed, f.landed) for f in flights if f.landed)
            return tuple(Span(node, start - begun, end - begun) for node, start, end in (*spans, *landed))

        return seen


class Filler:
    """The weight-gradient nodes of a list that are still to come.

    A plan has them where it expects a gap. Ranks that drift apart make gaps elsewhere, and these nodes wait for nobody:
    any may be played once its backward has left it something to compute. They keep their order among themselves, so
    that every gradient is summed in the same order, to the bit.

    Args:
        nodes: What is played, in order.
        ready: Whether a weight gradient can be computed.
        play: Plays the node at a position.
    """

    def __init__(self, nodes: Sequence[Node], ready: Callable[[Node], bool], play: Callable[[int], None]) -> None:
        self._nodes, self._ready, self._play = nodes, ready, play
        self._coming = deque(
            at for at, node in enumerate(nodes) if node.kind is Kind.W and node.resource is Resource.COMPUTE
        )
        self._taken: set[int] = set()

    def reached(self, position: int) -> bool:
        """Whether the node there is still to be played, now that it is its turn."""
        if self._coming and self._coming[0] == position:
            self._coming.popleft()
        return position not in self._taken

    def fill(self, flight: Flight[Any]) -> None:
        """Plays what can be played until the flight has arrived."""
        while not flight.arrived and self._coming and self._ready(self._nodes[self._coming[0]]):
            position = self._coming.popleft()
            self._taken.add(position)
            self._play(position)


class Carveout:
    """While an exchange is in flight, persistent kernels use that many multiprocessors fewer.

    torch's matrix products (those of cuBLAS, grouped and row-wise scaled ones) and FlashAttention 3 otherwise have a
    block for every one and run in two waves where some are taken, up to twice as long. What is queued before an
    exchange is launched, or after it is awaited, has them all.

    Args:
        sms: How many; 0 does nothing.
        set_carveout: What tells torch; None where it has no such thing.
    """

    def __init__(self, sms: int, set_carveout: Callable[[int | None], None] | None = None) -> None:
        self.sms = sms
        self._set = set_carveout or getattr(torch._C, "_set_sm_carveout_experimental", None)
        self._flying = 0

    def launched(self) -> None:
        """An exchange is in flight."""
        self._flying += 1
        if self._flying == 1:
            self._apply(self.sms)

    def awaited(self) -> None:
        """Compute waits for one of them."""
        self._flying -= 1
        if self._flying == 0:
            self._apply(None)

    def clear(self) -> None:
        """None is in flight."""
        if self._flying:
            self._flying = 0
            self._apply(None)

    def _apply(self, sms: int | None) -> None:
        if self.sms and self._set is not None:
            self._set(sms)
