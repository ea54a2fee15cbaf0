"""Actions: the work of a rank on one microbatch and one stage."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from overlap1f1b.schedule.values import quoted

# The limit is longer than any schedule's numbers, and keeps messages with numbers short.
_ACTION = re.compile(r"(\d{1,40})('{0,40})([FBIW])(\d{1,40})", re.ASCII)
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


class Kind(StrEnum):
    """Kind of an action: forward, backward, input gradient, weight gradient; ``B`` is ``I`` and ``W`` together."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the field's letter for the input gradient
    W = "W"

    __hash__ = str.__hash__  # Enum's own hash is written in Python, and actions are hashed often


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
        """Parse an action, the reverse of ``str``.

        >>> Action.parse("2'B3") == Action(Kind.B, stage=2, microbatch=3, pipe=1)
        True

        Raises:
            ValueError: The text is not an action.
        """
        match = _ACTION.fullmatch(text.strip() if isinstance(text, str) else "")
        if match is None:
            raise ValueError(
                f"{quoted(text)} is not an action; allowed: stage, F, B, I or W, microbatch, as in 2F0 or 2'F0"
            )
        stage, marks, kind, microbatch = match.groups()
        return cls(Kind(kind), int(stage), int(microbatch), len(marks))


class Pair(NamedTuple):
    """A forward and a backward of one rank, independent of each other and issued interleaved.

    >>> str(Pair(Action(Kind.F, 0, 7), Action(Kind.B, 0, 6)))
    '(0F7;0B6)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Parse a pair, the reverse of ``str``.

        >>> Pair.parse("(0F7;7B3)OVERLAP_F_B").backward == Action(Kind.B, 7, 3)
        True

        Raises:
            ValueError: The text is not a pair.
        """
        match = _PAIR.fullmatch(text.strip() if isinstance(text, str) else "")
        if match is None:
            raise ValueError(f"{quoted(text)} is not a pair; allowed: two actions, as in (0F7;7B3)OVERLAP_F_B")
        return cls(Action.parse(match[1]), Action.parse(match[2]))


Slot = Action | Pair
"""An action, or a pair that a rank carries out together."""


def parse_slot(text: str) -> Slot:
    """Return the action or the pair of a text; ValueError if it is neither."""
    return Pair.parse(text) if text.lstrip().startswith("(") else Action.parse(text)


def actions_of(slot: Slot) -> tuple[Action, ...]:
    """Return the actions of a slot in the order in which they open; in a pair the older backward is first."""
    return (slot.backward, slot.forward) if isinstance(slot, Pair) else (slot,)


def peaks_of(slots: Iterable[Slot]) -> tuple[int, int]:
    """Return the most live activations and the most waiting weight gradients, in (stage, microbatch).

    An activation lives from its forward to the end of its B or W; a weight gradient waits between its I and its W. In
    a pair the forward counts before the backward has ended.

    >>> from overlap1f1b.schedule import Action
    >>> peaks_of([Action.parse(text) for text in "0F0 0F1 0I0 0I1 0W0 0W1".split()])
    (2, 2)
    """
    alive = pending = most_alive = most_pending = 0
    forward, split, weight = Kind.F, Kind.I, Kind.W
    for slot in slots:
        for action in reversed(actions_of(slot)):
            kind = action.kind
            if kind is forward:
                alive += 1
            elif kind is split:
                pending += 1
            elif kind is weight:
                pending -= 1
            most_alive, most_pending = max(most_alive, alive), max(most_pending, pending)
            alive -= kind is not forward and kind is not split
    return most_alive, most_pending
