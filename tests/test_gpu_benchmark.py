"""The GPU benchmark runs whole on a CPU, from a checkout that was never installed, and a section fails alone."""

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import over
from tests.running.fork import Fork

ROOT = Path(__file__).parents[1]
# A bare machine has torch, triton, einops and greenlet.
BARE = """
import importlib.abc, runpy, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tyro", "rich", "matplotlib", "transformers"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, {folder!r})  # as for any script
{before}
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(folder: Path, *options: str, before: str = "") -> tuple[int, dict[str, Any], str]:
    """In a process of its own; with something planted ``before``, in a fork of one that has imported torch."""
    argv = [str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--tiny", "--quick", "--out", str(folder), *options]
    code = BARE.format(argv=argv, before=before, folder=str(ROOT / "benchmarks"))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    if before:
        (folder / "script.py").write_text(code)
        status, *written = Fork([], environ, folder / "script.py").wait(280)
        said = "".join(written)
    else:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        status, said = done.returncode, done.stdout + done.stderr
    assert status is not None
    files = list(folder.glob("cpu-*[0-9].json"))
    assert len(files) == 1, said
    return status, json.loads(files[0].read_text()), files[0].with_suffix(".md").read_text()


@pytest.mark.wide
def test_every_section_runs(tmp_path: Path) -> None:
    status, found, text = run(tmp_path)
    sections = found["sections"]
    names = (
        "ceilings, contention, compiles, checks, kernels, layer, eight, steps, overhead, memory, offload, trace, nccl"
    )
    assert set(sections) == set(names.split(", "))
    assert {entry["status"] for entry in sections.values()} == {"ok"}, sections
    assert len(sections["compiles"]["result"]["rows"]) == 5 * 12  # shapes, kernels
    assert not sections["compiles"]["result"]["skipped"]
    assert sections["nccl"]["result"]["skipped"] == ["NCCL, which a single GPU cannot show: it needs two or more"]
    assert status == 0
    assert set(sections["checks"]["result"]["outcomes"].values()) == {"ok"}
    rows = sections["kernels"]["result"]["rows"]
    assert {row["kernel"] for row in rows if "compiled_ms" in row} == {row["kernel"] for row in rows} - {"weight.grad"}
    assert sections["layer"]["result"]["rows"][0]["inside_error"] < 1e-5
    assert 0 < sections["eight"]["result"]["rows"][0]["layer_error"] < 0.1
    (table,) = sections["steps"]["result"]["tables"]
    assert [row["name"] for row in table["rows"]] == [
        "sequential · serial", "combined_1f1b · pairs", "combined_1f1b+1 · 2", "combined_1f1b+1 · 3",
    ]  # fmt: skip
    assert all(row["grads_equal"] and 0 <= row["hidden_fraction"] <= 1 for row in table["rows"])
    assert table["bound_ms"] == max(table["compute_only_ms"], table["exchange_only_ms"])
    away = [row for row in sections["offload"]["result"]["rows"] if "offload" in row["name"]]
    assert any(row.get("moved") and row["gbps"] for row in away)  # where something has to leave
    names = [sections["trace"]["result"][name] for name in ("timeline", "trace")]
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)
    assert "Did not fit" not in text
    for title in ("## kernels", "| tiny |", "**2 layers, real routing", "| plain |"):
        assert title in text


def test_a_section_fails_alone(tmp_path: Path) -> None:
    """Its error and what it has kept are in the results, without a path of the machine, and the next one runs."""
    fails = f"""
sys.path.insert(0, {str(ROOT)!r})
import gpu_bench.kernels, gpu_bench.steps as steps
def cases(*_): raise RuntimeError("no such kernel")
gpu_bench.kernels.cases = cases
def run(context):
    context.keep({{"tables": [], "skipped": ["kept"], "problems": []}})
    raise RuntimeError("planted")
steps.run = run
"""
    status, found, text = run(tmp_path, "--sections", "ceilings,kernels,layer,steps,nccl", before=fails)
    assert status != 0
    sections = found["sections"]
    assert [entry["status"] for entry in sections.values()] == ["ok", "failed", "ok", "failed", "ok"]
    assert sections["kernels"]["error"] == "RuntimeError: no such kernel"
    assert not any("/" in line.partition(" ")[0] for line in sections["kernels"]["traceback"])
    assert "Failed: `RuntimeError: no such kernel`" in text
    assert sections["steps"]["error"] == "RuntimeError: planted"
    assert sections["steps"]["result"]["skipped"] == ["kept"]
    assert "kept" in text


def test_what_there_is_no_time_to_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    context, kernels = import_module("gpu_bench.context"), import_module("gpu_bench.kernels")
    monkeypatch.setattr(context.Context, "free", lambda self: None)  # which collects garbage, for a GPU's memory
    found = kernels.run(context.Context(torch.device("cpu"), tiny=True, deadline=time.monotonic() + 14))
    assert not found["problems"]
    assert {row["not_compiled"] for row in found["rows"]} == {"no time left"}
    assert "torch.compile of expand at tiny (no time left)" in found["skipped"]


def test_a_slow_compiler_leaves_the_ceilings(tmp_path: Path) -> None:
    """They come first; what a compiler's time leaves no room for is named, and the rest is measured."""
    slow = f"""
sys.path.insert(0, {str(ROOT)!r})
import time, gpu_bench.compiles as compiles
cases, clock, late = compiles.cases, time.monotonic, 0.0
time.monotonic = lambda: clock() + late  # in place of waits
def slowly(context, shape):
    global late
    for case in cases(context, shape):
        late += 0.5 if context.left > -9 else 0
        yield case
compiles.cases = slowly
"""
    status, found, text = run(tmp_path, "--sections", "ceilings,compiles,kernels,nccl", "--budget", "26", before=slow)
    sections = found["sections"]
    assert status != 0
    assert [entry["status"] for entry in sections.values()] == ["ok", "ok", "no time", "ok"]
    assert sections["ceilings"]["result"]["copy_gb_s"] > 0
    compiled, left = (sections["compiles"]["result"][name] for name in ("rows", "skipped"))
    assert compiled
    assert len(compiled) + len(left) == 5 * 12
    assert f"Did not fit the 26 s: {len(left)} of compiles; kernels." in text
    assert "## kernels\n\nNot measured: no time left." in text


@over(2)
def test_the_section_for_several_gpus_runs_over_gloo(rank: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        nccl = import_module("gpu_bench.nccl")
        rows = nccl.measured(torch.device("cpu"), (1 << 16, 1 << 17), 2, product=8)
    sizes = [(row["bytes"], row["uneven"]) for row in rows]
    assert sizes == [(1 << 15, False), (1 << 15, True), (1 << 16, False), (1 << 16, True)], sizes
    assert all(row["exchange_ms"] > 0 and 0 <= row["hidden"] <= 1 for row in rows), rows
