"""What the coming steps are for: plain data, one entry a step, until a plan has settled.

>>> steps = first_steps([("none", 1), ("none", 2)], shows=True, warm=3, counts=True, measured=1)
>>> [f"{step.purpose} {step.setting}" for step in steps][3:]
["measure ('none', 1)", "count ('none', 2)", "measure ('none', 2)"]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from overlap1f1b.plan import Plan, Recompute

Setting = tuple[Recompute, int]
"""What blocks recompute, and the parts of a call of experts."""


class Purpose(StrEnum):
    """What a step is for."""

    SHOW = "show"
    """Blocks show the exchanges that they make by themselves. It warms up, too."""
    WARM = "warm"
    """Kernels are compiled and memory is allocated."""
    COUNT = "count"
    """The bytes that each node holds are counted."""
    MEASURE = "measure"
    """Every node is timed, with nothing else under way."""
    TRY = "try"
    """One of the plans that costs predict to be the fastest is timed."""
    ADAPT = "adapt"
    """Node times have left what the plan was made for: it is played while another is searched beside it."""
    SETTLED = "settled"
    """Nothing is left to learn: the plan stays."""

    @property
    def looks(self) -> bool:
        """Whether it looks at every node."""
        return self not in (Purpose.TRY, Purpose.ADAPT, Purpose.SETTLED)


class Coming(NamedTuple):
    """A coming step: what it is for, and its plan.

    The list has a plan only for a step that tries it, or, to be played next, for one that shows exchanges; the tuner
    fills in the others.
    """

    purpose: Purpose
    setting: Setting | None = None  # in which nodes are measured
    microbatches: int | None = None  # the number that it is for; None for any
    plan: Plan | None = None
    loop: Plan | None = None  # the plain loop with which the step is compared; None if it is not


def first_steps(
    settings: Iterable[Setting], *, shows: bool, warm: int, counts: bool, measured: int
) -> Iterator[Coming]:
    """Yield the steps that measure nodes in each setting: ``warm`` before the first, the last of which ``counts``."""
    for number, setting in enumerate(settings):
        before = [Purpose.WARM] * (1 if number else warm)
        before[-1:] = [Purpose.COUNT if counts else Purpose.WARM] if before else []
        before[:1] = [Purpose.SHOW] if shows and not number else before[:1]
        for purpose in (*before, *[Purpose.MEASURE] * measured):
            yield Coming(purpose, setting)
