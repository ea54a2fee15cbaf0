"""Lanes on which exchanges travel while the thread computes."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from datetime import timedelta

from torch import Tensor

from overlap1f1b.moe.exchange import Transfer
from overlap1f1b.plan import Node


class Flight:
    """An exchange between its launch and its arrival; times in seconds of ``time.perf_counter``."""

    def __init__(self, node: Node, transfer: Transfer, timeout: timedelta, watched: bool) -> None:
        self.node, self.timeout, self._watched = node, timeout, watched
        self.launched = time.perf_counter()
        self.landed: float | None = None
        self._transfer: Transfer | None = transfer
        self._arrived = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> Tensor:
        """The received tensor.

        Raises:
            RuntimeError: The exchange failed, or did not arrive within the limit.
        """
        if not self._watched:
            self.land()
        elif not self._arrived.wait(2 * self.timeout.total_seconds()):
            self._error = TimeoutError("no answer")
        if self._error is not None:
            raise RuntimeError(
                f"{self.node} on the {self.node.lane.value} lane failed within {self.timeout.total_seconds():g} s: "
                f"{str(self._error).splitlines()[0]}"
            ) from self._error
        assert self._transfer is not None
        result, self._transfer = self._transfer.result, None
        return result

    def drain(self, seconds: float) -> None:
        """Gives the exchange that long to end, whatever becomes of it."""
        if self._watched:
            self._arrived.wait(seconds)
        self._transfer = None

    def land(self) -> None:
        """Waits for the transfer and notes when it ended."""
        transfer = self._transfer
        if transfer is None:  # drained
            return
        try:
            transfer.receive(self.timeout)
            if self._watched:
                self.landed = time.perf_counter()
            self._arrived.set()
            transfer.release(self.timeout)
        except Exception as error:  # whatever the transport raises belongs to the thread that waits for the rows
            self._error = error
            self._arrived.set()


class Lane:
    """Exchanges in the order of their launch, with one thread that notes when each arrives.

    gloo's sends and receives cannot be polled: only a thread that waits knows their end.
    """

    def __init__(self, name: str, timeout: timedelta) -> None:
        self.timeout = timeout
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_watch, args=(self._flights,), name=f"overlap1f1b-{name}", daemon=True)
        self._started = False
        weakref.finalize(self, self._flights.put, None)

    def launch(self, node: Node, transfer: Transfer) -> Flight:
        """Takes charge of a transfer that is under way."""
        # On CUDA a wait is an event on the stream, which must be issued where the consumer is, and stops no thread.
        watched = bool(transfer.receives or transfer.sends) and not transfer.result.is_cuda
        flight = Flight(node, transfer, self.timeout, watched)
        if not transfer.receives and not transfer.sends:
            flight.landed = flight.launched
        elif watched:
            if not self._started:
                self._thread.start()
                self._started = True
            self._flights.put(flight)
        return flight


def _watch(flights: queue.SimpleQueue[Flight | None]) -> None:
    while (flight := flights.get()) is not None:
        flight.land()
        del flight
