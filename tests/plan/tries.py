"""How many plans the compiler tries: few where what a test says holds for every plan, whichever was the fastest."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

from overlap1f1b.plan.compiler import DEFERRED, PATIENCES


def few_tries(*patiences: float) -> AbstractContextManager[object]:
    """Plans are compiled with these patiences alone: for tests of what holds whichever are tried."""
    return patch.multiple("overlap1f1b.plan.compiler", PATIENCES=patiences or (0.4,), DEFERRED=(1,))


def all_tries() -> AbstractContextManager[object]:
    """Plans are compiled as a user's are, also where `few_tries` would hold."""
    return patch.multiple("overlap1f1b.plan.compiler", PATIENCES=PATIENCES, DEFERRED=DEFERRED)
