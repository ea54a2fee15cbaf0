"""Traces against the Trace Event Format, as Google documents it for chrome://tracing and as Perfetto reads it.

The JSON object format: ``traceEvents``, each with ``ph``; here complete events (``X``) and metadata (``M``). Perfetto
turns ``ts`` and ``dur`` into whole nanoseconds and nests slices of a thread, so none may reach into the next.
"""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlap1f1b.plan import NodeCosts, Overlap
from overlap1f1b.schedule import SCHEDULES, build_schedule
from overlap1f1b.simulation import Costs, simulate
from overlap1f1b.simulation.trace import Event, write_trace
from tests.tiers import first, wide

NAMES, ORDERS = ("process_name", "thread_name"), ("process_sort_index", "thread_sort_index")
Track = tuple[int, int]


def load(path: Path) -> tuple[list[dict[str, Any]], dict[Track, str]]:
    """The spans and the names of the tracks of a trace that keeps every rule of the format."""

    def refuse(number: str) -> None:
        raise AssertionError(f"{number} is no JSON")

    trace = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    spans = [record for record in trace["traceEvents"] if record["ph"] == "X"]
    metadata = [record for record in trace["traceEvents"] if record["ph"] == "M"]
    assert len(spans) + len(metadata) == len(trace["traceEvents"])
    for record in metadata:
        assert set(record) == {"ph", "name", "pid", "tid", "args"}
        if record["name"] in NAMES:
            assert set(record["args"]) == {"name"}
            assert isinstance(record["args"]["name"], str)
        else:
            assert record["name"] in ORDERS
            assert type(record["args"]["sort_index"]) is int
    said = Counter((record["name"], record["pid"], record["tid"]) for record in metadata)
    assert set(said.values()) <= {1}
    for record in spans:
        assert set(record) == {"ph", "name", "cat", "pid", "tid", "ts", "dur"}
        assert record["name"]
        assert isinstance(record["name"], str)
        assert "," not in record["cat"]  # a comma parts categories
        assert type(record["ts"]) is type(record["dur"]) is float
        assert record["ts"] >= 0
        assert record["dur"] >= 0
    for record in (*spans, *metadata):  # 0 is Perfetto's idle process and thread
        assert type(record["pid"]) is type(record["tid"]) is int
        assert record["pid"] > 0
        assert record["tid"] > 0 or record["name"] in (NAMES[0], ORDERS[0])
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in metadata if r["name"] == "thread_name"}
    assert set(names) == {(span["pid"], span["tid"]) for span in spans}
    processes = {r["pid"]: r["args"]["name"] for r in metadata if r["name"] == "process_name"}
    assert set(processes) == {pid for pid, _ in names}
    assert len(set(processes.values())) == len(processes)
    assert len(set(names)) == len({(pid, name) for (pid, _), name in names.items()})  # two tracks, two names
    assert len({tid for _, tid in names}) == len(names)  # threads are told apart without their process
    for track in names:
        own = sorted(nanoseconds(span) for span in spans if (span["pid"], span["tid"]) == track)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    return spans, names


def nanoseconds(span: dict[str, Any]) -> tuple[int, int]:
    """Start and end as Perfetto takes them: both numbers rounded apart."""
    start = round(span["ts"] * 1000)
    return start, start + round(span["dur"] * 1000)


@pytest.mark.parametrize("name", first(SCHEDULES, "sequential"))
def test_every_schedule(name: str, tmp_path: Path) -> None:
    program = build_schedule(name, ranks=2, microbatches=5 if name != "dualpipe" else 4)
    path = tmp_path / "trace.json"
    timeline = simulate(program, Costs(1 / 3, 2 / 3, 0.1, 0.9, send=0.07))
    timeline.to_chrome_trace(path, unit_us=1 / 7)
    spans, names = load(path)
    assert len(spans) == sum(map(len, timeline.ranks)) + len(timeline.transfers)
    assert set(names.values()) == {"compute", "to rank 0", "to rank 1"}
    assert max(span["ts"] + span["dur"] for span in spans) == pytest.approx(
        timeline.makespan / 7, abs=1e-3
    )  # whole nanoseconds
    costs = NodeCosts.uniform(attention=1 / 3, experts=0.7, dispatch=0.9, counts=0.01, send=1 / 9)
    overlaps: tuple[Overlap, ...] = ("serial", 2)
    for overlap in overlaps:
        nodes = simulate(program, costs, overlap=overlap)
        nodes.ranks[1].to_chrome_trace(path, rank=5)
        assert len(load(path)[0]) == len(nodes.ranks[1].spans)
        nodes.to_chrome_trace(path, unit_us=1e3 / 7)
        spans, names = load(path)
        assert len(spans) == sum(len(rank.spans) for rank in nodes.ranks)
        assert {"compute", "exchange", "peer"} <= set(names.values())


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 3), st.booleans())), st.floats(1e-3, 1e4))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_spans(tmp_path: Path, parts: list[tuple[float, float, bool]], unit: float) -> None:
    events = [
        Event("rank 0", "exchange" if flag else "compute", "x", start, start + time) for start, time, flag in parts
    ]
    write_trace(events, tmp_path / "trace.json", unit_us=unit)
    spans, _ = load(tmp_path / "trace.json")
    want = sorted((round(e.start * unit * 1000), round(e.end * unit * 1000)) for e in events)
    assert sorted(map(nanoseconds, spans)) == want


def test_overlapping_spans_lie_on_tracks_of_their_own(tmp_path: Path) -> None:
    events = [
        Event("rank 0", "exchange", name, *times) for name, times in {"a": (0, 3), "b": (1, 2), "c": (3, 4)}.items()
    ]
    write_trace(events, tmp_path / "trace.json")
    spans, names = load(tmp_path / "trace.json")
    tracks = {span["name"]: names[span["pid"], span["tid"]] for span in spans}
    assert tracks == {"a": "exchange", "b": "exchange (2)", "c": "exchange"}
    assert {span["name"]: span["dur"] for span in spans} == {"a": 3000.0, "b": 1000.0, "c": 1000.0}


@pytest.mark.parametrize("unit", [0, *wide(-1.0, float("nan"), float("inf"), "1")])
def test_a_unit_without_length(unit: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^unit_us={unit!r}; allowed: a finite number, more than 0$"):
        write_trace([], tmp_path / "trace.json", unit_us=unit)


def test_flows_lead_from_the_end_of_one_span_to_the_start_of_another(tmp_path: Path) -> None:
    """Viewers look for the slice that is there at the time of a flow's end, so both lie inside theirs."""
    send, far = Event("rank 0", "peer", "send", 1.0, 2.0), Event("rank 0", "peer", "next", 2.0, 3.0)
    take, early = Event("rank 1", "compute", "take", 2.5, 4.0), Event("rank 1", "compute", "early", 0.0, 2.5)
    path = tmp_path / "trace.json"
    write_trace([send, far, take, early], path, flows=[(send, take), (send, early)])
    records = json.loads(path.read_text())["traceEvents"]
    slices = {record["name"]: record for record in records if record["ph"] == "X"}
    flows = [record for record in records if record["ph"] in "sf"]
    assert [(flow["ph"], flow["id"], flow["ts"]) for flow in flows] == [
        ("s", 1, 1999.999),
        ("f", 1, 2500.0),
        ("s", 2, 1000.0),  # not behind its target
        ("f", 2, 0.0),
    ]
    for flow, name in zip(flows, ("send", "take", "send", "early"), strict=True):
        assert (flow["pid"], flow["tid"], flow["bp"]) == (slices[name]["pid"], slices[name]["tid"], "e")
