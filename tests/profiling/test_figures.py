"""Phases, and what counts as open."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap1f1b.plan import Overlap, Resource
from overlap1f1b.profiling import Lanes, read_file
from overlap1f1b.schedule import Kind
from tests.profiling.simulated import simulated, write_run
from tests.profiling.synthetic import write_record


@pytest.mark.parametrize(("schedule", "overlap"), [("1f1b", "serial"), ("combined_1f1b", 3), ("afab", "serial")])
def test_phases_end_with_the_first_backward_and_the_last_forward(
    tmp_path: Path, schedule: str, overlap: Overlap
) -> None:
    timeline = simulated(schedule, overlap, microbatches=6)
    folder = write_run(tmp_path / "run", timeline)
    for number, rank in enumerate(timeline.ranks):
        (recording,) = read_file(folder / f"rank{number}.json")
        (step,) = recording.steps
        phases = {name: [time / 1e6 for time in edges] for name, edges in Lanes(recording, step).phases.items()}
        spans = [span for span in rank.spans if span.node.resource is Resource.COMPUTE]
        first = min(span.start for span in spans if span.node.kind is not Kind.F)
        last = max(first, *(span.end for span in spans if span.node.kind is Kind.F))
        assert phases["warm_up"] == pytest.approx([0, first])
        assert phases["steady"] == pytest.approx([first, last])
        assert phases["cool_down"] == pytest.approx([last, timeline.makespan])


def test_what_is_computed_again_begins_no_phase(tmp_path: Path) -> None:
    spans = [
        ("node", "dense.f[0] m0", 0.0, 1.0),
        ("node", "recompute_dense.b[0] m0", 1.0, 2.0),
        ("node", "dense.f[0] m1", 2.0, 3.0),
        ("node", "dense.b[0] m0", 4.0, 5.0),
    ]
    (recording,) = read_file(write_record(tmp_path / "rank0.json", [spans]))
    lanes = Lanes(recording, recording.steps[0])
    assert lanes.phases["warm_up"] == (0, 4 * 10**9)
    assert lanes.open_actions == 1


def test_forwards_alone_are_steady(tmp_path: Path) -> None:
    (recording,) = read_file(write_record(tmp_path / "rank0.json", [[("node", "dense.f[0] m0", 0.0, 1.0)]]))
    lanes = Lanes(recording, recording.steps[0])
    assert lanes.phases == {"warm_up": (0, 0), "steady": (0, 10**9), "cool_down": (10**9, 10**9)}
