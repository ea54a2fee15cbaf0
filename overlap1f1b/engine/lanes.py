"""Lanes on which exchanges travel while the thread computes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from overlap1f1b.engine.failures import Failures, headline
from overlap1f1b.moe.exchange import Transfer
from overlap1f1b.plan import Node, Op

if TYPE_CHECKING:
    from overlap1f1b.engine.recorder import Recorder

T = TypeVar("T")

Post = Callable[[], Transfer[T]]
"""Starts a transfer."""

_LOOK_S = 1.0  # how often a rank that waits looks whether another has failed


class Flight(Generic[T]):
    """An exchange from its launch to its arrival; times in seconds of ``time.perf_counter``.

    ``departed`` is when the transfer was started, or when the one ahead of it had arrived; ``landed`` when its last row
    was here.
    """

    def __init__(self, node: Node, lane: Lane) -> None:
        self.node, self.lane = node, lane
        self.departed = self.landed = 0.0
        self._transfer: Transfer[T] | None = None
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._arrived: threading.Event | None = None

    def wait(self) -> T:
        """What was received, which this lets go of: once only.

        Raises:
            RuntimeError: It failed here or on another rank, or did not arrive within the limit.
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
        elif not self._arrived.wait(_LOOK_S):
            self._wait_long(self._arrived)

    def _wait_long(self, arrived: threading.Event) -> None:
        # The transfers before it on the lane have as long, and this one from its own start.
        deadline = time.monotonic() + 2 * self.lane.timeout.total_seconds()
        while not arrived.wait(_LOOK_S):
            if self.lane.failures.read() is not None:
                self._error = ConnectionError("another rank failed")
                return
            if time.monotonic() > deadline:
                self._error = TimeoutError("no answer")
                return

    def _raise(self, error: BaseException) -> None:
        limit = self.lane.timeout.total_seconds()
        cause = self.lane.failures.read(wait=True)
        why = cause or f"{headline(error)} (limit {limit:g} s)"
        raise RuntimeError(f"{self.node} on the lane {self.lane.name} failed: {why}") from error

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
        self._transfer = None

    def depart(self, post: Post[T]) -> None:
        """Starts the transfer."""
        try:
            self._transfer = post()
            self.departed = time.perf_counter()
        except Exception as error:  # it belongs to the thread that waits for the rows
            self._fail(error)

    def land(self) -> None:
        """Waits for the transfer, notes when it ended, and lets go of what was sent."""
        transfer = self._transfer
        if transfer is None:  # failed, or given up
            return
        timeout = self.lane.timeout
        try:
            if transfer.ahead is not None:
                transfer.ahead.receive(timeout)
                self.departed = time.perf_counter()
            self._result.append(transfer.receive(timeout))
            if self.node.op is Op.SEND:  # nothing comes back: it has ended when it is sent
                transfer.release(timeout)
            self.landed = time.perf_counter()
            if self._arrived is not None:
                if self.lane.recorder is not None:
                    self.lane.recorder.landed(self)
                self._arrived.set()
            if self.node.op is not Op.SEND:
                transfer.release(timeout)
            self._transfer = None
        except Exception as error:
            self._fail(error)

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

    A ``recorder`` is told what is waited for, and by the threads what is in flight.
    """

    def __init__(self, name: str, timeout: timedelta, failures: Failures, *, background: bool) -> None:
        self.name, self.timeout, self.failures, self.background = name, timeout, failures, background
        self.recorder: Recorder | None = None
        self._starting: SimpleQueue[tuple[Flight[Any], Post[Any]] | None] = SimpleQueue()
        self._started = False
        self._threads: list[threading.Thread] = []
        self._late: dict[Flight[Any], Post[Any]] = {}  # not yet started, in order
        self.close = weakref.finalize(self, _end, self._starting, self._threads)
        """Ends the threads."""

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
        if not self._started:
            landing: SimpleQueue[Flight[Any] | None] = SimpleQueue()
            for role, target, args in (
                ("start", _start, (self._starting, landing)),
                ("watch", _watch, (landing,)),
            ):
                name = f"overlap1f1b-{self.name}-{role}"
                self._threads.append(threading.Thread(target=target, args=args, name=name, daemon=True))
                self._threads[-1].start()
            self._started = True
        self._starting.put((flight, post))
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


def _end(starting: SimpleQueue[tuple[Flight[Any], Post[Any]] | None], threads: list[threading.Thread]) -> None:
    """Lets the threads go; one that is still inside gloo when the interpreter ends would abort the process."""
    starting.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(1.0)


def _start(
    starting: SimpleQueue[tuple[Flight[Any], Post[Any]] | None], landing: SimpleQueue[Flight[Any] | None]
) -> None:
    while (entry := starting.get()) is not None:
        flight, post = entry
        flight.depart(post)
        if flight.lane.recorder is not None:
            flight.lane.recorder.departed(flight)
        landing.put(flight)
        del entry, flight, post
    landing.put(None)


def _watch(landing: SimpleQueue[Flight[Any] | None]) -> None:
    while (flight := landing.get()) is not None:
        flight.land()
        del flight
