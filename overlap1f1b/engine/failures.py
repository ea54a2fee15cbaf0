"""How ranks that play together learn that one of them failed, which one, and why."""

from __future__ import annotations

import re
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_GRACE_S = 0.5  # how long a rank that lost another waits for the cause, before it raises
_ROLL_CALL_S = 2.0  # and how long for a word of every rank, before it says which are silent


class LostRankError(RuntimeError):
    """Another rank failed, or did not answer within the limit."""


class Failures:
    """What ranks tell each other on the process group's store: the first cause of a failure, and a word of each rank.

    A rank leaves a word when it fails and when its process ends. One that is killed or stopped leaves none: so the
    others know which one it was.

    Args:
        name: The same on all ranks that wait for each other, and on no others; None where they have none.
        labels: What messages call each rank, by its number in the default group.
    """

    def __init__(self, name: str | None = None, labels: Mapping[int, str] | None = None) -> None:
        self.labels = dict(labels or {})
        self.failed = False
        """Whether this rank failed, so that nothing that is under way will end."""
        self._place = f"overlap1f1b/{name}/"
        self._store: Any = None
        self._finalizer: Callable[[], object] = lambda: None
        if name is not None and dist.is_initialized():
            self._store = dist.distributed_c10d._get_default_store()
            self._mine = f"{self._place}word/{dist.get_rank()}"
            self._finalizer = weakref.finalize(self, _ended, self._store, self._mine)

    def meet(self, limit: timedelta) -> None:
        """Waits until every rank is here.

        Raises:
            LostRankError: Some did not come within the limit.
        """
        if self._store is None:
            return
        here, everyone = f"{self._place}here", f"{self._place}everyone"
        self._store.set(f"{here}/{dist.get_rank()}", "1")
        if self._store.add(here, 1) == len(self.labels):
            self._store.set(everyone, "1")
        try:
            self._store.wait([everyone], limit)
        except RuntimeError:
            missing = [label for rank, label in self.labels.items() if not self._store.check([f"{here}/{rank}"])]
            raise LostRankError(
                f"{', '.join(missing) or 'the store'} did not come to the construction of an engine within "
                f"{limit.total_seconds():g} s"
            ) from None

    def end(self) -> None:
        """Leaves word that this rank has ended, unless it left another before."""
        self.failed |= getattr(sys, "last_value", None) is not None
        self._finalizer()

    def tell(self, error: BaseException, message: str) -> None:
        """Notes on an error where it happened, and leaves word of it; a cause, unless another rank was lost."""
        self.failed = True
        error.add_note(message)
        if self._store is not None:
            with suppress(RuntimeError, ValueError):  # the store went down with the rank that held it
                if not _is_loss(error) and self.read() is None:
                    self._store.set(f"{self._place}cause", f"{message}: {headline(error)}")
                self._store.set(self._mine, f"{message}: {headline(error)}")

    def explain(self, error: BaseException) -> None:
        """Notes on an error that came of another rank which one failed first, or which are silent or have ended."""
        if self._store is None or not _is_loss(error):
            return
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
        deadline = time.monotonic() + _ROLL_CALL_S
        while (cause := self.read()) is None and time.monotonic() < deadline and len(self._words()) < len(self.labels):
            time.sleep(0.05)
        if cause is not None:
            if cause not in said:
                error.add_note(f"the first to fail: {cause}")
            return
        words = self._words()
        silent = [label for rank, label in self.labels.items() if rank not in words]
        if silent:
            error.add_note(f"no word, within {_ROLL_CALL_S:g} s, from {', '.join(silent)}: killed, stopped or busy")
        for rank, word in words.items():
            if word.startswith("ended"):
                error.add_note(f"{self.labels[rank]} has {word}")

    def _words(self) -> dict[int, str]:
        """What each rank left, of those that did."""
        words = {}
        with suppress(RuntimeError, ValueError):
            for rank in self.labels:
                key = f"{self._place}word/{rank}"
                if self._store.check([key]):
                    words[rank] = self._store.get(key).decode()
        return words

    def read(self, *, wait: bool = False) -> str | None:
        """The first cause of a failure; ``wait`` gives another rank a moment to tell it."""
        deadline = time.monotonic() + (_GRACE_S if wait else 0.0)
        key = f"{self._place}cause"
        while self._store is not None:
            try:
                if self._store.check([key]):
                    return str(self._store.get(key).decode())
            except (RuntimeError, ValueError):
                return None
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
        return None


def _ended(store: Any, key: str) -> None:
    """Leaves word that a rank has ended, unless it left another before."""
    error = getattr(sys, "last_value", None)  # what ends the process, if it is an error
    with suppress(RuntimeError, ValueError):
        if not store.check([key]):
            store.set(key, "ended" if error is None else f"ended by {headline(error)}")


def _is_loss(error: BaseException) -> bool:
    """Whether an error may come of another rank: a wait of ours, or one that torch raises of a connection."""
    return isinstance(error, LostRankError | dist.DistError) or (
        type(error) is RuntimeError and ("gloo" in str(error) or "pair closure" in str(error))
    )


def headline(error: BaseException) -> str:
    """The type of an error and the first line of what it says, without the place in gloo's source and its advice."""
    lines = str(error).splitlines()
    text = re.sub(r"^\[[^]]*\] ", "", lines[0]).partition(" This is typically")[0] if lines else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
