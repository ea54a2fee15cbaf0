"""Programs in a few figures."""

from __future__ import annotations

import pytest

from overlap1f1b.schedule import SCHEDULES, build_schedule
from overlap1f1b.simulation import Costs, Outcome, copies_of, simulate


@pytest.mark.parametrize("name", SCHEDULES)
def test_figures(name: str) -> None:
    program = build_schedule(name, ranks=4, microbatches=8)
    timeline = simulate(program, Costs(forward=1.5, backward=2, weight=0.5, pair=0.75))
    outcome = Outcome.of(program, timeline)
    assert outcome.makespan == timeline.makespan
    assert outcome.peak_activations == max(program.peak_activations) * program.placement.share
    assert outcome.bubble_share == pytest.approx(1 - sum(map(timeline.busy, range(4))) / (4 * timeline.makespan))
    assert outcome.copies == copies_of(program) == (2 if name == "dualpipe" else 1)


def test_outcomes_are_ordered_by_makespan_then_memory() -> None:
    assert Outcome(1.0, 9.0, 2, 0.5) < Outcome(2.0, 1.0, 1, 0.1) < Outcome(2.0, 2.0, 1, 0.1)
