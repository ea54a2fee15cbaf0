"""A gate on the hidden fraction: a warning, or an error on all ranks, where less is hidden than the plan promises."""

from __future__ import annotations

import math
import warnings
from collections import deque
from statistics import median

from overlap1f1b.cut.options import parse_gate
from overlap1f1b.plan import NodeCosts, Plan
from overlap1f1b.play.result import StepResult
from overlap1f1b.simulation import play_nodes
from overlap1f1b.transport.mesh import Mesh

STEPS = 5
"""Steps whose median is compared: a single one may be slow for another reason."""


class NotHiddenError(RuntimeError):
    """Less of the exchange was hidden than the gate allows; the same line on all ranks. The engine can go on.

    ``result`` is that of the step, whose gradients are in ``.grad``.
    """

    result: StepResult | None = None


class Gate:
    """Compares what the last steps of a plan hid with its prediction; all ranks of the mesh raise together."""

    def __init__(self, gate: float | str | None, mesh: Mesh, *, counts_block: bool) -> None:
        self.share, self.raises = parse_gate(gate)
        self._mesh, self._counts_block = mesh, counts_block
        self._plan: Plan | None = None
        self._predicted = math.nan
        self._hidden: deque[float] = deque(maxlen=STEPS)
        self._said = False

    def found(self, step: int, plan: Plan, costs: NodeCosts | None, result: StepResult) -> str | None:
        """Return what is to be said of a step of a settled plan. All ranks must call this if it raises."""
        if self.share is None or costs is None:
            return None
        if plan is not self._plan:
            self._plan, self._hidden = plan, deque(maxlen=STEPS)
            ranks = play_nodes(plan, costs, counts_block=self._counts_block).ranks
            self._predicted = ranks[self._mesh.rank("pp")].hidden_fraction
        self._hidden.append(result.overlap.hidden_fraction)
        line, hidden = None, median(self._hidden)
        if len(self._hidden) == STEPS and hidden < self.share * self._predicted:  # neither is NaN
            where = f" on {self._mesh.label}" if self._mesh.several else ""
            line = (
                f"{hidden:.1%} of the exchange is hidden{where} in {STEPS} steps until {step}, and the plan hides "
                f"{self._predicted:.1%}; allowed: {self.share:g} of it, as by gate; result.metrics() has the causes"
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
