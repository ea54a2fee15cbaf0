"""A watchdog for a host that waits inside the driver, as in ``tensor.item()``, where it cannot look for failures.

A device that waits for a lost rank waits for ever, and so does its host. When the transfers are aborted, their kernels
end, and the host goes on: with values that nobody sent, so whatever it does then counts as lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from overlap1f1b.transport.failures import Failures
from overlap1f1b.transport.limits import LATE_FACTOR, LOOK_S


class Watchdog:
    """A thread that looks for failures of other ranks, and ends this rank's transfers if its host does not.

    Args:
        failures: Record of failures; the watchdog notes there what it finds, and the host's own waits look at it. A
            device that stands still for twice its limit has lost a rank, too.
        aborts: Functions that end transfers, called one after another as long as the device stands still.
        goes_on: Whether the device has done what it had been given at the call before. A host that is busy with
            something else, such as a compiler, leaves it nothing to do, and may take any time.

    Attributes:
        aborted: Whether transfers were ended, so that the host may have gone on with values that nobody sent.
    """

    def __init__(
        self,
        failures: Failures,
        aborts: Sequence[Callable[[], object]],
        goes_on: Callable[[], bool],
    ) -> None:
        self.failures, self._aborts, self._goes_on = failures, aborts, goes_on
        self._limit = LATE_FACTOR * failures.limit.total_seconds()
        self.aborted = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="overlap1f1b-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        went_on = time.monotonic()
        while self.failures.lost is None and not self._ended.wait(LOOK_S):
            with suppress(RuntimeError):  # a request needs a thread, and there may be none now
                self.failures.lost = self.failures.read()
            if self._goes_on():
                went_on = time.monotonic()
            elif time.monotonic() - went_on > self._limit:
                self.failures.lost = self.failures.lost or f"the device stood still for {self._limit:g} s"
        for abort in self._aborts:
            going = True  # the host's own waits come first: they name the node
            while going:
                if self._ended.wait(LOOK_S):
                    return
                going = self._goes_on()
            self.aborted = True
            abort()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()
