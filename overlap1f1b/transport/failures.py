"""Failures: ranks learn that one of them failed, which one, and why.

A failing rank writes its error to the process group's store. The others meet a timeout or a closed connection, look
there for the cause, and add it to the error that they raise.
"""

import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from overlap1f1b.transport.limits import ANSWER_S, GRACE_POLL_S, GRACE_S, ROLL_CALL_POLL_S, ROLL_CALL_S

T = TypeVar("T")


class LostRankError(RuntimeError):
    """Another rank failed, or did not answer within the limit."""


class DifferentCallsError(RuntimeError):
    """Ranks have made different calls of an engine, which all of them must make."""


class Store:
    """The process group's store. Its calls may fail but not hang, although the rank that holds it may be stopped.

    Attributes:
        gone: Whether a call failed or had no answer; from then on no other call is made.
    """

    def __init__(self, prefix: str) -> None:
        # A client of its own: while one thread waits in a store's client, as NCCL does for its communicators, the
        # requests of others would have no answer.
        store: Any = dist.distributed_c10d._get_default_store()
        self.prefix, self._store = prefix, store.clone()
        self._lock = threading.Lock()
        self.gone = False

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self._ask(lambda: self._store.set(self.prefix + key, value), None)

    def get(self, key: str) -> str | None:
        """Return the value of ``key``, or None."""
        key = self.prefix + key
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else None, None)

    def claim(self, key: str, value: str) -> None:
        """Set a value unless another rank has set one."""
        self._ask(lambda: self._store.compare_set(self.prefix + key, "", value), None)

    def count(self, key: str) -> int:
        """Add one to a number and return the sum."""
        return self._ask(lambda: int(self._store.add(self.prefix + key, 1)), 0)

    def wait(self, key: str, timeout: timedelta) -> bool:
        """Wait for ``key``; return whether it was set within the limit."""
        try:
            self._store.wait([self.prefix + key], timeout)
        except RuntimeError:
            return False
        return True

    def _ask(self, call: Callable[[], T], otherwise: T) -> T:
        """Return what a call of the store answers, which runs in a thread that is left behind if no answer comes."""
        with self._lock:
            if self.gone:
                return otherwise
            answers: list[T] = []

            def ask() -> None:
                with suppress(RuntimeError, ValueError):
                    answers.append(call())

            thread = threading.Thread(target=ask, name="overlap1f1b-store", daemon=True)
            thread.start()
            thread.join(ANSWER_S)
            self.gone = not answers
            return answers[0] if answers else otherwise


