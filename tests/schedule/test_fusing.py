"""Neighbours joined to pairs."""

from __future__ import annotations

import pytest

from overlap1f1b.schedule import SCHEDULES, Action, Kind, Pair, Step, build_schedule, fuse

CHUNKED = ("sequential", "afab", "interleaved_1f1b", "combined_1f1b", "zb_h1")
CASES = [
    (name, ranks, chunks)
    for name in SCHEDULES
    for ranks in (1, 2, 3, 4)
    for chunks in ((1, 2, 3) if name in CHUNKED else (None,))
    if name != "dualpipe" or ranks % 2 == 0
]


@pytest.mark.parametrize(("name", "ranks", "chunks"), CASES)
def test_fused_programs_pass_their_checks_and_hold_the_same_actions(name: str, ranks: int, chunks: int | None) -> None:
    program = build_schedule(name, ranks=ranks, microbatches=8, chunks=chunks)
    fused = fuse(program)
    fused.check()
    for rank, steps in enumerate(fused.ranks):
        assert sorted(fused.actions(rank)) == sorted(program.actions(rank))
        assert [a for step in steps for a in in_order(step, program.ranks[rank])] == flat(program.ranks[rank])
    if name.startswith("zb"):
        assert fused == program


def flat(steps: tuple[Step, ...]) -> list[Action]:
    return [action for step in steps for action in (step if isinstance(step, Pair) else (step,))]


def in_order(step: Step, steps: tuple[Step, ...]) -> list[Action]:
    """The members of a step in the order that they had."""
    order = flat(steps)
    return sorted(step if isinstance(step, Pair) else (step,), key=order.index)


def test_warmed_up_rows_become_the_combined_schedule() -> None:
    for ranks, chunks in ((1, 1), (2, 2), (4, 2), (3, 3)):
        plain = build_schedule("interleaved_1f1b", ranks=ranks, microbatches=12, chunks=chunks, extra_warmup=1)
        combined = build_schedule("combined_1f1b", ranks=ranks, microbatches=12, chunks=chunks, extra_warmup=0)
        assert fuse(plain).ranks == combined.ranks


def test_members_of_one_microbatch_stay_apart() -> None:
    program = build_schedule("sequential", microbatches=1)
    assert fuse(program) == program
    two = fuse(build_schedule("sequential", microbatches=2))
    assert two.draw() == "rank 0: F0 B0‖F1 B1"
    assert two.peak_activations == (2,)
    assert any(isinstance(step, Pair) and step.forward.kind is Kind.F for step in two.ranks[0])
