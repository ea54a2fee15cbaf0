"""One microbatch after another, and forwards alone."""

import pytest

from overlap1f1b.schedule import SCHEDULES, Kind, Placement, build_schedule, one_by_one


@pytest.mark.parametrize("name", SCHEDULES)
def test_forwards_alone_keep_their_order(name: str) -> None:
    whole = build_schedule(name, ranks=4, microbatches=8)
    program = build_schedule(name, ranks=4, microbatches=8, forward_only=True)
    program.check()
    assert program.forward_only
    assert not whole.forward_only
    assert program.placement == whole.placement
    for rank in range(4):
        assert list(program.actions(rank)) == [action for action in whole.actions(rank) if action.kind is Kind.F]


def test_one_microbatch_after_another_over_any_placement() -> None:
    """Of two pipes each has its own; weight gradients may come apart."""
    program = one_by_one(2, Placement.bidirectional(2), split=True)
    program.check()
    assert program.draw() == "rank 0: 0F0 0I0 0W0 1'F1 1'I1 1'W1\nrank 1: 1F0 1I0 1W0 0'F1 0'I1 0'W1"
