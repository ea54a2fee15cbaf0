"""The verb: what it prints and writes, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.cli.report.figures import content_of, print_table, tables_of
from overlap1f1b.profiling import bars_of, read
from overlap1f1b.record import Profile
from overlap1f1b.schedule import build_schedule
from overlap1f1b.simulation import CAUSES
from tests import models
from tests.cli.inside import report
from tests.cli.lasting import lasting
from tests.engines import make
from tests.observing import Last
from tests.profiling.cases import DEVICE_IDLE, device, host
from tests.profiling.simulated import simulated, write_run
from tests.profiling.synthetic import Events, Kernel, write_chrome, write_nsys, write_record
from tests.ranks import Ranks
from tests.tiers import wide

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder of two ranks."""
    return write_run(tmp_path / "run", simulated("combined_1f1b", 3), steps=2)


def without_files(found: dict[str, Any]) -> dict[str, Any]:
    ranks = [{key: value for key, value in rank.items() if key not in ("file", "source")} for rank in found["ranks"]]
    return {**found, "ranks": ranks}


def test_keys_and_figures(capsys: Capture, tmp_path: Path) -> None:
    found = report.content(capsys, write_chrome(tmp_path / "rank0.json", device(0)))
    (rank,) = found["ranks"]
    assert {"ranks", "verdict", "advice", "all", "longest_exposed", "partial", "missing_ranks"} <= set(found)
    assert {key: round(1e6 * rank[key]) for key in ("exchange_ms", "hidden_ms", "exposed_ms", "step_ms")} == {
        "exchange_ms": 220, "hidden_ms": 100, "exposed_ms": 120, "step_ms": 919,
    }  # fmt: skip
    assert rank["hidden_fraction"] == pytest.approx(100 / 220)
    assert set(rank["by_sub_op"]) == {"dispatch.f"}
    assert set(rank["by_phase"]) == {"warm_up", "steady", "cool_down"}
    assert {name: round(1e6 * time) for name, time in rank["idle_by_cause_ms"].items()} == DEVICE_IDLE
    assert (found["partial"], found["missing_ranks"]) == (True, [1])
    assert found["verdict"].startswith("Of some ranks only: In part: 45% of the exchange was hidden")


def test_nsys_and_chrome_say_the_same(capsys: Capture, tmp_path: Path) -> None:
    traces = [write_chrome(tmp_path / f"rank{rank}.json.gz", device(rank)) for rank in range(2)]
    export = write_nsys(tmp_path / "both.sqlite", {3: device(0), 4: device(1)})
    assert without_files(report.content(capsys, *traces)) == without_files(report.content(capsys, export))


def test_what_is_printed(capsys: Capture, run: Path) -> None:
    result = report(capsys, run, "--predicted")
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "2 ranks, 2 steps (records)"
    found = report.content(capsys, run)
    figures = found["all"]
    texts = [f"{figures[key]:.3f}" for key in ("step_ms", "compute_ms", "exchange_ms", "hidden_ms", "exposed_ms")]
    causes = figures["exposed_by_cause_ms"]
    assert sum(causes.values()) == pytest.approx(figures["exposed_ms"], abs=1e-3)  # a microsecond
    texts += [f"{figures['hidden_fraction']:.1%}", *(f"{time:.3f}" for time in causes.values())]
    assert ["mean", *texts] in [line.split() for line in lines]
    for name in ("combine.b", "dispatch.f", "warm-up", "steady", "cool-down", "Predicted", "Longest"):
        assert name in result.out
    assert found["verdict"] in result.out
    assert len(found["longest_exposed"]) == 10
    durations = [span["exposed_ms"] for span in found["longest_exposed"]]
    assert durations == sorted(durations, reverse=True)
    assert all(f"try: {tip}" in result.out for tip in found["advice"])


def test_partial_results_are_marked(capsys: Capture, run: Path) -> None:
    (run / "rank0.json").write_text("")
    result = report(capsys, run)
    assert result.status == 0
    assert "no file of rank 0: figures are of the other ranks alone" in result.out
    assert "left out: " in result.out
    assert "rank0.json is empty" in result.out
    assert "\nOf some ranks only: " in result.out


