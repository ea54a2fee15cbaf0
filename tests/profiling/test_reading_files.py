"""Small files without our ranges, made after the formats of torch.profiler on CUDA and ROCm, and of nsys export.

All have one step on a device: a product with an all-to-all that begins under it, a copy, DeepEP's (on ROCm MORI's)
dispatch with an addition, an all-reduce on the compute stream.
"""

import gzip
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from overlap1f1b.profiling import Recording, figures_of, read, read_file

FILES = sorted((Path(__file__).parent / "files").iterdir())
ROCM = {
    "ncclDevKernel_SendRecv": "ncclDevKernel_Generic_1",
    "deep_ep::intranode::dispatch": "mori::moe::EpDispatchIntraNodeKernel",
}
ROCM |= {"ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "mscclKernel_Sum_hip_bfloat16_Simple_false"}
BY_NAME = {
    "deep_ep::intranode::dispatch": (40_000, 20_000),
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": (20_000, 20_000),
    "ncclDevKernel_SendRecv": (100_500, 50_250),
}


def recording_of(path: Path, folder: Path) -> Recording:
    """Read a copy: a database is made of its text."""
    if path.suffix == ".sql":
        with closing(sqlite3.connect(folder / "rank.sqlite")) as database, database:
            database.executescript(path.read_text())
    else:
        shutil.copy(path, folder / "rank.json")
    (recording,) = read_file(next(folder.iterdir()))
    return recording


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_names_tell_exchange_from_compute(path: Path, tmp_path: Path) -> None:
    recording = recording_of(path, tmp_path)
    figures = figures_of(recording)
    assert (recording.by, recording.device, recording.measured) == ("name", True, True)
    assert (figures.compute, figures.overlap) == (180_500, (160_500, 90_250))
    names = ROCM if "rocm" in path.stem else {}
    assert figures.by_sub_op == {names.get(name, name): part for name, part in BY_NAME.items()}
    said = "\n".join(recording.notes)
    assert "exchange: 3 of 6 kernels and copies, 0.161 ms" in said
    assert "compute: 2 of 6 kernels and copies, 0.180 ms" in said
    assert "left out: 1 of 6 kernels and copies, 0.109 ms: Memcpy" in said


def test_ranks_of_other_programs_in_one_folder(tmp_path: Path) -> None:
    """As torch.profiler's handler for TensorBoard names them, gzipped or not, and beside other JSON."""
    (path,) = [path for path in FILES if path.stem == "torch-2.15"]
    for rank in range(3):
        content = json.loads(path.read_text())
        content["distributedInfo"] |= {"rank": rank, "world_size": 3}
        text = json.dumps(content, indent=2 * rank).encode()
        name = tmp_path / f"node{rank}_4000.179085702{rank}.pt.trace.json{'.gz' * (rank % 2)}"
        name.write_bytes(gzip.compress(text) if rank % 2 else text)
    (tmp_path / "config.json").write_text('{"layers": 4}')
    found = read(tmp_path)
    assert [recording.rank for recording in found.ranks] == [0, 1, 2]
    assert (found.missing, len(found.left_out), found.partial) == ((), 1, False)


def test_the_query_for_perfetto(tmp_path: Path) -> None:
    """Of the page about other tools, by SQLite over Perfetto's columns."""
    page = Path(__file__).parents[2] / "docs" / "profiling" / "other-tools.md"
    query = page.read_text().split("```sql\n")[1].split("```")[0]
    (path,) = [path for path in FILES if path.stem == "torch-2.15"]
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    rows = [(e["name"], e["cat"], round(1000 * e["ts"]), round(1000 * e["dur"])) for e in events]
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE slice (name TEXT, category TEXT, ts INTEGER, dur INTEGER)")
        database.executemany("INSERT INTO slice VALUES (?, ?, ?, ?)", rows)
        ((hidden,),) = database.execute(query)
    assert hidden / 100 == pytest.approx(figures_of(recording_of(path, tmp_path)).overlap.hidden_fraction)


def test_several_devices_of_one_process_are_said(tmp_path: Path) -> None:
    (path,) = [path for path in FILES if path.stem == "torch-2.11"]
    content = json.loads(path.read_text())
    kernels = [event for event in content["traceEvents"] if event.get("cat") == "kernel"]
    kernels[0]["args"]["device"] = 1
    del kernels[1]["args"]["device"]
    (tmp_path / "rank.json").write_text(json.dumps(content))
    (recording,) = read_file(tmp_path / "rank.json")
    said = "one process with kernels on devices 0, 1: the figures take them for one device"
    assert said in recording.notes
