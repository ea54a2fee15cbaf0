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
        return f"{self.plan.program.name} {self.plan.order}: {1e3 * self.seconds:.0f} ms"


class Trials:
    """Steps in turns of the plans that are predicted to be the fastest.

    Costs are measured in serial steps. Where compute and exchanges slow each other down, or the host is late, the plan
    that is predicted to be the fastest need not be it.

    Args:
        plans: Plans, the one that is predicted to be the fastest first; far slower ones are left out.
        steps: Steps of each plan.

    Attributes:
        plans: The plans that are tried.
    """

    def __init__(self, plans: Sequence[Plan], steps: int) -> None:
        self.plans = [plan for plan in plans if plan.predicted <= WITHIN * plans[0].predicted][:MOST_PLANS]
        self.steps = steps if len(self.plans) > 1 else 0
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
