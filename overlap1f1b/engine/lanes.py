"""Lanes on which exchanges travel while the thread computes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

from torch import Tensor

from overlap1f1b.moe.exchange import Transfer
from overlap1f1b.plan import Node

Post = Callable[[], Transfer]
"""Starts a transfer."""


class Flight:
    """An exchange from its launch to its arrival; times in seconds of ``time.perf_counter``.

    ``departed`` is when the transfer was started, or when the one ahead of it had arrived; ``landed`` when its last row
    was here.
    """

    def __init__(self, node: Node, timeout: timedelta) -> None:
        self.node, self.timeout = node, timeout
        self.departed = self.landed = 0.0
        self._transfer: Transfer | None = None
        self._error: BaseException | None = None
        self._arrived: threading.Event | None = None

    def wait(self) -> Tensor:
        """The received tensor.

        Raises:
            RuntimeError: The exchange failed, or did not arrive within the limit.
        """
        seconds = self.timeout.total_seconds()
        if self._arrived is None:
            self.land()
        elif not self._arrived.wait(2 * seconds):
            self._error = TimeoutError("no answer")
        if self._error is not None:
            why = str(self._error).splitlines()[0] if str(self._error) else type(self._error).__name__
            raise RuntimeError(f"{self.node} on the {self.node.lane.value} lane failed: {why} (limit {seconds:g} s)")
        assert self._transfer is not None
        result, self._transfer = self._transfer.result, None
        return result

    def drained(self, seconds: float) -> None:
        """Gives the exchange that long to end; its result can still be had."""
        if self._arrived is not None:
            self._arrived.wait(seconds)

    def drain(self, seconds: float) -> None:
        """The same, and gives up on it."""
        self.drained(seconds)
        self._transfer = None

    def depart(self, post: Post) -> None:
        """Starts the transfer."""
        try:
            self._transfer = post()
            self.departed = time.perf_counter()
        except Exception as error:  # it belongs to the thread that waits for the rows
            self._fail(error)

    def land(self) -> None:
        """Waits for the transfer and notes when it ended."""
        transfer = self._transfer
        if transfer is None:  # failed, or given up
            return
        try:
            if transfer.ahead is not None:
                transfer.ahead.receive(self.timeout)
                self.departed = time.perf_counter()
            transfer.receive(self.timeout)
            self.landed = time.perf_counter()
            if self._arrived is not None:
                self._arrived.set()
            if transfer.ahead is not None:
                transfer.ahead.release(self.timeout)
            transfer.release(self.timeout)
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
    """

    def __init__(self, name: str, timeout: timedelta, *, background: bool) -> None:
        self.timeout, self.background = timeout, background
        self._starting: SimpleQueue[tuple[Flight, Post] | None] = SimpleQueue()
        self._name, self._started = name, False
        weakref.finalize(self, self._starting.put, None)

    def launch(self, node: Node, post: Post) -> Flight:
        """Has the transfer started, after those launched before."""
        flight = Flight(node, self.timeout)
        if not self.background:
            flight.depart(post)
            return flight
        flight.watch()
        if not self._started:
            landing: SimpleQueue[Flight | None] = SimpleQueue()
            for role, target, args in (
                ("start", _start, (self._starting, landing)),
                ("watch", _watch, (landing,)),
            ):
                name = f"overlap1f1b-{self._name}-{role}"
                threading.Thread(target=target, args=args, name=name, daemon=True).start()
            self._started = True
        self._starting.put((flight, post))
        return flight


def _start(starting: SimpleQueue[tuple[Flight, Post] | None], landing: SimpleQueue[Flight | None]) -> None:
    while (entry := starting.get()) is not None:
        flight, post = entry
        flight.depart(post)
        landing.put(flight)
        del entry, flight, post
    landing.put(None)


def _watch(landing: SimpleQueue[Flight | None]) -> None:
    while (flight := landing.get()) is not None:
        flight.land()
        del flight
