"""A profile's trace and record say the same, on one clock."""

import errno
import gzip
import json
import os
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import Engine, Profile, build_schedule
from overlap1f1b.plan import ActionRange, Label, Node, NodeRange, Op, StepRange, parse_range
from overlap1f1b.record.recorder import RecordedSpan, RecordedStep, added
from overlap1f1b.schedule import Action, Kind
from tests.engines import COSTS, make
from tests.models import H, batch, build, loss_fn
from tests.ranks import over
from tests.tiers import wide

MS = 1e3  # in a trace's microseconds


@over(2)
def test_a_pipeline_of_two_ranks(rank: int, size: int, tmp_path: Path) -> None:
    """Files of a pipeline of two ranks, whose transfers and gradients travel beside nothing else."""
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("pp", "dp", "ep"))
    program = build_schedule("combined_1f1b", ranks=2, microbatches=3)
    engine = make(build(), program, mesh=mesh, loss_fn=loss_fn, overlap=3, costs=COSTS)
    inputs, target = batch(3)
    engine.step(inputs, target=target)
    os.environ["KINETO_LOG_LEVEL"] = "6"
    with Profile(engine, tmp_path / "new" / "tmp_path", first=7) as profile:
        for _ in range(2):
            engine.step(inputs, target=target)
    record, trace = profile.files
    assert (record.name, trace.name) == (f"rank{rank}.record", f"rank{rank}.trace.json.gz")
    assert sorted(path.name for path in record.parent.glob(f"*rank{rank}*")) == [record.name, trace.name]
    saved = json.loads(record.read_text())
    with gzip.open(trace) as file:
        content = json.load(file)
    # Holistic Trace Analysis takes each file that ends so for a trace of the rank that it names first.
    assert [path for path in record.parent.glob(f"rank{rank}.*") if path.name.endswith((".gz", ".json"))] == [trace]
    (named, *_) = re.findall(r'"rank":\s+(\d+)', json.dumps(content))
    assert int(named) == rank
    events, about = content["traceEvents"], saved["about"]
    assert content["overlap1f1b"] | {"date": ""} == about | {"date": ""}
    assert (about["schedule"], about["overlap"], about["choice"]) == (program.name, "3", engine.tuner.choice)
    shown: dict[Any, list[tuple[float, float, int]]] = {}
    for event in events:
        if event.get("ph") == "X" and (found := parse_range(event["name"])) is not None:
            key = (type(found), *found) if not isinstance(found, Label) else found.rank
            shown.setdefault(key, []).append((event["ts"], event["ts"] + event["dur"], event["tid"]))
    assert rank in shown
    assert [step["step"] for step in saved["steps"]] == [7, 8]
    for step in saved["steps"]:
        ((begun, ended, thread),) = shown[StepRange, step["step"]]
        assert ended - begun == pytest.approx(1e6 * step["seconds"], abs=5 * MS)
        apart = []
        for kind, text, start, end in step["spans"]:
            node = parse_range(f"o1 {text}").node  # type: ignore[union-attr]
            ((first, last, where),) = [at for at in shown[NodeRange, kind, node] if begun <= at[0] < ended]
            assert (where == thread) == (kind != "flight")
            apart += [abs(first - begun - 1e6 * start), abs(last - begun - 1e6 * end)]
        assert median(apart) < MS
        launches = {text: start for kind, text, start, _ in step["spans"] if kind == "node"}
        waits = {text: end for kind, text, _, end in step["spans"] if kind == "wait"}
        flights = {text: (start, end) for kind, text, start, end in step["spans"] if kind == "flight"}
        assert {parse_range(f"o1 {text}").node.op for text in flights} == {Op.SEND, Op.RECEIVE}  # type: ignore[union-attr]
        sends = [text for text in flights if text.startswith("send")]
        assert about["bytes"][str(step["step"])] == dict.fromkeys(sends, 2 * 7 * H * 4)
        assert all(flights[text][1] <= end for text, end in waits.items()), "what was waited for has arrived"
        assert all(launches[text] <= start for text, (start, _) in flights.items() if text.startswith("send"))
    for action in program.actions(rank):
        assert len(shown[ActionRange, action]) == 2


