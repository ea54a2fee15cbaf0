"""How many plans the compiler tries: few where what a test says holds for every plan, whichever was the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from overlap1f1b.plan.budget import NODES
from overlap1f1b.plan.compiler import DEFERRED, LEAST_WIDTH, PATIENCES


def few_tries(*patiences: float) -> Any:
    """Plans are compiled with these patiences alone: for tests of what holds whichever are tried."""
    return _tries(20_000, PATIENCES=patiences or (0.4,), DEFERRED=(1,))


def all_tries(*, searched: bool = True) -> Any:
    """Plans are compiled as a user's are, also where `few_tries` would hold, or as if their order was not open."""
    return _tries(NODES, PATIENCES=PATIENCES, DEFERRED=DEFERRED, LEAST_WIDTH=LEAST_WIDTH if searched else 1 << 30)


@contextmanager
def _tries(nodes: int, **settings: Any) -> Iterator[None]:
    with patch.multiple("overlap1f1b.plan.compiler", **settings), patch("overlap1f1b.plan.budget.NODES", nodes):
        yield
