"""`overlap1f1b profile` as a user runs it, and what its traces say beside the engine's own counters."""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from overlap1f1b.cli.profile import remove_others
from overlap1f1b.cli.report.figures import content_of
from overlap1f1b.profiling import figures_of, read
from overlap1f1b.running.launch import run_ranks
from overlap1f1b.running.wire import Wire
from tests.cli.inside import Verb
from tests.running.run import ROOT, Run, refused
from tests.tiers import wide


def disagreements(folder: Path, text: Path, names: tuple[str, ...]) -> list[str]:
    """What traces and records of rows say other than the engine's counters, by three points in a median of three."""
    folder.mkdir()
    with Wire(2) as wire:
        environ = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        command = (sys.executable, "-m", "tests.running.profiled")
        assert run_ranks([str(folder), str(text), *names], 2, wire=wire, environ=environ, command=command) == 0
    found, shares = [], {}
    for name in names:
        for pattern in ("rank*.trace.json.gz", "rank?.record"):
            for recording in read(*sorted((folder / name).glob(pattern))).ranks:
                own = json.loads((folder / f"{name}-{recording.rank}.json").read_text())
                seen = [figures_of(replace(recording, steps=(step,))).overlap for step in recording.steps]
                both = list(zip(seen, own, strict=True))
                for key in ("exchange", "exposed", "hidden"):
                    off = [abs(getattr(a, key) - counted(b, key)) / b["exchange"] for a, b in both]
                    if median(off) > 0.03:
                        found.append(f"{name}, {pattern}, rank {recording.rank}: {key} is off by {off} of the exchange")
                shares[name] = median(counted(step, "hidden") / step["exchange"] for step in own)
    if shares["sequential"] > 0.05 or min(shares[name] for name in names[1:]) < shares["sequential"] + 0.1:
        found.append(f"hidden: {shares}")
    return found


def counted(step: Mapping[str, float], key: str) -> float:
    """Of the engine's own figures, in nanoseconds."""
    return step["exchange"] - step["exposed"] if key == "hidden" else step[key]


@pytest.mark.wide
@pytest.mark.parametrize("overlap", ["three", "pairs"])
def test_agrees_with_the_engines_own_counters_on_a_wire(text: Path, tmp_path: Path, overlap: str) -> None:
    """Sequential, and three open actions or Megatron's pattern; a second attempt is for a busy machine."""
    try:
        with Wire(2):
            pass
    except ValueError as error:
        pytest.skip(str(error))
    found: list[str] = []
    for attempt in range(2):
        found = disagreements(tmp_path / str(attempt), text, ("sequential", overlap))
        if not found:
            return
    pytest.fail("\n".join(found))


