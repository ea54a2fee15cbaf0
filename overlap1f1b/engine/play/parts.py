"""Choose the number of parts of a call of experts, by costs that are measured for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from overlap1f1b.engine.play.plans import Plans
from overlap1f1b.plan import StageShape, parse_parts

Parts = int | Literal["auto"]
TRIED = (1, 2, 4)
"""Numbers of parts whose costs ``auto`` measures."""
LEAST_GAIN = 0.02
"""Share of a step that more parts must save: costs are measured, so smaller differences may be none."""


class PartsChoice:
    """The number of parts: one that is given, or the one of several whose plan for its measured costs is the fastest.

    Smaller products are less efficient and short exchanges have a start-up, so costs of one number of parts do
    not tell the costs of another.

    Args:
        parts: A number of parts, or ``"auto"``.
        known: Whether costs or a plan are given, which are of one number.

    Attributes:
        parts: Number of parts of the next step.
        predicted: Predicted seconds of a step, by the numbers of parts that were measured.

    Raises:
        ValueError: The number is not allowed, or it is to be chosen although costs or a plan are given.
    """

    def __init__(self, parts: Parts, *, known: bool = False) -> None:
        if parts == "auto" and known:
            raise ValueError(f"parts={parts!r} with costs or a plan, which are of one number; allowed: this number")
        self._pending = list(TRIED) if parts == "auto" else []
        try:
            self.parts = self._pending[0] if self._pending else parse_parts(parts)
        except ValueError as error:
            raise ValueError(f"{error}, or auto") from None
        self.predicted: dict[int, float] = {}
        self._plans: dict[int, Plans] = {}

    @property
    def open(self) -> bool:
        """Whether the number is still to be chosen."""
        return bool(self._pending)

    def look_at(self, shapes: Iterable[StageShape]) -> None:
        """Keep the number of the next step if no block calls experts."""
        if not any(block.seams for stage in shapes for block in stage):
            self._pending.clear()

    def note(self, plans: Plans) -> Plans | None:
        """Note the plans of the current number; go on to the next one, or to the best and return its plans."""
        noted = self._pending.pop(0)
        self._plans[noted], self.predicted[noted] = plans, plans.of_step.predicted
        if self._pending:
            self.parts = self._pending[0]
            return None
        self.parts, *more = self.predicted
        for parts in more:
            if self.predicted[parts] < (1 - LEAST_GAIN) * self.predicted[self.parts]:
                self.parts = parts
        best = self._plans[self.parts]
        self._plans.clear()
        return best

    def __str__(self) -> str:
        """Return the number, and the predicted steps by which it was chosen.

        >>> print(PartsChoice(2))
        2
        """
        if self.open or not self.predicted:
            return str(self.parts)
        steps = ", ".join(f"{parts}: {1e3 * step:.0f} ms" for parts, step in self.predicted.items())
        return f"{self.parts} (predicted step by number of parts: {steps})"
