"""Time the fastest plans in steps of the engine, and keep the one that is the fastest in fact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from overlap1f1b.plan import Plan
from overlap1f1b.transport.mesh import Mesh

MOST_PLANS = 3
"""Plans that are tried."""
WITHIN = 1.1
"""Largest predicted time of a plan that is tried, as a multiple of the fastest's."""


class Tried(NamedTuple):
    """A plan that was tried, with the median of its steps in seconds, of the slowest rank."""

    plan: Plan
    seconds: float

    def __str__(self) -> str:
        """Return name and times of the plan."""
        return f"{self.plan.program.name} {self.plan.order}: {milliseconds(self.seconds)}"


def worth_trying(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans to try, of plans in the order of their predicted times: near the first, each order once."""
    found: dict[str, Plan] = {}
    for plan in plans:
        if len(found) == MOST_PLANS or plan.predicted > WITHIN * plans[0].predicted:
            break
        found.setdefault(plan.fingerprint, plan)
    return list(found.values())


def milliseconds(seconds: float) -> str:
    """Return a time as text, with three digits or whole milliseconds.

    >>> milliseconds(4.2149), milliseconds(0.0051234)
    ('4215 ms', '5.12 ms')
    """
    return f"{1e3 * seconds:.0f} ms" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


class Trials:
    """Steps in turns of the plans that are predicted to be the fastest.

    Costs are measured in serial steps. Where compute and exchanges slow each other down, or the host is late, the plan
    that is predicted to be the fastest need not be it.

    Args:
        plans: Plans, the one that is predicted to be the fastest first: see :func:`worth_trying`.
        steps: Steps of each plan.
    """

    def __init__(self, plans: Sequence[Plan], steps: int) -> None:
        self.plans, self.steps = plans, steps if len(plans) > 1 else 0
        self._seconds: list[float] = []

    @property
    def open(self) -> bool:
        """Whether steps are left."""
        return len(self._seconds) < self.steps * len(self.plans)

    @property
    def plan(self) -> Plan:
        """Plan of the next step."""
        return self.plans[len(self._seconds) % len(self.plans)]

    def note(self, seconds: float) -> None:
        """Note the time of a step of :attr:`plan` on this rank."""
        self._seconds.append(seconds)

    def tried(self, mesh: Mesh, share: Callable[[list[float]], list[float]] = list) -> list[Tried]:
        """Return the plans with their times, the fastest first; all ranks must call this.

        ``share`` makes the times the same on ranks outside of the mesh, too.
        """
        slowest = share(mesh.combined(self._seconds, lambda _, every: list(map(max, zip(*every, strict=True)))))
        count = len(self.plans)
        times = [median(slowest[number::count]) for number in range(count)]
        return sorted(map(Tried, self.plans, times), key=lambda one: one.seconds)