def test_a_few_files_of_many_ranks(capsys: Capture, tmp_path: Path) -> None:
    spans = [("node", "dense.f[0] m0", 0.0, 1.0)]
    for rank in (3, 4, 6):
        path = write_record(tmp_path / f"rank{rank}.json", [spans])
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rank": rank, "mesh": {"ep": [rank, 512]}}))
    result = report(capsys, tmp_path)
    assert "no file of rank 0 to 2, 5, 7 to 511: figures are of the other ranks alone" in result.out


def test_nothing_exchanged_is_no_share(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names that fit into a line
    alone = write_record(tmp_path / "rank0.json", [[("node", "dense.f[0] m0", 0.0, 1.0)]])
    found = report.content(capsys, alone)
    assert found["ranks"][0]["hidden_fraction"] is None
    result = report(capsys, alone)
    row = next(line.split() for line in result.out.splitlines() if line.startswith("   0"))
    assert row == ["0", "1000", "1000", "0.000", "0.000", "0.000", "–", *["0.000"] * 5]
    assert "steady" not in result.out
    write_run(tmp_path / "run", simulated("combined_1f1b", 3))
    result = report(capsys, "--compare", "rank0.json", "run")
    assert "run hides 77% of its exchange and rank0.json nothing; its step takes" in result.out
    assert ["hidden", "–", "76.7%", "–"] in [line.split() for line in result.out.splitlines()]


def test_a_narrow_terminal_cuts_no_figure(run: Path) -> None:
    for table in tables_of(content_of(read(run))):
        screen = Console(width=80, file=(shown := StringIO()))
        print_table(table, screen)
        words = shown.getvalue().split()
        assert all(word in words for row in table.rows for text in row for word in text.split())


def test_streams_are_said_to_be_streams(capsys: Capture, tmp_path: Path) -> None:
    path = write_chrome(tmp_path / "a.json", Events([], device().kernels))
    result = report(capsys, path, "--svg", tmp_path / "a.svg")
    assert result.status == 0
    assert "rank 0: no ranges of overlap1f1b: stream 7, which has most kernels, counts as compute" in result.out
    assert "stream 20" in result.out
    (rank,) = report.content(capsys, path)["ranks"]
    assert (rank["told_by"], rank["open_actions"]) == ("stream", None)


def test_what_no_file_shows_is_not_measured(capsys: Capture, tmp_path: Path) -> None:
    """Neither a share of 0 nor nothing exchanged: kernels of known names, none of an exchange; a run without ranges."""
    gemm = Kernel(7, 0, 100, 0, name="void cutlass::Kernel2<int>(int)")
    alone = write_chrome(tmp_path / "alone.json", Events([], [gemm]))
    found = report.content(capsys, alone)
    (rank,) = found["ranks"]
    keys = ("exchange_ms", "hidden_ms", "exposed_ms", "hidden_fraction")
    assert {key: rank[key] for key in keys} == dict.fromkeys(keys)
    assert rank["idle_by_cause_ms"] == rank["exposed_by_cause_ms"] == dict.fromkeys(CAUSES)
    assert found["verdict"].startswith("Not measured: ")
    row = ["0", "0.000", "0.000", *["not", "measured"] * 3, "–", *["not", "measured"] * 5]
    assert row in [line.split() for line in report(capsys, alone).out.splitlines()]
    named = Kernel(20, 50, 150, 1, name="ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
    first = write_chrome(tmp_path / "first.json", Events([], [gemm, named]))
    second = write_chrome(tmp_path / "second.json", device(0))
    lines = report(capsys, "--compare", first, second).out.splitlines()
    phase = next(line for line in lines if line.startswith("exposed, steady"))
    assert phase.split()[2:5] == ["not", "measured", "0.000"]
    verdict = report.content(capsys, "--compare", alone, second)["verdict"]
    assert verdict.endswith(f"as long as {alone}'s; not both exchanges were measured.")


def test_notes_of_many_ranks_are_a_screen(capsys: Capture, tmp_path: Path) -> None:
    gemm = Kernel(7, 0, 100, 0, name="void cutlass::Kernel2<int>(int)")
    for rank in range(16):
        place = {"distributedInfo": {"rank": rank, "world_size": 16}}
        write_chrome(tmp_path / f"{rank}.json", Events([], [gemm]), top=place)
    before = report(capsys, tmp_path).out.split("Milliseconds of a step")[0].splitlines()
    assert len(before) < 30
    assert "rank 15: no ranges of steps: the whole file is taken for one step" in before
    assert len(report.content(capsys, tmp_path)["notes"]) == 64


def test_seconds_have_no_decimals(capsys: Capture, tmp_path: Path) -> None:
    runs = []
    for name, waits in (("first", 1.0), ("second", 8.0)):
        spans = [("node", "dense.f[0] m0", 0.0, 1.0), ("flight", "dispatch.f[0] m0", 0.5, 1.5 + waits)]
        runs.append(write_record(tmp_path / f"{name}.json", [spans]))
    result = report(capsys, "--compare", *runs)
    assert ["exposed", "1500", "8500", "+7000"] in [line.split() for line in result.out.splitlines()]
    assert "with +7000 ms exposed." in result.out


def test_compare(capsys: Capture, tmp_path: Path) -> None:
    slow = write_run(tmp_path / "slow", simulated("1f1b", "serial"))
    fast = write_run(tmp_path / "fast", simulated("combined_1f1b", 3))
    found = report.content(capsys, "--compare", slow, fast)
    first, second = (run["all"] for run in found["compare"])
    assert first["hidden_fraction"] < second["hidden_fraction"]
    assert without_files(found["compare"][0]) == without_files(report.content(capsys, slow))
    result = report(capsys, "--compare", slow, fast)
    change = second["exposed_ms"] - first["exposed_ms"]
    expected = ["exposed", f"{first['exposed_ms']:.3f}", f"{second['exposed_ms']:.3f}", f"{change:+.3f}"]
    assert expected in [line.split() for line in result.out.splitlines()]
    assert found["verdict"] in result.out
    assert f"{second['step_ms'] / first['step_ms']:.2f} times as long" in found["verdict"]


def test_picture(capsys: Capture, run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.svg"
    assert report(capsys, run, "--predicted", "--step", 1, "--svg", path).status == 0
    texts = {"".join(node.itertext()).strip() for node in ElementTree.parse(path).iter()}
    assert {
        "rank 0 compute",
        "rank 0 predicted exchange",
        "rank 1 peers",
        "2 ranks, 2 steps (records), step 1",
    } <= texts


def test_trace_with_arrows(capsys: Capture, run: Path, tmp_path: Path) -> None:
    path = tmp_path / "perfetto.json"
    assert report(capsys, run, "--trace", path, "--predicted").status == 0
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 2 * len(bars_of(read(run).ranks, 2))
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {"rank 0", "rank 1", "rank 0 predicted", "rank 1 predicted"}
    begins, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert begins.keys() == ends.keys()
    sent = sum(event["name"].startswith(("counts", "dispatch", "combine")) for event in slices)
    assert len(begins) >= sent > 0
    for number, begin in begins.items():
        assert begin["ts"] <= ends[number]["ts"]
        for end in (begin, ends[number]):
            around = [s for s in slices if s["tid"] == end["tid"] and s["ts"] <= end["ts"] < s["ts"] + s["dur"]]
            assert len(around) == 1


def test_predictions_are_in_the_content(capsys: Capture, run: Path) -> None:
    timeline = simulated("combined_1f1b", 3)
    found = report.content(capsys, run, "--predicted")
    for rank, expected in zip(found["ranks"], timeline.ranks, strict=True):
        assert rank["predicted"]["exposed_ms"] == pytest.approx(expected.exposed, abs=1e-4)
        assert rank["predicted"]["hidden_fraction"] == pytest.approx(rank["hidden_fraction"], abs=1e-6)
    assert found["drawn_step"] == 2


def test_without_torch_and_without_pictures(run: Path) -> None:
    code = f"""import sys
sys.argv = ["overlap1f1b", "report", {str(run)!r}, "--json", "-"]
from overlap1f1b.__main__ import run
assert run() == 0
print([name for name in ("torch", "matplotlib", "plotly") if name in sys.modules], file=sys.stderr)"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr.splitlines()[-1] == "[]"


def test_refusals(capsys: Capture, run: Path, tmp_path: Path) -> None:
    assert report.refused(capsys, "--predicted") == "no FILE; allowed: one or more, or --compare A B"
    assert "--svg with --compare; allowed: one of them" in report.refused(
        capsys, "--compare", run, run, "--svg", "a.svg"
    )
    assert "; allowed: one of them" in report.refused(capsys, run, "--compare", run, run)
    assert "--step 9; allowed: 1, 2" in report.refused(capsys, run, "--step", 9, "--svg", tmp_path / "a.svg")
    assert "--step 1 alone; allowed: with --png" in report.refused(capsys, run, "--step", 1)
    same = tmp_path / "same"
    assert "allowed: another file for each" in report.refused(capsys, run, "--png", same, "--svg", same)
    assert "is the file of" in report.refused(capsys, run / "rank0.json", "--trace", run / "rank0.json")
    for given in ((run,), ("--compare", run, run)):
        assert "is the file of" in report.refused(capsys, *given, "--json", run / "rank0.json")
    assert "--step with --compare; allowed: one of them" in report.refused(capsys, "--compare", run, run, "--step", 0)
    assert "No such file" in report.refused(capsys, tmp_path / "nothing.json")
    empty = write_record(tmp_path / "empty.json", [[]])
    assert "step 1 has nothing to draw" in report.refused(capsys, empty, "--html", tmp_path / "empty.html")
    alone = run / "rank1.json"
    assert "no file of pipeline rank 0" in report.refused(capsys, alone, "--predicted")


def test_several_records_of_unknown_steps(capsys: Capture, tmp_path: Path) -> None:
    files = [write_chrome(tmp_path / "a.json", device(0)), write_chrome(tmp_path / "b.json", host())]
    found = report.content(capsys, *files, "--trace", tmp_path / "trace.json")  # steps 4 and 1: none that both have
    assert found["drawn_step"] == 4


@pytest.mark.parametrize("option", ["--html", *wide("--compare")])
def test_a_report_that_lasts_says_how_far_it_is(
    capsys: Capture, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    for name in ("profiling.reading:_read_json", "cli.report.command:content_of", "cli.report.command:paint"):
        lasting(monkeypatch, f"overlap1f1b.{name}")
    given = {"--html": (run, "--html", tmp_path / "a.html"), "--compare": ("--compare", run, run / "rank0.json")}
    out = report(capsys, *given[option]).out
    said = list(dict.fromkeys(re.findall(r"^\d:\d\d (.*)$", out, re.M)))
    count = 2 if option == "--html" else 3
    assert f"reading rank1.json, file 2 of {count}: 0 of 0 MiB" in said
    if option == "--html":
        assert said[-2:] == ["all files are read, now the figures", "all files are read, now the drawings"]


def _profiled(rank: int, size: int, folder: str, offload: bool) -> tuple[float, int, float | None]:
    """Write the files of a rank under a limit; return bytes of the step by its plan, of parameters, and of copies."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "ep"))
    model = models.build(mesh.get_group("ep"))
    given = {"memory": "1TB", "tries": 0, "timeout": 60, "offload": offload, "offload_threshold": 0}
    engine = make(model, build_schedule("combined_1f1b", microbatches=4), mesh=mesh, **given)
    inputs, target = models.batch(4, seed=rank)
    while engine.tuner.settling:
        engine.step(inputs, target=target)
    engine.step(inputs, target=target)  # the plan's first is compared with a plain loop
    os.environ["KINETO_LOG_LEVEL"] = "6"
    engine.observers.append(Last(keeps_order=True))  # no weight gradient runs early: the plan's own order
    with Profile(engine, folder):
        metrics = engine.step(inputs, target=target).metrics()
    parameters = sum(parameter.nbytes for parameter in engine.parameters())
    return engine.plan.peak_bytes[0], parameters, metrics.get("offloaded_bytes")


@pytest.mark.parametrize("offload", [True, *wide(False)])
def test_the_peak_of_a_step_is_the_plans(capsys: Capture, tmp_path: Path, ranks2: Ranks, offload: bool) -> None:
    """Engine, record, trace and report say one peak, and what went to host memory."""
    peaks = ranks2.run(_profiled, str(tmp_path), offload)
    found = report.content(capsys, tmp_path)
    names = "peak_bytes", "parameter_bytes", "offloaded_bytes"
    assert [tuple(rank[name] for name in names) for rank in found["ranks"]] == peaks
    assert all((copied is not None) is offload for *_, copied in peaks)
    assert [recording.peak_bytes for recording in read(*tmp_path.glob("rank?.record")).ranks] == [
        peak for peak, *_ in peaks
    ]
    assert not {"bytes", "held", "parameters"} & set(found["about"])
    peak, parameters, copied = peaks[0]
    row = ["0", *(f"{value / 1e6:.3f}" for value in (parameters, peak, copied) if value is not None)]
    assert row in [line.split() for line in report(capsys, tmp_path).out.splitlines()]
