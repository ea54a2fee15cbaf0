"""Programs: the order in which actions open, their drawing, and messages of their checks.

The rules are written down a second time in ``brute``; see test_program_mutations.py.
"""

import pytest

from overlap1f1b.schedule import Action, Kind, Pair, Program, Slot, parse_slot
from tests.programs import combined_1f1b, forward_only


def test_actions_in_the_order_in_which_they_open() -> None:
    assert " ".join(map(str, combined_1f1b(3, extra_warmup=0).actions(0))) == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_drawing_names_stages_and_pipes_where_there_are_several() -> None:
    rows = ("0F0 0I0 0W0", "1F0 (1F1;1B0)OVERLAP_F_B"), ("0F0 0'F0",)
    drawn = "rank 0: 0F0 0I0 0W0\nrank 1: 1F0 1B0‖1F1", "rank 0: 0F0 0'F0"
    for texts, picture in zip(rows, drawn, strict=True):
        ranks = tuple(tuple(map(parse_slot, text.split())) for text in texts)
        assert Program("mine", 2, ranks, (2,) * len(ranks)).draw() == picture


def test_forward_only_means_no_rank_runs_a_backward() -> None:
    forwards = forward_only(2).ranks[0]
    assert Program("mine", 2, (forwards, forwards), (2, 2)).forward_only
    assert not Program("mine", 2, (forwards, combined_1f1b(2, 0).ranks[0]), (2, 2)).forward_only


F0, F1, F2 = (Action(Kind.F, 0, m) for m in range(3))
B0, B1, B2 = (Action(Kind.B, 0, m) for m in range(3))
NONE = Action(Kind.F, 0, -1)
I0, W0, I1, W1 = (Action(kind, 0, m) for m in range(2) for kind in (Kind.I, Kind.W))


def program_of(*steps: Slot, microbatches: int = 2, peak: int = 2) -> Program:
    return Program("mine", microbatches, (steps,), (peak,))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (program_of(F0, B0, F1), "program 'mine', rank 0: 0F1 lacks a backward"),
        (program_of(F0, B0), "rank 0: 0F1 lacks a forward"),
        (program_of(F0, I0, F1, B1), "rank 0: 0F0 lacks its weight gradient"),
        (program_of(F0, B0, F1, B0, B1), "rank 0, position 3: 0B0 comes a second time"),
        (program_of(F0, B0, I0, F1, B1), "rank 0, position 2: 0I0 repeats the backward of its microbatch"),
        (program_of(B0, F0, F1, B1), "rank 0, position 0: 0B0 comes before 0F0, which it needs"),
        (program_of(F0, W0, I0, F1, B1), "rank 0, position 1: 0W0 comes before the backward of 0F0, which it needs"),
        (program_of(F0, B0, F2, B2), "rank 0, position 2: 0F2 names microbatch 2, allowed are 0 to 1"),
        (program_of(F0, B0, F1, B1, NONE), "rank 0, position 4: 0F-1 names microbatch -1, allowed are 0 to 1"),
        (program_of(F0, Pair(F1, B1), B0), "position 1: .* comes before 0F1, which it needs"),
        (program_of(F0, F1, Pair(B1, B0)), "position 2: .* must join a forward and a backward"),
        (program_of(F0, I0, Pair(F1, W0), B1), "position 2: .* must join a forward and a backward"),
        (program_of(F0, F1, B0, B1, peak=1), "rank 0: 2 microbatches alive, declared are 1"),
        (Program("mine", -1, ((F0, B0),), (1,)), "program 'mine': microbatches=-1; allowed: 1 or more"),
        (Program("mine", 2.5, ((F0, B0),), (1,)), "microbatches=2.5; allowed: a whole number, 1 or more"),  # type: ignore[arg-type]
        (Program("mine", 1, ((F0, B0),), (-1,)), "program 'mine': peak activations=-1; allowed: 0 or more"),
        (program_of(F0, "0B0"), "rank 0, position 1: '0B0' is not an action; allowed: an Action of a"),  # type: ignore[arg-type]
        (program_of(Action("F", 0, 0), B0), "rank 0, position 0: Action.kind='F', .* is not an action"),  # type: ignore[arg-type]
        (
            program_of(F0, F0._replace(stage="1")),
            "position 1: 1F0 names stage 1 of pipe 0, allowed are the rank's own: 0",
        ),
        (Program("mine", 1, 5, (1,)), "^program 'mine': ranks=5; allowed: a tuple or list$"),  # type: ignore[arg-type]
        (Program("mine", 1, ((F0, B0),), 5), "^program 'mine': peak_activations=5; allowed: a tuple or list$"),  # type: ignore[arg-type]
        (Program("mine", 1, ((F0, B0),), (1,), 3), "^program 'mine': placement=3; allowed: Placement$"),  # type: ignore[arg-type]
        (Program("mine", 1, ((F0, B0),), (1, 1)), "peak activations for 2 ranks and has 1"),
        (Program("mine", 1, ((F0, B0), (F0, F0)), (1, 1)), "has 2 ranks and a placement over 1; allowed: the same"),
    ],
)
def test_messages_name_rank_position_and_action(program: Program, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        program.check()


def test_split_backwards_and_harmless_orders_pass() -> None:
    program_of(F0, I0, F1, I1, W1, W0).check()
    program_of(F0, F1, B1, B0).check()
    program_of(F0, Pair(F1, I0), W0, B1).check()
