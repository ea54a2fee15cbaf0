"""What a rank does to one microbatch on one stage."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from overlap1f1b.schedule.quoting import quoted

# More digits than any number of a schedule has would be a long text in every message that names it.
_ACTION = re.compile(r"(\d{1,40})('{0,40})([FBIW])(\d{1,40})", re.ASCII)
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


class Kind(StrEnum):
    """Forward, backward, input gradient, weight gradient; ``B`` is ``I`` and ``W`` together."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the field's letter for the input gradient
    W = "W"

    __hash__ = str.__hash__  # an Enum's own is written in Python, and actions are hashed often


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

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action of a text, the reverse of ``str``.

        >>> Action.parse("2'B3") == Action(Kind.B, stage=2, microbatch=3, pipe=1)
        True

        Raises:
            ValueError: Anything else.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{quoted(text)} is no action; allowed: stage, F, B, I or W, microbatch, as in 2F0 or 2'F0"
            )
        stage, marks, kind, microbatch = match.groups()
        return cls(Kind(kind), int(stage), int(microbatch), len(marks))


class Pair(NamedTuple):
    """A forward and a backward of one rank that do not depend on each other and are issued interleaved.

    >>> str(Pair(Action(Kind.F, 0, 7), Action(Kind.B, 0, 6)))
    '(0F7;0B6)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @classmethod
    def parse(cls, text: str) -> Pair:
        """The pair of a text, the reverse of ``str``.

        >>> Pair.parse("(0F7;7B3)OVERLAP_F_B").backward == Action(Kind.B, 7, 3)
        True

        Raises:
            ValueError: Anything else.
        """
        match = _PAIR.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{quoted(text)} is no pair; allowed: two actions, as in (0F7;7B3)OVERLAP_F_B")
        return cls(Action.parse(match[1]), Action.parse(match[2]))


Step = Action | Pair


def parse_step(text: str) -> Step:
    """The action or pair of a text.

    Raises:
        ValueError: Anything else.
    """
    return Pair.parse(text) if text.lstrip().startswith("(") else Action.parse(text)


def actions_of(step: Step) -> tuple[Action, ...]:
    """The actions of a step in the order in which they open: of a pair the backward first, since it is older."""
    return (step.backward, step.forward) if isinstance(step, Pair) else (step,)
