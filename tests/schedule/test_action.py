"""The text form of actions and pairs, compatible with torch's pipeline schedules."""

from __future__ import annotations

import pytest

from overlap1f1b.schedule import Action, Kind, Pair, actions_of


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(Kind.F, 2, 0), "2F0"),
        (Action(Kind.I, 0, 3), "0I3"),
        (Action(Kind.W, 1, 2), "1W2"),
        (Action(Kind.B, 10, 11), "10B11"),
        (Action(Kind.F, 2, 0, pipe=1), "2'F0"),
        (Action(Kind.W, 0, 5, pipe=2), "0''W5"),
    ],
)
def test_text_of_an_action(action: Action, text: str) -> None:
    assert str(action) == text


def test_text_of_a_pair() -> None:
    assert str(Pair(Action(Kind.F, 0, 7), Action(Kind.B, 7, 3))) == "(0F7;7B3)OVERLAP_F_B"


def test_of_a_pair_the_backward_opens_first() -> None:
    forward, backward = Action(Kind.F, 0, 1), Action(Kind.B, 0, 0)
    assert actions_of(Pair(forward, backward)) == (backward, forward)
    assert actions_of(forward) == (forward,)


def test_actions_are_values() -> None:
    assert Action(Kind.F, 0, 1) == Action(Kind.F, 0, 1, pipe=0)
    assert len({Action(Kind.F, 0, 1), Action(Kind.F, 0, 1), Action(Kind.B, 0, 1)}) == 2
