"""``python -m overlap1f1b``."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlap1f1b.__main__ import run

ROOT = Path(__file__).parents[1]


def test_the_status_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "overlap1f1b.cli.main", SimpleNamespace(main=lambda: 7))
    assert run() == 7


def test_ctrl_c_at_any_time_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "overlap1f1b.cli.main", SimpleNamespace(main=interrupted))
    assert run() == 130


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "overlap1f1b", "train", "--steps", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "overlap1f1b: error: --steps 0; allowed: 1 or more\n"


WAITING = "import sys; sys.stdin.read(); from overlap1f1b.__main__ import run; sys.exit(run())"


def test_when_nobody_reads_on() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, "train", "--help"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()  # before it writes anything, for it waits for its input to end
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")
