"""Traces that Perfetto opens: valid JSON, named tracks, and no two spans of a track that overlap."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from overlap1f1b.plan import NodeCosts, compile
from overlap1f1b.schedule import build_schedule, combined_1f1b
from overlap1f1b.simulation import Costs, simulate
from overlap1f1b.simulation.trace import Event, write_trace
from tests.plan.cases import MOE


def load(path: Path) -> tuple[list[dict[str, Any]], dict[tuple[int, int], str]]:
    records = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [record for record in records if record["ph"] == "X"]
    names = {
        (record["pid"], record["tid"]): record["args"]["name"] for record in records if record["name"] == "thread_name"
    }
    for track in names:
        own = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if (s["pid"], s["tid"]) == track)
        assert own
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(own))
    assert all((span["pid"], span["tid"]) in names for span in spans)
    return spans, names


def test_trace_of_a_program(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = simulate(build_schedule("dualpipe", ranks=4, microbatches=8), Costs(send=0.25))
    timeline.to_chrome_trace(path, unit_us=1e6)
    spans, names = load(path)
    assert len(spans) == sum(map(len, timeline.ranks)) + len(timeline.transfers)
    assert sorted(set(names.values())) == ["compute", "to rank 0", "to rank 1", "to rank 2", "to rank 3"]
    assert max(span["ts"] + span["dur"] for span in spans) == pytest.approx(timeline.makespan * 1e6)


def test_trace_of_a_plan(tmp_path: Path) -> None:
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5)
    timeline = simulate(compile(combined_1f1b(4), (MOE,) * 2, costs, 3), costs).ranks[0]
    timeline.to_chrome_trace(tmp_path / "trace.json", rank=5)
    spans, names = load(tmp_path / "trace.json")
    assert len(spans) == len(timeline.spans)
    assert set(names.values()) == {"compute", "exchange", "control"}


def test_overlapping_spans_lie_on_tracks_of_their_own(tmp_path: Path) -> None:
    events = [
        Event("rank 0", "exchange", name, *times) for name, times in {"a": (0, 3), "b": (1, 2), "c": (3, 4)}.items()
    ]
    write_trace(events, tmp_path / "trace.json")
    spans, names = load(tmp_path / "trace.json")
    assert [names[span["pid"], span["tid"]] for span in spans] == ["exchange", "exchange (2)", "exchange"]
    assert [span["dur"] for span in spans] == [3000.0, 1000.0, 1000.0]


def test_a_unit_without_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unit_us=0; allowed: a finite number > 0"):
        write_trace([], tmp_path / "trace.json", unit_us=0)
