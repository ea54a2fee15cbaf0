"""A gate on the hidden fraction: a warning, or an error on all ranks, where less is hidden than the plan promises."""

from __future__ import annotations

import warnings
from collections import deque
from statistics import median
from typing import NamedTuple

from overlap1f1b.cut.options import parse_gate
from overlap1f1b.learn.tuner import MOST_NUMBERS
from overlap1f1b.plan import Plan
from overlap1f1b.play.result import StepResult
from overlap1f1b.simulation import play_nodes
from overlap1f1b.transport.mesh import Mesh

STEPS = 5
"""Steps whose median is compared: a single one may be slow for another reason."""


class _Seen(NamedTuple):
    """What the last steps of a plan hid."""

    plan: Plan
    predicted: float
    hidden: deque[float]


class NotHiddenError(RuntimeError):
    """Less of the exchange was hidden than the gate allows; the same line on all ranks. The engine can go on.

    ``result`` is that of the step, whose gradients are in ``.grad``.
    """

    result: StepResult | None = None


class Gate:
    """Compares what the last steps of a plan hid with its prediction; all ranks of the mesh raise together.

    It judges steps that ranks pool: their times are there, so nothing waits for them.
    """

    def __init__(self, gate: float | str | None, mesh: Mesh, *, counts_block: bool) -> None:
        self.share, self.raises = parse_gate(gate)
        self._mesh, self._counts_block = mesh, counts_block
        self._seen: dict[int, _Seen] = {}  # by number of microbatches, the last one comes last
        self._said = False

    def found(self, step: int, plan: Plan, result: StepResult) -> str | None:
        """Return what is to be said of a step of a settled plan. All ranks must call this if it raises."""
        if self.share is None or result.costs is None:  # it was not pooled
            return None
        count = plan.program.microbatches
        if (seen := self._seen.pop(count, None)) is None or seen.plan is not plan:
            ranks = play_nodes(plan, result.costs, counts_block=self._counts_block).ranks
            seen = _Seen(plan, ranks[self._mesh.rank("pp")].hidden_fraction, deque(maxlen=STEPS))
        self._seen[count] = seen
        if len(self._seen) > MOST_NUMBERS:
            del self._seen[next(iter(self._seen))]
        seen.hidden.append(result.overlap.hidden_fraction)
        line, hidden = None, median(seen.hidden)
        if len(seen.hidden) == STEPS and hidden < self.share * seen.predicted:  # neither is NaN
            line = (
                f"{hidden:.1%} of the exchange is hidden{self._mesh.where} in {STEPS} steps of {count} microbatches "
                f"until {step}, and the plan hides {seen.predicted:.1%}; allowed: {self.share:g} of it, as by gate; "
                "result.metrics() has the causes"
            )
        if self.raises:
            line = self._mesh.combined(line, lambda _, every: next(filter(None, every), None))
        return line

    def say(self, line: str | None, result: StepResult) -> None:
        """Say what was found, between calls of the engine; by a NotHiddenError if the gate says ``error``."""
        if line is None:
            return
        if self.raises:
            error = NotHiddenError(line)
            error.result = result
            raise error
        if not self._said:
            self._said = True
            warnings.warn(f"{line}; later ones are not said", stacklevel=4)