def test_profile_of_a_training_and_what_it_says_to_run_next(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "two words" / "out"
    sizes = ("--layers", 1, "--batch", 2, "--microbatches", 2, "--profile-warmup", 0, "--profile-steps", 2)
    status, shown, err = Run("profile train", *sizes, "--text", text, "--out", out, "--json", "-").wait()
    assert status == 0, err
    names = [f"rank{rank}{kind}" for rank in (0, 1) for kind in (".record", ".trace.json.gz")]
    assert sorted(path.name for path in out.iterdir()) == names
    result = json.loads(shown)
    traces = [str(out / name) for name in names if name.endswith("gz")]
    assert result["report"] == f"overlap1f1b report {shlex.join(traces)}"
    assert result["report"] in err
    assert [found["files"][-1] for found in result["ranks"]] == traces
    content = content_of(read(*map(Path, traces)))
    assert [found["steps"] for found in content["ranks"]] == [2, 2]
    for found, own in zip(content["ranks"], result["ranks"], strict=True):
        assert len(own["steps"]) == 2
        exchange, exposed = (sum(step[name] for step in own["steps"]) / 2 for name in ("exchange_ms", "exposed_ms"))
        assert own["hidden_fraction"] == pytest.approx(1 - exposed / exchange), "means, as the report's"
        assert found["exchange_ms"] == pytest.approx(exchange, rel=0.001)
        # Ranges hold the engine's own times and what the player does around them, which takes any time on busy cores.
        assert 0 < found["exposed_ms"] <= exposed + 0.001 * exchange
        assert found["peak_bytes"] > found["parameter_bytes"] > 0, "the step that warms up the profiler has counted"
    assert content["verdict"] in err


def test_without_what_to_profile(capsys: pytest.CaptureFixture[str]) -> None:
    line = "profile without a verb; allowed: train, bench; see overlap1f1b profile --help"
    assert Verb("profile").refused(capsys) == line
    status, out, _ = Verb("profile")(capsys, "--help")
    assert status == 0
    assert "to see where the exchange overlaps" in out
    assert "overlap1f1b profile train --nsys" in out


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ("--profile-steps 0", "--profile-steps 0; allowed: 1 or more"),
        ("--profile-warmup -1", "--profile-warmup -1; allowed: 0 or more"),
        (f"--out {__file__}/in", f"--out {__file__}/in: {__file__} is a file; allowed: a folder, which may be new"),
    ],
)
def test_options_that_no_profile_can_have(capsys: pytest.CaptureFixture[str], args: str, error: str) -> None:
    assert Verb("profile").refused(capsys, "train", *args.split()) == error


def test_nsys_is_missing(tmp_path: Path) -> None:
    assert refused("profile train", "--nsys", PATH=str(tmp_path)) == (
        "--nsys: nsys is not on PATH; allowed: NVIDIA Nsight Systems installed, or torch.profiler without --nsys"
    )


NSYS = """#!/bin/sh
echo "$OVERLAP1F1B_NSYS $@" >> {log}
while [ "${{1#-}}" != "$1" ] || [ "$1" = profile ]; do shift; done
{rank}
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for nsys where there is no GPU")
@pytest.mark.parametrize("rank", ["exit 2", *wide('exec "$@"')], ids=["noted", "run"])
def test_nsys_runs_every_rank_with_a_file_of_its_own(text: Path, tmp_path: Path, rank: str) -> None:
    """By a stand-in that notes how it is called; and runs the rank, as far as it goes without a GPU."""
    log, nsys = tmp_path / "log", tmp_path / "nsys"
    nsys.write_text(NSYS.format(log=log, rank=rank))
    nsys.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    sizes = ("--text", text, "--batch", 4, "--out", tmp_path / "out")
    status, _, err = Run("profile train", "--nsys", *sizes, PATH=path).wait()
    assert status == 2
    printed, *errors = err.splitlines()
    expected = ["overlap1f1b: error: nsys without a GPU that torch "] if rank.startswith("exec") else []
    assert [error[: len(start)] for error, start in zip(errors, expected, strict=True)] == expected
    noted = sorted(line.split(" ", 1) for line in log.read_text().splitlines())
    assert [inside for inside, _ in noted] == ["1", "1"]  # the rank does not enter nsys again
    lines = [line for _, line in noted]
    for number, line in enumerate(lines):
        assert f"--output={tmp_path}/out/rank{number} " in line
        assert "--capture-range=cudaProfilerApi --capture-range-end=stop --export=sqlite" in line
        assert " -m overlap1f1b profile train " in line
    assert printed == f"nsys {lines[0]}".replace("/rank0 ", "/rank%q{RANK} ").replace(
        f"--output={tmp_path}/out/rank%q{{RANK}}", f"'--output={tmp_path}/out/rank%q{{RANK}}'"
    )


def test_files_of_ranks_that_the_run_lacks_go(tmp_path: Path) -> None:
    for name in (
        "rank0.record",
        "rank1.record",
        "rank1.json",
        "rank1.trace.json.gz",
        "rank12.sqlite",
        "rank1.txt",
        "notes.json",
    ):
        (tmp_path / name).write_text("")
    remove_others(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.json", "rank0.record", "rank1.txt"]
