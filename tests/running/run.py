"""`overlap1f1b` as a user runs it: every run is a process."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.running.fork import ROOT, Fork

COMMAND = (sys.executable, "-m", "overlap1f1b")
SIZES = ("--layers", "2", "--hidden", "32", "--heads", "2", "--intermediate", "32", "--sequence", "32")


def until(condition: Callable[[], Any], seconds: float = 20, said: Callable[[], Any] = str) -> None:
    """Wait until it holds; else the test fails, with what is said then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.01)


class Run:
    """`overlap1f1b train` or `bench` with tiny sizes, as forks of this process unless it has a `command`.

    A verb may be two, `profile train`; a configuration of transformers has sizes itself.
    """

    def __init__(self, verb: str, *args: object, command: tuple[str, ...] | None = None, **environ: str) -> None:
        sizes = ("--sequence", "32") if "--hf-config" in args else SIZES
        whole = [*verb.split(), *sizes, *map(str, args)]
        environ = dict(os.environ, GLOO_SOCKET_IFNAME="lo") | environ
        self.process = Fork(whole, environ) if command is None else self._started([*command, *whole], environ)

    @staticmethod
    def _started(command: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout: float = 60) -> tuple[int, str, str]:
        """Its status and what it wrote; it is killed, and its ranks with it, if it takes longer."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        finally:
            self.process.kill()
        return self.process.returncode, out, err

    def succeeds(self) -> str:
        status, out, err = self.wait()
        assert (status, err) == (0, "")
        return out

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(str(self.wait(0.1)))
            time.sleep(0.005)


def refused(verb: str, *args: object, command: tuple[str, ...] | None = None, **environ: str) -> str:
    """The one line of error of a run that ends with status 2."""
    status, out, err = Run(verb, *args, command=command, **environ).wait()
    assert status == 2
    assert "Traceback" not in out
    assert err.startswith("overlap1f1b: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("overlap1f1b: error: ").rstrip()
