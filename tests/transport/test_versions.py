"""Another torch is refused before anything imports what it lacks."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from overlap1f1b.transport.versions import TORCH, check_torch, release
from tests.tiers import wide

ROOT = Path(__file__).parents[2]
ALLOWED = f"allowed: {TORCH[0]} to before {TORCH[1]}"


def plant(folder: Path, found: str) -> None:
    """Put metadata of torch into a folder; in front of the real one on the path, Python finds these first."""
    information = folder / f"torch-{found}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {found}\n")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_installed_torch_is_taken() -> None:
    check_torch()
    assert release(TORCH[0]) <= release(version("torch")) < release(TORCH[1])


@pytest.mark.parametrize("found", ["2.10.1", *wide("2.16.0", "2.16.0.dev20261101+cpu", "3.0.0a0+git12ab")])
def test_another_torch_is_named(found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, found)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=re.escape(f"torch {found}; {ALLOWED}")):
        check_torch()


@pytest.mark.parametrize("found", ["2.11.0", *wide("2.13.0+cpu", "2.15.3", "2.15.0a0+nv26.10")])
def test_other_builds_of_a_release_are_taken(found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, found)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_torch()


@pytest.mark.parametrize("floor", ["moe", *wide("engine", "integrations.torch_pipelining")])
def test_floors_refuse_it_before_they_load_torch(floor: str, tmp_path: Path) -> None:
    plant(tmp_path, "2.10.0")
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')")
    done = run(tmp_path, "-c", f"import overlap1f1b.{floor}")
    assert done.stderr.splitlines()[-1] == f"ValueError: torch 2.10.0; {ALLOWED}"


def test_commands_that_train_refuse_it_in_one_line_and_plan_needs_none(tmp_path: Path) -> None:
    plant(tmp_path, "2.16.0")
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')")
    done = run(tmp_path, "-m", "overlap1f1b", "train")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"overlap1f1b: error: torch 2.16.0; {ALLOWED}\n"
    assert run(tmp_path, "-m", "overlap1f1b", "plan", "--schedule", "1f1b").returncode == 0
