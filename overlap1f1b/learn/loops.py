"""Which steps are compared with a plain loop, and the plan of that loop."""

from __future__ import annotations

from collections.abc import Callable

from overlap1f1b.plan import Plan
from overlap1f1b.schedule import Program, forwards_of, one_by_one


class Loops:
    """The plans whose first steps were equal to a plain loop's.

    Attributes:
        verified: These plans by their fingerprints: number of microbatches, whether it is of an evaluation, and most
            microbatches of a stage that were open at once.
    """

    def __init__(self) -> None:
        self.verified: dict[str, tuple[int, bool, int]] = {}
        self._alone: set[str] = set()  # fingerprints of plans that are a plain loop themselves

    def loop_of(self, plan: Plan, serial: Callable[[Program, Plan], Plan]) -> Plan | None:
        """Return the plan of the loop with which the next step of a plan is compared; None if it is not.

        A plan for another number of microbatches than the first is compared if more of them are open at once than
        before. ``serial`` returns the serial plan of a program, for blocks as in a plan.
        """
        if plan.fingerprint in self.verified or plan.fingerprint in self._alone:
            return None
        count, forwards, most = _described(plan)
        known = [(c, m) for c, f, m in self.verified.values() if f == forwards]
        if known and count != known[0][0] and most <= max(m for _, m in known):
            return None
        alone = one_by_one(count, plan.program.placement)
        loop = serial(forwards_of(alone) if forwards else alone, plan)
        if loop.fingerprint == plan.fingerprint:
            self._alone.add(plan.fingerprint)
            return None
        # Over several pipeline ranks a plain loop takes as many times longer: once is enough.
        return serial(plan.program, plan) if plan.program.placement.ranks > 1 and self.verified else loop

    def note(self, plan: Plan) -> None:
        """Note that the first step of a plan was equal to a plain loop's."""
        self.verified[plan.fingerprint] = _described(plan)


def _described(plan: Plan) -> tuple[int, bool, int]:
    """Return number of microbatches, whether a plan has forwards alone, and most microbatches of a stage at once."""
    most = max(map(plan.live, range(len(plan.ranks))))
    return plan.program.microbatches, plan.program.forward_only, most
