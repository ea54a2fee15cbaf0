"""A watchdog for a host that waits inside CUDA, as in ``tensor.item()``, where it cannot look for failures.

A device that waits for a lost rank waits for ever, and so does its host. When the transfers are aborted, their kernels
end, and the host goes on: with values that nobody sent, so whatever it does then counts as lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from overlap1f1b.transport.failures import Failures
from overlap1f1b.transport.limits import LATE_FACTOR, LOOK_S


class Watchdog:
    """A thread that looks for failures of other ranks, and ends this rank's transfers if its host does not.

    Args:
        failures: Record of failures; the watchdog notes there what it finds, and the host's own waits look at it.
        abort: Function that ends all transfers.
        timeout: Limit of a wait, in seconds. If the device stands still for twice this time, the watchdog aborts.
        goes_on: Whether the device has done what it had been given at the call before. A host that is busy with
            something else, such as a compiler, leaves it nothing to do, and may take any time.
    """

    def __init__(
        self, failures: Failures, abort: Callable[[], object], timeout: float, goes_on: Callable[[], bool]
    ) -> None:
        self.failures, self._abort, self._goes_on = failures, abort, goes_on
        self._limit = LATE_FACTOR * timeout
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="overlap1f1b-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        went_on = time.monotonic()
        while not self._ended.wait(LOOK_S):
            self.failures.lost = self.failures.read()
            if self.failures.lost is not None:
                if not self._ended.wait(LOOK_S):  # the host's own waits come first: they name the node
                    self._abort()
                return
            if self._goes_on():
                went_on = time.monotonic()
            elif time.monotonic() - went_on > self._limit:
                self.failures.lost = f"the device stood still for {self._limit:g} s"
                self._abort()
                return

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()
