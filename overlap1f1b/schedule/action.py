"""What a rank does to one microbatch on one stage."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Forward, backward, input gradient, weight gradient; ``B`` is ``I`` and ``W`` together."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the field's letter for the input gradient
    W = "W"


class Action(NamedTuple):
    """One kind of work on one (stage, microbatch).

    >>> str(Action(Kind.F, stage=2, microbatch=0))
    '2F0'
    >>> str(Action(Kind.B, stage=2, microbatch=3, pipe=1))
    "2'B3"
    """

    kind: Kind
    stage: int
    microbatch: int
    pipe: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{chr(39) * self.pipe}{self.kind.value}{self.microbatch}"


class Pair(NamedTuple):
    """A forward and a backward of one rank that do not depend on each other and are issued interleaved.

    >>> str(Pair(Action(Kind.F, 0, 7), Action(Kind.B, 0, 6)))
    '(0F7;0B6)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step = Action | Pair


def actions_of(step: Step) -> tuple[Action, ...]:
    """The actions of a step in the order in which they open: of a pair the backward first, since it is older."""
    return (step.backward, step.forward) if isinstance(step, Pair) else (step,)