def test_what_is_added_to_a_trace_is_on_its_clock_and_in_rows_without_overlaps() -> None:
    flights = [NodeRange("flight", Node(Op.DISPATCH, Kind.F, m, 0)) for m in range(3)]
    action = ActionRange(Action(Kind.F, 0, 0))
    spans = (
        RecordedSpan(NodeRange("node", Node(Op.ATTENTION, Kind.F, 0, 0)), 100.0, 100.1),
        RecordedSpan(flights[0], 100.1, 100.3, "dispatch"),
        RecordedSpan(flights[1], 100.2, 100.4, "dispatch"),
        RecordedSpan(flights[2], 100.3, 100.4, "dispatch"),
        RecordedSpan(NodeRange("flight", Node(Op.COMBINE, Kind.F, 0, 0)), 100.3, 100.4),  # kernels show it
        RecordedSpan(action, 100.0, 100.5),
    )
    events = [{"ph": "X", "name": "o1 step 4", "ts": 5000.0, "dur": 1e6, "pid": 12, "tid": 34}]
    made = list(added(events, [RecordedStep(4, 100.0, 1.0, spans), RecordedStep(5, 200.0, 1.0, spans)]))
    tracks = {event["tid"]: event["args"]["name"] for event in made if event["name"] == "thread_name"}
    assert tracks == {35: "o1 actions", 36: "o1 lane dispatch", 37: "o1 lane dispatch (2)"}
    bars = [(e["name"], e["tid"], round(e["ts"]), round(e["dur"])) for e in made if e["ph"] == "X"]
    assert bars == [
        (str(action), 35, 5000, 500_000),
        (str(flights[0]), 36, 105_000, 200_000),
        (str(flights[2]), 36, 305_000, 100_000),
        (str(flights[1]), 37, 205_000, 200_000),
    ]
    assert {event["pid"] for event in made} == {12}


def test_a_full_disk_is_said_in_one_line_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.environ["KINETO_LOG_LEVEL"] = "6"
    engine = Engine(build(), build_schedule("sequential", microbatches=1), loss_fn=loss_fn)
    inputs, target = batch(1)
    monkeypatch.setattr("overlap1f1b.record.recorder.gzip.open", full)
    why = f"{tmp_path}: No space left on device; allowed: a folder with room for the files"
    with pytest.raises(ValueError, match=f"^{re.escape(why)}$"), Profile(engine, tmp_path):
        engine.step(inputs, target=target)
    assert list(tmp_path.iterdir()) == []


def test_a_profile_without_a_step_writes_nothing(tmp_path: Path) -> None:
    os.environ["KINETO_LOG_LEVEL"] = "6"
    engine = Engine(build(), build_schedule("sequential", microbatches=1), loss_fn=loss_fn)
    why = r"^a profile without a step; allowed: one engine\.step or more"
    with pytest.raises(ValueError, match=why), Profile(engine, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": "file/in"}, "file/in: Not a directory; allowed: a folder that can be written"),
        *wide(
            ({"tool": "nvtx"}, "tool='nvtx'; allowed: torch or nsys"),
            ({"engine": None}, "engine=None; allowed: Engine"),
            ({"folder": 3}, "folder=3; allowed: str or PathLike"),
            ({"first": "1"}, "first='1'; allowed: a whole number, 0 or more"),
            pytest.param(
                {"tool": "nsys"},
                r"nsys without a GPU that torch \S+ can use; allowed: torch.profiler",
                marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there"),
            ),
        ),
    ],
)
def test_what_a_profile_does_not_take(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    engine = Engine(build(), build_schedule("sequential", microbatches=1), loss_fn=loss_fn)
    with pytest.raises(ValueError, match=f"^{message}$"):
        Profile(**{"engine": engine, "folder": "folder", **options})
