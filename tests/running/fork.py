"""`python -m overlap1f1b` forked from a process that has imported torch: milliseconds where a start takes seconds.

Everything but the start is as a user has it: a session, an environment, streams and a process number of its own, the
ranks as its children, and the same entry point, which ends it. Only plans are compiled with few tries, and the
search for an order is small. `tests.ranks` has the fork server.
"""

import os
import runpy
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

from overlap1f1b.__main__ import run as main
from overlap1f1b.running import launch
from overlap1f1b.schedule import auto
from tests.plan.tries import few_tries
from tests.ranks import fork_server

ROOT = Path(__file__).parents[2]
SEARCH_S = 0.1
"""Size of a search for an order, which is 10 for a user."""


class Fork:
    """`overlap1f1b` with these arguments, its standard output and error in files; as `subprocess.Popen` otherwise.

    script: what to run instead, with the arguments.
    """

    def __init__(self, args: Sequence[str], environ: Mapping[str, str], script: Path | None = None) -> None:
        self._files = [NamedTemporaryFile("r", prefix="fork-") for _ in range(2)]  # noqa: SIM115
        names = [file.name for file in self._files]
        self._process = fork_server().Process(target=_begin, args=(args, dict(environ), names, script), daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("overlap1f1b", timeout)
        out, err = (file.read() for file in self._files)
        return out, err

    def wait(self, timeout: float = 60) -> tuple[int | None, str, str]:
        """Its status and what it wrote; it is killed if it takes longer."""
        try:
            out, err = self.communicate(timeout)
        finally:
            self.kill()
        return self.returncode, out, err

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def torchrun_environs(ranks: int) -> list[dict[str, str]]:
    """What torchrun puts into the environment of each of several ranks."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    whole = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
    whole |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
    return [whole | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


class _Rank:
    """A rank as `run_ranks` starts it, forked once more."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], preexec_fn: Callable[[], None], **_: Any
    ) -> None:
        assert tuple(command[:3]) == launch.COMMAND
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            preexec_fn()
            _run(command[3:], env)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("overlap1f1b", timeout or 0.0)
            else:
                time.sleep(0.005)
        return self.returncode


def _begin(args: Sequence[str], environ: Mapping[str, str], names: Sequence[str], script: Path | None) -> NoReturn:
    launch.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _Rank})  # type: ignore[assignment]
    for number, name in enumerate(names, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(ROOT)
    with few_tries(), patch.object(auto, "__defaults__", (None, SEARCH_S)):
        _run(args, environ, script)


def _run(args: Sequence[str], environ: Mapping[str, str], script: Path | None = None) -> NoReturn:
    """The program in this process, which it ends."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.argv = [str(script or "overlap1f1b"), *args]
    status: Any = 1
    try:
        if script is None:
            status = main()
        else:
            runpy.run_path(str(script), run_name="__main__")
            status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
