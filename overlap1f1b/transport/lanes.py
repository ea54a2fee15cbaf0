"""Lanes on which exchanges travel while the thread computes."""

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
"""Starts a transfer."""


class Observer(Protocol):
    """Is told what a lane waits for, and by its threads what is in flight."""

    def waiting(self, node: Node) -> AbstractContextManager[None]:
        """Return the context of a wait for this node."""

    def departed(self, flight: Flight[Any]) -> None:
        """Note that a thread has started a transfer."""

    def landed(self, flight: Flight[Any]) -> None:
        """Note that a transfer has arrived."""


class Flight(Generic[T]):
    """An exchange from its launch to its arrival; times in seconds of ``time.perf_counter``.

    ``departed`` is when the transfer was started, or when the one ahead of it had arrived; ``landed`` when its last row
    was here. On a device that the thread does not wait for, ``begun`` and ``ended`` are stamps of its own clock.
    """

    def __init__(self, node: Node, lane: Lane) -> None:
        self.node, self.lane = node, lane
        self.departed = self.landed = 0.0
        self.begun: Any = None
        self.ended: Any = None
        self._transfer: Transfer[T] | None = None
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._arrived: threading.Event | None = None

    def wait(self) -> T:
        """What was received, which this lets go of: once only.

        Raises:
            LostRankError: It failed here or on another rank, or did not arrive within the limit.
        """
        recorder = self.lane.recorder
        if recorder is None or self.arrived:
            self._await()
        else:
            with recorder.waiting(self.node):
                self._await()
        if self._error is not None:
            self._raise(self._error)
        return self._result.pop()

    def _await(self) -> None:
        if self._arrived is None:
            self.lane.depart_late(self)
            self.land()
        elif not self._arrived.wait(LOOK_S):
            self._wait_long(self._arrived)

    def _wait_long(self, arrived: threading.Event) -> None:
        # The transfers before it on the lane have as long, and this one from its own start.
        deadline = time.monotonic() + LATE_FACTOR * self.lane.timeout.total_seconds()
        while not arrived.wait(LOOK_S):
            if self.lane.failures.read() is not None:
                self._error = ConnectionError("another rank failed")
                return
            if time.monotonic() > deadline:
                self._error = TimeoutError("no answer")
                return

    def _raise(self, error: BaseException) -> None:
        limit = self.lane.timeout.total_seconds()
        cause = self.lane.failures.read(wait=True)
        why = cause or (str(error) if isinstance(error, LostRankError) else f"{headline(error)} (limit {limit:g} s)")
        raise LostRankError(f"{self.node} on the lane {self.lane.name} failed: {why}") from error

    @property
    def arrived(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        if self._arrived is not None:
            return self._arrived.is_set()
        return not self.lane.puts_off(self) and (self._transfer is None or self._transfer.done)

    def drained(self, seconds: float) -> None:
        """Gives the exchange that long to end; its result can still be had."""
        if self._arrived is not None:
            self._arrived.wait(seconds)

    def drain(self, seconds: float) -> None:
        """The same, and gives up on it."""
        self.drained(seconds)
        self.lane.forgo(self)
        transfer, self._transfer = self._transfer, None
        if transfer is not None and transfer.mark is not None:  # what a stream still uses outlives it
            with suppress(Exception):
                transfer.mark.wait(timedelta(seconds=seconds))

    def depart(self, post: Post[T]) -> None:
        """Starts the transfer."""
        try:
            if self.lane.stamp is not None:
                self.begun = self.lane.stamp()
            self._transfer = post()
            self.departed = time.perf_counter()
        except Exception as error:  # it belongs to the thread that waits for the rows
            self._fail(error)

    def land(self) -> None:
        """Waits for the transfer, notes when it ended, and lets go of what was sent."""
        transfer = self._transfer
        if transfer is None:  # failed, or given up
            return
        # A limit given to a work of NCCL would stop the thread until it ends; NCCL keeps the group's own.
        timeout = None if self.lane.stamp is not None else self.lane.timeout
        try:
            if transfer.ahead is not None:
                transfer.ahead.receive(timeout)
                self.departed = time.perf_counter()
            self._result.append(transfer.receive(timeout))
            if self.node.op is Op.SEND:  # nothing comes back: it has ended when it is sent
                transfer.release(timeout)
            self.landed = time.perf_counter()
            self._note(transfer)
            if self._arrived is not None:
                if self.lane.recorder is not None:
                    self.lane.recorder.landed(self)
                self._arrived.set()
            if self.node.op is not Op.SEND:
                transfer.release(timeout)
            self._transfer = None
        except Exception as error:
            self._fail(error)

    def _note(self, transfer: Transfer[T]) -> None:
        """The stream on which it ran knows better when it did."""
        mark = transfer.mark
        if mark is None:
            self.ended = None if self.lane.stamp is None else self.lane.stamp()
        elif self.lane.stamp is not None:
            self.begun, self.ended = mark.begun, mark.ended
        else:
            self.departed, self.landed = mark.begun, mark.ended

    def watch(self) -> None:
        """Another thread will land it."""
        self._arrived = threading.Event()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        if self._arrived is not None:
            self._arrived.set()


class Lane:
    """Exchanges in the order of their launch.

    In the background, one thread starts them, since a send on gloo takes its thread a millisecond, and a dispatch must
    wait for its counts; another notes when each arrives, since gloo's works cannot be polled. Otherwise both happen in
    the calling thread: on CUDA, where a start and a wait are marks on a stream, and where nothing travels.

    Args:
        name: For messages.
        timeout: Limit of every wait.
        background: Whether threads of its own start and await.
        failures: Where other ranks say that they failed.
        stamp: Notes now on the device's clock, where that is not the thread's.
        abort: Ends what is under way on the lane's groups, where the process ends.

    A ``recorder`` is told what is waited for, and by the threads what is in flight.
    """

    def __init__(
        self,
        name: str,
        timeout: timedelta,
        failures: Failures,
        *,
        background: bool,
        stamp: Callable[[], Any] | None = None,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.timeout, self.failures, self.background = name, timeout, failures, background
        self.stamp = stamp
        self.recorder: Observer | None = None
        self._crew = _Crew(timeout, failures, abort)
        self._late: dict[Flight[Any], Post[Any]] = {}  # not yet started, in order
        self.close = weakref.finalize(self, self._crew.dismiss)
        """Has the threads end with what was launched."""

    def launch(self, node: Node, post: Post[T], *, late: bool = False) -> Flight[T]:
        """Has the transfer started, after those launched before.

        Args:
            node: What it carries out.
            post: Starts it.
            late: Whether starting it waits for another rank. Without threads that is put off until it is awaited.
        """
        flight: Flight[T] = Flight(node, self)
        if not self.background:
            if late:
                self._late[flight] = post
            else:
                assert not self._late, "what is put off would be overtaken"
                flight.depart(post)
            return flight
        flight.watch()
        self._crew.start(self.name)
        self._crew.starting.put((flight, post))
        return flight

    def puts_off(self, flight: Flight[Any]) -> bool:
        """Whether it has not been started yet."""
        return flight in self._late

    def depart_late(self, flight: Flight[Any]) -> None:
        """Starts those that were put off, up to this one."""
        while flight in self._late:
            earlier = next(iter(self._late))
            earlier.depart(self._late.pop(earlier))

    def forgo(self, flight: Flight[Any]) -> None:
        """Does not start it any more."""
        self._late.pop(flight, None)


class _Crew:
    """The threads of a lane. They outlive it until all that was launched has ended, and never the interpreter.

    A thread that comes back from gloo while the interpreter ends would abort the process. So at exit they have as long
    as a wait may last, for the other ranks may still need what was sent; after a failure nobody does.
    """

    def __init__(self, timeout: timedelta, failures: Failures, abort: Callable[[], None]) -> None:
        self.timeout = timeout
        self.failures: Failures | None = failures
        self.abort: Callable[[], None] | None = abort
        self.starting: SimpleQueue[tuple[Flight[Any], Post[Any]] | None] = SimpleQueue()
        self._landing: SimpleQueue[Flight[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, name: str) -> None:
        """Starts the threads, unless they run."""
        if self._threads:
            return
        for role, target in (("start", self._start), ("watch", self._watch)):
            thread = threading.Thread(target=target, name=f"overlap1f1b-{name}-{role}", daemon=True)
            self._threads.append(thread)
            thread.start()
        atexit.register(self._leave)

    def dismiss(self) -> None:
        """Has the threads end with what was launched."""
        self.starting.put(None)

    def _leave(self) -> None:
        """At exit: sees to it that no thread is left."""
        failures, abort = self.failures, self.abort
        self.dismiss()
        if failures is not None:
            failures.end()
        self._join(0.0 if failures is not None and failures.failed else self.timeout.total_seconds())
        if abort is not None and any(thread.is_alive() for thread in self._threads):
            abort()
            self._join(ABORT_S)

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:
        while (entry := self.starting.get()) is not None:
            flight, post = entry
            flight.depart(post)
            if flight.lane.recorder is not None:
                flight.lane.recorder.departed(flight)
            self._landing.put(flight)
            del entry, flight, post
        self._landing.put(None)

    def _watch(self) -> None:
        while (flight := self._landing.get()) is not None:
            flight.land()
            del flight
        # What these hold may end with them, groups of gloo among it: here, as long as the exit waits for this thread.
        self.failures = self.abort = None
        atexit.unregister(self._leave)
