"""The text form of actions and pairs, compatible with torch's pipeline schedules."""

import pytest

from overlap1f1b.schedule import Action, Kind, Pair, actions_of, parse_slot


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
    assert Action.parse(text) == parse_slot(f" {text} ") == action


def test_text_of_a_pair() -> None:
    pair = Pair(Action(Kind.F, 0, 7), Action(Kind.B, 7, 3))
    assert str(pair) == "(0F7;7B3)OVERLAP_F_B"
    assert Pair.parse(str(pair)) == parse_slot(str(pair)) == pair
    assert parse_slot("(0'F7; 1I3)OVERLAP_F_B") == Pair(Action(Kind.F, 0, 7, 1), Action(Kind.I, 1, 3))


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F-1", "2F0 ,", "'2F0", "2F0'", "2UNSHARD", "٢F0"]
)
def test_no_action(text: str) -> None:
    with pytest.raises(ValueError, match=r"^['\"].* is not an action; allowed: .* as in 2F0 or 2'F0$"):
        Action.parse(text)


@pytest.mark.parametrize("text", ["(0F7;7B3)", "(0F7)OVERLAP_F_B", "(0F7;7B3;1W1)OVERLAP_F_B", "(0F7;7B3)OVERLAP"])
def test_no_pair(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a pair; allowed: two actions, as in \(0F7;7B3\)OVERLAP_F_B$"):
        parse_slot(text)


def test_of_a_pair_the_backward_opens_first() -> None:
    forward, backward = Action(Kind.F, 0, 1), Action(Kind.B, 0, 0)
    assert actions_of(Pair(forward, backward)) == (backward, forward)
    assert actions_of(forward) == (forward,)
