"""How many plans the compiler tries: few where what a test says holds for every plan, whichever was the fastest."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

from overlap1f1b.plan.compiler import DEFERRED, PATIENCES, PLACED, SEARCHED

FEW = {"DEFERRED": (1,), "SEARCHED": 4_000, "PLACED": 10_000}
ALL = {"DEFERRED": DEFERRED, "SEARCHED": SEARCHED, "PLACED": PLACED}


def few_tries(*patiences: float) -> AbstractContextManager[object]:
    """Plans are compiled with these patiences alone: for tests of what holds whichever are tried."""
    return patch.multiple("overlap1f1b.plan.compiler", PATIENCES=patiences or (0.4,), **FEW)


def all_tries() -> AbstractContextManager[object]:
    """Plans are compiled as a user's are, also where `few_tries` would hold."""
    return patch.multiple("overlap1f1b.plan.compiler", PATIENCES=PATIENCES, **ALL)
