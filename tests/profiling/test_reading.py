"""Files that cannot be read, and sets of files."""

import gzip
import json
import re
import shutil
from pathlib import Path

from overlap1f1b.profiling import read
from tests.profiling.cases import device, refusal
from tests.profiling.synthetic import Events, write_chrome, write_nsys, write_record


def test_empty_missing_and_foreign_files(tmp_path: Path) -> None:
    one = b'{"traceEvents": [{"ph": "X", "cat": %b}]}'
    files = {
        "empty.json": (b"", "is empty"),
        "text.json": (b"loss 2.4\n", "JSON is malformed: invalid character (byte 0)"),
        "other.json": (b'{"a": 1}', "has no traceEvents"),
        "picture.png": (b"\x89PNG\r\n\x1a\n\0\0\xff\xfe", "JSON is malformed: invalid character (byte 0)"),
        "number.json": (b"12", "Expected `object | array`, got `int`"),
        "latin.json": (b'{"traceEvents": [{"name": "\xff"}]}', "can't decode byte 0xff"),
        "events.json": (b'{"traceEvents": []}', "has no ranges of overlap1f1b and no kernels"),
        "kernel.json": (one % b'"kernel", "args": {}', "Object missing required field `ts`"),
        "late.json": (one % b'"kernel", "args": {}, "ts": 1e30, "dur": 1', "int too big to convert"),
        "args.json": (one % b'"cuda_runtime", "args": 3', "Expected `object`, got `int` - at `$.args`"),
        "deep.json": (b"[" * 100_000, "it is nested too deeply"),
        "broken.json.gz": (b"\x1f\x8b\x08 no gzip", "broken.json.gz"),
        "profile.nsys-rep": (b"\1\2\3", "allowed: its export by nsys export --type sqlite"),
    }
    for name, (content, message) in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert message in refusal(path)
        assert str(path) in refusal(path)
    assert "No such file" in refusal(tmp_path / "nothing.json")
    (tmp_path / "folder").mkdir()
    assert "holds no *.json" in refusal(tmp_path / "folder")


def test_files_that_end_too_early_or_too_late(tmp_path: Path) -> None:
    whole = write_chrome(tmp_path / "whole.json", device())
    cut = tmp_path / "cut.json"
    for end in range(1, len(text := whole.read_bytes()), 500):
        cut.write_bytes(text[:end])
        assert re.search("truncated|malformed", refusal(cut))
    cut.write_bytes(text + b"}")
    assert "JSON is malformed: trailing characters" in refusal(cut)
    packed = tmp_path / "cut.json.gz"
    packed.write_bytes(gzip.compress(whole.read_bytes())[:-20])
    assert "truncated" in refusal(packed)
    database = write_nsys(tmp_path / "whole.sqlite", {1: device()})
    shutil.copy(database, tmp_path / "cut.sqlite")
    with (tmp_path / "cut.sqlite").open("r+b") as file:
        file.truncate(5000)
    assert "allowed: a whole file of nsys export --type sqlite" in refusal(tmp_path / "cut.sqlite")


def test_places_that_no_rank_has(tmp_path: Path) -> None:
    spans = [("node", "dense.f[0] m0", 0.0, 1.0)]
    for place in (
        {"rank": -1},
        {"rank": 2, "mesh": {"ep": [0, 2]}},
        {"mesh": {"ep": [2, 2]}},
        {"mesh": {"ep": [0, 10**9]}},
    ):
        path = write_record(tmp_path / "rank0.json", [spans])
        path.write_text(json.dumps(json.loads(path.read_text()) | place))
        assert "allowed: a rank and positions that are below their sizes, at most 1048576 ranks" in refusal(path)


def test_a_set(tmp_path: Path) -> None:
    write_chrome(tmp_path / "b.json", device(0))
    write_chrome(tmp_path / "a.json.gz", device(1))
    found = read(tmp_path)
    assert [recording.rank for recording in found.ranks] == [0, 1]
    assert not found.partial
    alone = read(tmp_path / "a.json.gz")
    assert (alone.missing, alone.partial) == ((0,), True)
    again = write_chrome(tmp_path / "c.json", device(0))
    assert "are both of rank 0; allowed: one file a rank, of one run" in refusal(tmp_path)
    assert refusal(tmp_path, again) == f"{again} is given twice; allowed: one file a rank, each once"


def test_bad_files_of_a_set_are_left_out(tmp_path: Path) -> None:
    write_chrome(tmp_path / "a.json", device(0))
    (tmp_path / "b.json").write_text('{"traceEvents": [')
    found = read(tmp_path)
    assert (found.missing, found.partial) == ((1,), True)
    assert "b.json: Input data was truncated" in found.left_out[0]
    (tmp_path / "a.json").write_text("")
    assert "is empty" in refusal(tmp_path)


def test_ranks_of_two_runs(tmp_path: Path) -> None:
    node = [("node", "dense.f[0] m0", 0.0, 1.0)]
    write_record(tmp_path / "rank0.json", [node], mesh={"ep": (0, 1)})
    write_record(tmp_path / "rank1.json", [node], rank=1, mesh={"ep": (1, 2)})
    assert "rank0.json is of a run over 1 rank, " in refusal(tmp_path)
    assert "rank1.json of one over 2; allowed: files of one run" in refusal(tmp_path)


def test_a_trace_beside_the_record_of_its_rank(tmp_path: Path) -> None:
    record = write_record(tmp_path / "rank0.json", [[("node", "dense.f[0] m0", 0.0, 1.0)]])
    write_chrome(tmp_path / "rank0.trace.json.gz", device(0))
    assert [recording.source for recording in read(tmp_path).ranks] == ["torch.profiler"]
    assert [recording.source for recording in read(record).ranks] == ["records"]
    assert [recording.source for recording in read(*tmp_path.iterdir()).ranks] == ["torch.profiler"]
    (tmp_path / "elsewhere").mkdir()
    other = write_record(tmp_path / "elsewhere" / "rank0.json", [[("node", "dense.f[0] m0", 0.0, 1.0)]])
    assert "both of rank 0" in refusal(other, tmp_path / "rank0.trace.json.gz")


def test_who_says_which_rank(tmp_path: Path) -> None:
    bare = Events([range_ for range_ in device().ranges if not range_.text.startswith("o1 rank")], device().kernels)
    said = write_chrome(tmp_path / "a.json", bare, top={"distributedInfo": {"rank": 2, "world_size": 3}})
    first = write_chrome(tmp_path / "b.json", bare)
    second = write_chrome(tmp_path / "c.json", bare)
    found = read(said, first, second)
    assert [(recording.rank, recording.path.name) for recording in found.ranks] == [
        (0, "b.json"), (1, "c.json"), (2, "a.json"),
    ]  # fmt: skip
    assert "no rank in it: called rank 0, the next free number" in found.ranks[0].notes
    assert found.missing == ()
