"""How a rank that fails tells the others why."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import torch.distributed as dist

_GRACE_S = 0.5


class Failures:
    """A note on the process group's store, which ranks that wait look at.

    A rank whose process is killed leaves none; the others then learn of it by their closed connections.

    Args:
        name: The same on all ranks that wait for each other, and on no others.
    """

    def __init__(self, name: str = "") -> None:
        self._key = f"overlap1f1b/failed/{name}"
        self._store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None

    def post(self, message: str) -> None:
        """Leaves a note, unless another rank has."""
        if self._store is not None and self.read() is None:
            with suppress(RuntimeError, ValueError):  # the store went down with the rank that held it
                self._store.set(self._key, message)

    def tell(self, error: BaseException, message: str) -> None:
        """Adds to an error where it happened, and whose was the first; leaves a note of it."""
        error.add_note(message)
        first = self.read(wait=isinstance(error, RuntimeError))
        if first is not None and first not in str(error):
            error.add_note(f"the first to fail: {first}")
        self.post(f"{message}: {headline(error)}")

    def read(self, *, wait: bool = False) -> str | None:
        """The first failure; ``wait`` gives another rank a moment to post it."""
        deadline = time.monotonic() + (_GRACE_S if wait else 0.0)
        while self._store is not None:
            try:
                if self._store.check([self._key]):
                    return self._store.get(self._key).decode()
            except (RuntimeError, ValueError):
                return None
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
        return None


def headline(error: BaseException) -> str:
    """The type of an error and the first line of what it says, without the place in gloo's source and its advice."""
    lines = str(error).splitlines()
    text = re.sub(r"^\[[^]]*\] ", "", lines[0]).partition(" This is typically")[0] if lines else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
