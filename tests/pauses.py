"""Threads that pause at random wherever two of them meet, so that an order that nobody keeps is broken."""

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from overlap1f1b.play.block import BlockRun
from overlap1f1b.play.player import Player
from overlap1f1b.play.segment import Segment
from overlap1f1b.transport.exchange import PeerExchange, Transfer
from overlap1f1b.transport.lanes import Flight

PLACES: tuple[tuple[type, str], ...] = (
    (Player, "_await"),  # the thread that computes, before each node
    (BlockRun, "_start"),
    (BlockRun, "_resume"),
    (Segment, "walk"),
    (Flight, "wait"),
    (Flight, "depart"),  # the thread that starts transfers
    (PeerExchange, "rows"),
    (PeerExchange, "counts"),
    (PeerExchange, "expect_rows"),
    (PeerExchange, "expect_counts"),
    (Flight, "arrive"),  # the thread that awaits them
    (Transfer, "receive"),
    (Transfer, "release"),
)


@contextmanager
def pauses(seed: int, *, often: float = 0.2, longest: float = 0.003) -> Iterator[None]:
    """While it lasts, part of the calls in :data:`PLACES` pause, by a seed, and threads take turns."""
    source = random.Random(seed)

    def pause() -> None:
        if source.random() < often:
            time.sleep(source.random() * longest)

    def paused(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            pause()
            try:
                return function(*args, **kwargs)
            finally:
                pause()

        return call

    interval = sys.getswitchinterval()
    with ExitStack() as patched:
        for owner, name in PLACES:
            patched.enter_context(patch.object(owner, name, paused(getattr(owner, name))))
        sys.setswitchinterval(1e-5)
        try:
            yield
        finally:
            sys.setswitchinterval(interval)
