"""Our own records: their figures are those of the timeline that was written."""

import json
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from overlap1f1b.plan import Overlap
from overlap1f1b.profiling import figures_of, read_file
from overlap1f1b.profiling.verdict import verdict
from tests.profiling.cases import refusal
from tests.profiling.simulated import simulated, write_run
from tests.profiling.synthetic import write_record
from tests.tiers import wide


@pytest.mark.parametrize(
    ("schedule", "overlap", "opened"),
    [("1f1b", "serial", 1), *wide(("combined_1f1b", "pairs", 2), ("dualpipev", 3, 3))],
)
def test_figures_of_a_timeline(tmp_path: Path, schedule: str, overlap: Overlap, opened: int) -> None:
    timeline = simulated(schedule, overlap)
    folder = write_run(tmp_path / "run", timeline, steps=2)
    for number, rank in enumerate(timeline.ranks):
        (recording,) = read_file(folder / f"rank{number}.json")
        figures = figures_of(recording)
        assert figures.steps == 2
        assert figures.per_step_ms(figures.overlap.exchange) == pytest.approx(rank.exchange, abs=1e-5)
        assert figures.per_step_ms(figures.overlap.exposed) == pytest.approx(rank.exposed, abs=1e-5)
        assert figures.overlap.hidden_fraction == pytest.approx(rank.hidden_fraction, abs=1e-7)
        assert figures.per_step_ms(figures.time) == pytest.approx(timeline.makespan, abs=1e-5)
        assert sum(figures.idle.values()) == figures.time - figures.compute
        assert sum(figures.by_cause.values()) == figures.overlap.exposed
        for index in range(2):
            assert sum(part[index] for part in figures.by_phase.values()) == figures.overlap[index]
        assert 1 <= figures.open_actions <= opened
    assert figures.open_actions == opened or schedule == "dualpipev"


def content(**changes: Any) -> dict[str, Any]:
    return {"format": "overlap1f1b-spans", "version": 1, "rank": 0, "mesh": {}, "steps": [], **changes}


def step(*span: Any, **changes: Any) -> dict[str, Any]:
    """The content of one step, of one span at most."""
    return content(steps=[{"step": 1, "seconds": 1.0, "spans": [list(span)] if span else [], **changes}])


def said_of(path: Path, broken: dict[str, Any]) -> str:
    """What is said of a file with this content, but for its name."""
    path.write_text(json.dumps(broken))
    said = refusal(path)
    assert str(path) in said
    return said.replace(str(path), "")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (content(version=2), "version 2 of overlap1f1b-spans; allowed: 1"),
        *wide(
            (content(steps=None), "not a record of overlap1f1b profile"),
            (content(rank="first"), "not a record of overlap1f1b profile"),
            (content(mesh=[1]), "not a record of overlap1f1b profile"),
            (step("node", "dinner.f[0] m0", 0, 1), "'dinner.f[0] m0' is not a node"),
            (step("nap", "dense.f[0] m0", 0, 1), "not a record of overlap1f1b profile"),
            (step("node", "dense.f[0] m0", 0), "not a record of overlap1f1b profile"),
            (content(steps=[]), "no steps"),
            (step("node", "dense.f[0] m0", 0, 1e300), "impossible times"),
            (step("node", "dense.f[0] m0", 0, -1), "impossible times"),
            (step(seconds=float("inf")), "JSON is malformed"),
            (step(seconds=1e300), "impossible times"),
            (step(seconds=-1), "impossible times"),
            (step(step=1.5), "Expected `int`, got `float` - at `$.steps[0].step`"),
            (step() | {"rank": 0.5}, "Expected `int`, got `float` - at `$.rank`"),
        ),
    ],
)
def test_what_is_no_record(tmp_path: Path, broken: dict[str, Any], message: str) -> None:
    assert message in said_of(tmp_path / "rank0.json", broken)


LONG = "x" * 10**6


@pytest.mark.parametrize(
    "broken",
    [
        content(version=LONG),
        *wide(
            content(steps=LONG),
            step(LONG, "dense.f[0] m0", 0, 1),
            step("node", LONG, 0, 1),
            step("node", f"dense.f[0] m{'9' * 900}", 0, 1),
            step() | {"mesh": {LONG: [3, 2]}},
            step() | {"mesh": {f"{n}": [10**900, 2] for n in range(1000)}},
            step() | {"rank": 10**4000},
        ),
    ],
)
def test_long_values_are_cut(tmp_path: Path, broken: dict[str, Any]) -> None:
    assert len(said_of(tmp_path / "rank0.json", broken)) < 1500


def test_keys_in_any_order_and_steps_one_after_the_other(tmp_path: Path) -> None:
    spans = [["node", "dense.f[0] m0", 0.25, 0.5], ["node", "dense.b[0] m0", 0.5, 1.0]]
    steps = [{"spans": spans, "seconds": 2.0, "step": 4}, {"step": 5, "seconds": 1.0, "spans": spans[:1]}]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(dict(reversed(content(steps=steps).items()))))
    (recording,) = read_file(path)
    assert [(s.number, s.start, s.end, len(s.issued)) for s in recording.steps] == [
        (4, 0, 2 * 10**9, 2),
        (5, 2 * 10**9, 3 * 10**9, 1),
    ]
    assert recording.steps[1].issued.start.tolist() == [225 * 10**7]


def test_waits_cut_nothing_that_was_measured_without_them(tmp_path: Path) -> None:
    spans = [
        ("node", "dense.f[0] m0", 0.0, 1.0),
        ("wait", "receive.b[0] m0", 1.0, 3.0),
        ("flight", "receive.b[0] m0", 0.5, 3.0),
        ("node", "dense.b[0] m0", 3.5, 4.0),
    ]
    (recording,) = read_file(write_record(tmp_path / "rank0.json", [spans], seconds=4.5))
    figures = figures_of(recording)
    assert figures.idle == {"order": 0, "imbalance": 0, "host": 10**9, "link": 0, "pipeline": 2 * 10**9}
    assert isnan(figures.overlap.hidden_fraction)


def test_a_record_of_a_device_has_both_clocks(tmp_path: Path) -> None:
    spans = [
        ("node", "attention.f[0] m0", 0.0, 0.25),
        ("node", "dispatch.f[0] m0", 0.25, 0.5),
        ("flight", "dispatch.f[0] m0", 0.25, 0.5),
        ("node", "experts.f[0] m0", 0.5, 1.5),
        ("device", "attention.f[0] m0", 0.25, 1.0),
        ("device", "dispatch.f[0] m0", 1.0, 1.5),
        ("device", "experts.f[0] m0", 1.5, 3.0),
    ]
    (recording,) = read_file(write_record(tmp_path / "rank0.json", [spans], seconds=3.0))
    assert recording.device
    figures = figures_of(recording)
    assert (figures.compute, figures.overlap.exchange, figures.overlap.exposed) == (225 * 10**7, 5 * 10**8, 5 * 10**8)
    assert figures.by_cause == {"order": 5 * 10**8, "imbalance": 0, "host": 0, "link": 0, "pipeline": 0}
    assert "The host bounds the step" not in verdict(figures)