class Failures:
    """Notes of failures on the process group's store: the first cause, and the last word of each rank.

    A rank leaves its word when it fails and when an error ends its process. A rank that is killed or stopped leaves no
    word; from this the others conclude that it is gone. A ``name`` is shared by exactly the ranks that wait for each
    other (None for one rank), ``labels`` are for messages, by numbers in the default group.

    Attributes:
        limit: Of every wait for another rank, see :mod:`~overlap1f1b.transport.limits`; by default the default group's.
        failed: Whether this rank failed, so that transfers under way will not end.
        place: Where in a step it did, until :meth:`tell`; None outside of one.
        lost: Cause of another rank's failure, once a watchdog has found it: transfers bring nothing any more.
    """

    def __init__(
        self, name: str | None = None, labels: Mapping[int, str] | None = None, *, limit: timedelta | None = None
    ) -> None:
        self.labels = dict(labels or {})
        self.limit = limit or dist.distributed_c10d.default_pg_timeout
        self.failed = False
        self.place: str | None = None
        self.lost: str | None = None
        self._store: Store | None = None
        self._leave_word: Callable[[], object] = lambda: None
        if name is not None:
            self._rank = dist.get_rank()
            self._store = Store(f"overlap1f1b/{name}/")
            self._leave_word = weakref.finalize(self, _ended, self._store, f"word/{self._rank}", os.getpid())

    def meet(self) -> None:
        """Wait until every rank has called this; LostRankError if one does not within the limit."""
        store = self._store
        if store is None:
            return
        store.set(f"here/{self._rank}", "1")
        if store.count("here") == len(self.labels):
            store.set("everyone", "1")
        if store.gone or not store.wait("everyone", self.limit):
            missing = [label for rank, label in self.labels.items() if store.get(f"here/{rank}") is None]
            who = self._without_a_store() if store.gone else ", ".join(missing)
            raise LostRankError(
                f"{who} did not come to the construction of an engine within {self.limit.total_seconds():g} s; all "
                "ranks make their engines in one order"
            )

    def end(self) -> None:
        """Leave word of the error that ends this process, unless this rank has left another word."""
        self.failed |= getattr(sys, "last_value", None) is not None
        self._leave_word()

    def fail(self, place: str | None) -> None:
        """Note that this rank failed at a place in a step."""
        self.failed, self.place = True, self.place or place

    def tell(self, error: BaseException, message: str) -> None:
        """Add ``message`` to an error and leave word of it; if no other rank caused it, it is the first cause."""
        self.failed, self.place = True, None
        error.add_note(message)
        if self._store is not None:
            word = f"{message}: {headline(error)}"
            if not is_loss(error):
                self._store.claim("cause", word)
            self._store.set(f"word/{self._rank}", word)

    def explain(self, error: BaseException) -> None:
        """Add to an error caused by another rank: the first cause, or else the ranks that are silent or have ended.

        The first cause, or who is silent, stands at the beginning of a :class:`LostRankError`, else in a note.
        """
        if self._store is None or not is_loss(error):
            return
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
        deadline, words = time.monotonic() + ROLL_CALL_S, self._add_words({})
        while (cause := self.read()) is None and time.monotonic() < deadline and len(words) < len(self.labels):
            time.sleep(ROLL_CALL_POLL_S)
            words = self._add_words(words)

        def put_first(text: str) -> None:
            if isinstance(error, LostRankError):
                error.args = (f"{text}; here: {error}",)
            else:
                error.add_note(text)

        if cause is not None:
            if cause not in said:
                put_first(f"the first to fail: {cause}")
        elif self._store.gone:
            error.add_note(f"{self._without_a_store()} gives no word")
        else:
            silent = [label for rank, label in self.labels.items() if rank not in words and rank != self._rank]
            if silent:
                why = "killed, stopped, ended or busy, or not there yet"
                put_first(f"no word, within {ROLL_CALL_S:g} s, from {', '.join(silent)}: {why}")
            for rank, word in words.items():
                if word.startswith("ended"):
                    error.add_note(f"{self.labels[rank]} has {word}")

    def _without_a_store(self) -> str:
        holder = self.labels.get(0)
        return "the process group's store" + ("" if holder is None else f", which {holder} may hold,")

    def _add_words(self, known: dict[int, str]) -> dict[int, str]:
        """Add the words that ranks have left since."""
        assert self._store is not None
        for rank in self.labels.keys() - known.keys():
            if (word := self._store.get(f"word/{rank}")) is not None:
                known[rank] = word
        return known

    def read(self, *, wait: bool = False) -> str | None:
        """Return the first cause of a failure, or None; with ``wait`` give another rank a moment to tell it."""
        deadline = time.monotonic() + (GRACE_S if wait else 0.0)
        while self._store is not None and not self._store.gone:
            if (cause := self._store.get("cause")) is not None:
                return cause
            if time.monotonic() >= deadline:
                return None
            time.sleep(GRACE_POLL_S)
        return None


def _ended(store: Store, key: str, process: int) -> None:
    # A forked process has inherited the finalizer, but is not this rank.
    error = getattr(sys, "last_value", None)
    if error is not None and os.getpid() == process and store.get(key) is None:
        store.set(key, f"ended by {headline(error)}")


def is_loss(error: BaseException) -> bool:
    """Return whether another rank may have caused an error: in a wait here, or by a connection that torch lost."""
    return isinstance(error, LostRankError | dist.DistError) or (
        type(error) is RuntimeError
        and any(text in str(error) for text in ("gloo", "pair closure", "Operation timed out"))
    )


def headline(error: BaseException) -> str:
    """Return the type and first line of an error, without gloo's source location and advice."""
    lines = str(error).splitlines()
    text = re.sub(r"^\[[^]]*\] ", "", lines[0]).partition(" This is typically")[0] if lines else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
