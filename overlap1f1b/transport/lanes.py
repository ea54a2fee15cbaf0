"""Lanes: transfers in the order of their launch, while the engine's thread computes.

A :class:`Flight` is one transfer. It has four phases:

1. *launch*: the engine's thread hands a function that starts the transfer to the :class:`Lane`.
2. *depart*: the function is called, and the transfer is under way.
3. *arrive*: the transfer has ended, and its result is here.
4. *wait*: the engine's thread needs the result and takes it.

On gloo two threads of the lane, its :class:`_Crew`, carry out 2 and 3, each in the order of launch. On a GPU, and with
one rank, the engine's thread carries out both: 2 in ``launch``, 3 in ``wait``, or at once where nothing travels.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from overlap1f1b.plan import Node, Op
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.failures import Failures, LostRankError, headline
from overlap1f1b.transport.limits import ABORT_S, LATE_FACTOR, LOOK_S

T = TypeVar("T")

Post = Callable[[], Transfer[T]]
"""Function that starts a transfer."""


class FlightListener(Protocol):
    """Hears of a lane's flights: of waits by the engine's thread, of departures and arrivals by the lane's threads."""

    def waiting(self, node: Node) -> AbstractContextManager[None]:
        """Return a context that lasts as long as the wait for the transfer of ``node``."""

    def departed(self, flight: Flight[Any]) -> None:
        """Note that a transfer has started."""

    def arrived(self, flight: Flight[Any]) -> None:
        """Note that a transfer has arrived."""


