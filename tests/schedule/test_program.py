"""Programs: the order in which actions open, and their drawing."""

from __future__ import annotations

import dataclasses

import pytest

from overlap1f1b.schedule import Action, Kind, Pair, Program
from overlap1f1b.schedule.generators.interleaved import combined_1f1b
from overlap1f1b.schedule.generators.plain import forward_only


def test_actions_in_the_order_in_which_they_open() -> None:
    program = combined_1f1b(3, extra_warmup=0)
    assert [str(action) for action in program.actions(0)] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]


def test_drawing_names_stages_where_there_are_several() -> None:
    ranks = (
        (Action(Kind.F, 0, 0), Action(Kind.I, 0, 0), Action(Kind.W, 0, 0)),
        (Action(Kind.F, 1, 0), Pair(Action(Kind.F, 1, 1), Action(Kind.B, 1, 0))),
    )
    assert Program("mine", 2, ranks, (1, 2)).draw() == "rank 0: 0F0 0I0 0W0\nrank 1: 1F0 1B0‖1F1"


def test_drawing_names_the_second_pipe() -> None:
    steps = (Action(Kind.F, 0, 0), Action(Kind.F, 0, 0, pipe=1))
    assert Program("mine", 1, (steps,), (2,)).draw() == "rank 0: 0F0 0'F0"


def test_forward_only_means_no_rank_runs_a_backward() -> None:
    forwards = forward_only(2).ranks[0]
    assert Program("mine", 2, (forwards, forwards), (2, 2)).forward_only
    assert not Program("mine", 2, (forwards, combined_1f1b(2, 0).ranks[0]), (2, 2)).forward_only


def test_programs_are_values() -> None:
    assert combined_1f1b(4, 1) == combined_1f1b(4, 1)
    assert hash(combined_1f1b(4, 1)) == hash(combined_1f1b(4, 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        combined_1f1b(4, 1).microbatches = 5  # type: ignore[misc]
