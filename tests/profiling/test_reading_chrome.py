"""Traces of torch.profiler: their two forms, and numbers that are none."""

import json
import re
from pathlib import Path

from overlap1f1b.profiling import read, read_file
from tests.profiling.cases import DEVICE, device, refusal, summed
from tests.profiling.synthetic import Events, write_chrome


def test_numbers_that_are_none_leave_the_other_files(tmp_path: Path) -> None:
    write_chrome(tmp_path / "a.json", device(0))
    for place in ({"rank": "1", "world_size": 3}, {"rank": 1, "world_size": "3"}, {"rank": 1.5}):
        path = write_chrome(tmp_path / "b.json", device(1), top={"distributedInfo": place})
        assert "Expected `int | null`, got" in refusal(path)
        assert len(read(tmp_path).left_out) == 1
    path = write_chrome(tmp_path / "b.json", device(1))
    path.write_text(re.sub(r"o1 step \d+", f"o1 step {2**63}", path.read_text()))
    assert f"has a step {2**63}; allowed: less than 2**63" in refusal(path)
    assert len(read(tmp_path).left_out) == 1


def test_a_trace_that_is_an_array(tmp_path: Path) -> None:
    path = write_chrome(tmp_path / "a.json", device())
    path.write_text(json.dumps(json.loads(path.read_text())["traceEvents"]))
    (recording,) = read_file(path)
    assert recording.rank == 0


def test_texts_for_streams_and_correlations(tmp_path: Path) -> None:
    """As calls on ROCm have them, and traces that other tools have rewritten."""
    content = json.loads(write_chrome(tmp_path / "a.json", device()).read_text())
    for event in content["traceEvents"]:
        if event.get("cat") == "cuda_runtime":
            event["cat"] = "hip_runtime"
            event["args"] |= {"stream": "0x0"}
    (path := tmp_path / "b.json").write_text(json.dumps(content))
    (recording,) = read_file(path)
    assert summed(recording) == DEVICE
    for event in content["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            event["args"]["stream"] = {7: "0x0", 20: 2**63 + 20}.get(event["args"]["stream"], "0x55d0c0ffee20")
        if "correlation" in event.get("args", {}):
            event["args"]["correlation"] = str(event["args"]["correlation"])
    path.write_text(json.dumps(content))
    (recording,) = read_file(path)
    assert summed(recording) == DEVICE


def test_kernels_without_arguments(tmp_path: Path) -> None:
    """Their track is their stream; nothing leads to their launch."""
    content = json.loads(write_chrome(tmp_path / "a.json", Events([], device().kernels)).read_text())
    for event in content["traceEvents"]:
        event.pop("args", None)
        event |= {key: str(event[key]) for key in ("ts", "dur") if key in event}  # as some profilers write times
    (path := tmp_path / "b.json").write_text(json.dumps(content))
    (recording,) = read_file(path)
    assert recording.by == "stream"
    assert "stream 7, which has most kernels" in recording.notes[0]