class Flight(Generic[T]):
    """A transfer of a node from its launch to its arrival; times are seconds of ``time.perf_counter``.

    Attributes:
        departed_at: When the transfer started, or the one ahead of it ended.
        arrived_at: When the last row arrived.
        read: When the thread knew the counts that it carried.
        begun, ended: Its times by the clock of a device that the thread does not wait for.
        sent: Bytes that leave this rank; 0 if the transfer does not say.
        received: Bytes of the result, this rank's own included; 0 unless it is one tensor.
    """

    departed_at = arrived_at = read = 0.0
    begun: Any = None
    ended: Any = None
    sent = received = 0
    _transfer: Transfer[T] | None = None
    _result: T | None = None
    _error: BaseException | None = None
    _released = False  # whether the lane's thread has ended it
    _under_way: Any = None  # a lock that is held until then, where a thread ends it; an event costs several times more

    def __init__(self, node: Node, lane: Lane) -> None:
        self.node, self.lane = node, lane
        if lane.background:
            self._under_way = threading.Lock()
            self._under_way.acquire()

    def note_read(self) -> None:
        """Note that the thread knows now the counts that it carried."""
        self.read = time.perf_counter()

    def wait(self) -> T:
        """Wait for the result and return it. Call it only once, since the flight does not keep the result.

        LostRankError if the transfer failed here or on another rank, or did not arrive within the limit; ValueError if
        sizes that ranks told each other before do not fit.
        """
        if self._under_way is not None or self._transfer is not None:  # else it has arrived or failed in its launch
            listener = self.lane.listener
            if listener is None or self.arrived:
                self._await()
            else:
                with listener.waiting(self.node):
                    self._await()
        if self._error is not None:
            self._raise(self._error)
        result, self._result = self._result, None
        return result  # type: ignore[return-value] # a transfer of nothing brings None

    def _await(self) -> None:
        """Wait for the end, or for a failure, or until the limit."""
        if self._under_way is None:
            self.arrive()
            return
        if self._released:
            return
        # The transfers before it on the lane may take as long as the limit, and then this one as long again.
        deadline = time.monotonic() + LATE_FACTOR * self.lane.failures.limit.total_seconds()
        while self._error is None and not self._under_way.acquire(timeout=LOOK_S):
            if self.lane.failures.read() is not None:
                self._error = ConnectionError("another rank failed")
            elif time.monotonic() > deadline:
                self._error = TimeoutError("no answer")

    def _raise(self, error: BaseException) -> None:
        if isinstance(error, ValueError):  # on all ranks, before anything was sent
            raise error
        limit = self.lane.failures.limit.total_seconds()
        cause = self.lane.failures.read(wait=True) or self.lane.failures.lost
        why = cause or (str(error) if isinstance(error, LostRankError) else f"{headline(error)} (limit {limit:g} s)")
        raise LostRankError(f"{self.node} on the lane {self.lane.name} failed: {why}") from error

    @property
    def arrived(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        if self._under_way is not None:
            return self._released
        return self._transfer is None or self._transfer.done

    def settle(self) -> None:
        """Wait, or raise, as :meth:`wait`, until the transfer has ended. Its result can still be taken.

        On a device what is queued from now on waits.
        """
        if self._under_way is not None:
            self._await()
        if self._error is not None:
            self._raise(self._error)
        if self.lane.stamp is not None and self._transfer is not None:
            self._transfer.receive()

    def drain(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the transfer to end, and drop it."""
        if self._under_way is not None and not self._released:
            self._under_way.acquire(timeout=seconds)
        transfer, self._transfer = self._transfer, None
        if transfer is not None and transfer.mark is not None:  # a stream may still use its tensors
            with suppress(Exception):
                transfer.mark.wait(timedelta(seconds=seconds))

    def depart(self, post: Post[T]) -> None:
        """Start the transfer. An error is kept for the thread that waits for the result."""
        try:
            transfer = post()
            self.departed_at, self.sent = time.perf_counter(), transfer.sent
            self.received = getattr(transfer.result, "nbytes", 0)
            if self.lane.stamp is not None and transfer.mark is None:
                self.begun = self.lane.stamp()
            if transfer.at_once and self._under_way is None:
                self._result = transfer.result
                self.arrived_at, self.ended = self.departed_at, self.begun
            else:
                self._transfer = transfer
        except Exception as error:
            self._fail(error)

    def arrive(self) -> None:
        """Wait until the transfer has ended, record the time, and drop the sent tensors."""
        transfer = self._transfer
        if transfer is None:  # failed or drained
            return
        # With a limit, a wait for NCCL would block the thread until the transfer ends. NCCL has the group's own limit.
        timeout = None if self.lane.stamp is not None else self.lane.failures.limit
        sends = self.node.op is Op.SEND  # it receives nothing, so it ends when everything is sent
        try:
            if transfer.ahead is not None:
                transfer.ahead.receive(timeout)
                self.departed_at = time.perf_counter()
            self._result = transfer.receive(timeout)
            if sends:
                transfer.release(timeout)
            self.arrived_at = time.perf_counter()
            self._read_clock(transfer)
            if self._under_way is not None:
                if self.lane.listener is not None:
                    self.lane.listener.arrived(self)
                self._end()
            if not sends:
                transfer.release(timeout)
            self._transfer = None
        except Exception as error:
            self._fail(error)

    def _read_clock(self, transfer: Transfer[T]) -> None:
        """Note when the transfer began and ended, by the stream's clock if it has one."""
        # A transfer on a stream has the stream's times, which are exact; the thread notices the end later. One behind
        # another occupies the links from the other's end on.
        mark, ahead = transfer.mark, None if transfer.ahead is None else transfer.ahead.mark
        if mark is None:
            self.ended = None if self.lane.stamp is None else self.lane.stamp()
        elif self.lane.stamp is not None:
            self.begun, self.ended = mark.begun if ahead is None else ahead.ended, mark.ended
        else:
            self.departed_at, self.arrived_at = mark.begun if ahead is None else ahead.ended, mark.ended

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        """Let go of the thread that waits; the thread that starts a flight, or ends it, calls this."""
        if self._under_way is not None and not self._released:
            self._released = True
            self._under_way.release()


class Lane:
    """Transfers in the order of their launch; a ``listener``, if there is one, hears of their flights.

    In the ``background`` two threads start and await them: a send on gloo costs its thread a millisecond, a dispatch
    must wait for its counts, and gloo's works cannot be polled; on a GPU a start and a wait only put marks on a stream.
    ``stamp`` records the time on a device's own clock; ``abort`` ends all transfers when the process ends.
    """

    def __init__(
        self,
        name: str,
        failures: Failures,
        *,
        background: bool,
        stamp: Callable[[], Any] | None = None,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.failures, self.background, self.stamp = name, failures, background, stamp
        self.listener: FlightListener | None = None
        self._crew = _Crew(failures, abort)
        self.close = weakref.finalize(self, self._crew.dismiss)
        """Let the threads end after the transfers launched so far."""

    def report_to(self, listener: FlightListener | None) -> None:
        """Let a listener hear of the flights, or nobody."""
        self.listener = listener

    def launch(self, node: Node, post: Post[T]) -> Flight[T]:
        """Start a transfer after all that were launched before, and return its flight."""
        flight: Flight[T] = Flight(node, self)
        if self.background:
            self._crew.start(self.name)
            self._crew.starting.put((flight, post))
        else:
            flight.depart(post)
        return flight


class _Crew:
    """Two threads of a lane. They outlive the lane until everything launched has ended, but never the interpreter.

    A thread that returns from gloo while the interpreter shuts down would abort the process. So the exit of the process

    1. lets the threads end after the transfers launched so far,
    2. waits for the threads as long as any wait may last, since other ranks may still need the sent rows; after a
       failure no rank needs them, and it does not wait,
    3. aborts the lane's groups if threads are still running, and waits briefly for these.

    The crew must not refer to its lane: the lane's finalizer calls :meth:`dismiss`.
    """

    def __init__(self, failures: Failures, abort: Callable[[], None]) -> None:
        self._limit = failures.limit
        self.failures: Failures | None = failures
        self.abort: Callable[[], None] | None = abort
        self.starting: SimpleQueue[tuple[Flight[Any], Post[Any]] | None] = SimpleQueue()
        self._under_way: SimpleQueue[Flight[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, name: str) -> None:
        """Start the threads unless they run."""
        if self._threads:
            return
        for role, target in (("start", self._start), ("watch", self._watch)):
            thread = threading.Thread(target=target, name=f"overlap1f1b-{name}-{role}", daemon=True)
            self._threads.append(thread)
            thread.start()
        atexit.register(self._leave)

    def dismiss(self) -> None:
        """Let the threads end after the transfers launched so far."""
        self.starting.put(None)

    def _leave(self) -> None:
        """End the threads, as far as they end within the limit; else abort what they wait for."""
        # At exit of the process; `_watch` clears both when the threads have ended before.
        failures, abort = self.failures, self.abort
        self.dismiss()
        if failures is not None:
            failures.end()
        self._join(0.0 if failures is not None and failures.failed else self._limit.total_seconds())
        if abort is not None and any(thread.is_alive() for thread in self._threads):
            abort()
            self._join(ABORT_S)

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:  # the thread that carries out `depart`
        """Start the transfers in the order in which they were launched."""
        while (entry := self.starting.get()) is not None:
            flight, post = entry
            flight.depart(post)
            if flight.lane.listener is not None:
                flight.lane.listener.departed(flight)
            self._under_way.put(flight)
            del entry, flight, post
        self._under_way.put(None)

    def _watch(self) -> None:  # the thread that carries out `arrive`
        while (flight := self._under_way.get()) is not None:
            flight.arrive()
            del flight
        # This may drop the last reference to groups of gloo. They must end here, while the exit waits for this thread.
        self.failures = self.abort = None
        atexit.unregister(self._leave)
