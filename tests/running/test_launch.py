"""Local ranks start with the environment that they need, and end together, however one of them or the parent ends.

Every test runs `run_ranks` in a parent of its own, with small scripts in the place of the ranks. A script finds the
folder of the test in FOLDER, in which it leaves its process number.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlap1f1b.running.launch import STORE, run_ranks, under_torchrun
from tests.running.run import ROOT, until
from tests.tiers import wide

BEGIN = """
import os, pathlib, signal, subprocess, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(os.environ["FOLDER"])
def ready(pid=os.getpid()):
    (folder / f"new{pid}").touch()
    (folder / f"new{pid}").rename(folder / f"pid{pid}")
def until_ready(count):
    while len(list(folder.glob("pid*"))) < count:
        time.sleep(0.01)
"""
SLEEP = "time.sleep(60)\n"
STUBBORN = "for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\n"


class Parent:
    """A process that runs `run_ranks` with `script` as every rank."""

    def __init__(
        self, folder: Path, script: str, ranks: int, grace_s: float = 5.0, limit_s: float = 60.0, **environ: str
    ) -> None:
        self.folder = folder
        self.ranks = ranks
        parent = f"""
import sys
from overlap1f1b.running.launch import run_ranks
assert "torch" not in sys.modules
command = (sys.executable, "-c", sys.argv[1])
sys.exit(run_ranks(sys.argv[2:], {ranks}, command=command, grace_s={grace_s}, limit_s={limit_s}))
"""
        (folder / "tmp").mkdir()
        (folder / "stdin").write_text("for the parent")
        self.process = subprocess.Popen(
            [sys.executable, "-c", parent, BEGIN + script, "first", "second"],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", STORE)}
            | {"FOLDER": str(folder), "TMPDIR": str(folder / "tmp")}
            | environ,
            stdin=(folder / "stdin").open(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as in a terminal, whose signals go to a whole group: here the parent's alone
        )

    def wait(self, timeout: float = 20) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def pids(self, count: int | None = None) -> list[int]:
        """Process numbers of the ranks, when all (or `count` processes) have left theirs."""
        until(lambda: len(list(self.folder.glob("pid*"))) >= (count or self.ranks))
        return [int(path.name[3:]) for path in self.folder.glob("pid*")]


@pytest.fixture
def parents(tmp_path: Path) -> Iterator[list[Parent]]:
    """What is in the list is killed at the end, with what it started, so that a failing test leaves nothing."""
    found: list[Parent] = []
    yield found
    for parent in found:
        parent.process.kill()
        parent.process.wait()
    for path in tmp_path.glob("pid*"):
        if alive(int(path.name[3:])):
            os.kill(int(path.name[3:]), signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids: list[int]) -> None:
    until(lambda: not any(map(alive, pids)), 3)


def test_environment_of_ranks(tmp_path: Path) -> None:
    script = """
import json
if rank == 0:
    pathlib.Path(os.environ["OVERLAP1F1B_STORE"]).write_text("")  # its folder exists and may be written
assert sys.stdin.read() == "" and os.getsid(0) == os.getpid()
(folder / f"rank{rank}").write_text(json.dumps(dict(os.environ, argv=sys.argv[1:])))
"""
    given = {"MASTER_ADDR": "login1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth9"}
    status, _, err = Parent(tmp_path, script, 3, **given).wait()
    assert (status, err) == (0, "")
    environs = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(3)]
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    for rank, environ in enumerate(environs):
        assert environ["RANK"] == environ["LOCAL_RANK"] == str(rank)
        assert environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"] == "3"
        assert environ["OMP_NUM_THREADS"] == str(threads)
        assert environ["GLOO_SOCKET_IFNAME"] == "eth9"  # the user's own
        assert environ["PYTHONUNBUFFERED"] == "1"
        assert environ["argv"] == ["first", "second"]
        assert environ[STORE] == environs[0][STORE]
        assert not {"MASTER_ADDR", "MASTER_PORT"} & environ.keys()
    assert list((tmp_path / "tmp").iterdir()) == []  # the store's folder was there, and is removed


WHOLE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (WHOLE, True),
        (WHOLE | {"WORLD_SIZE": "1"}, True),
        ({}, False),
        ({"WORLD_SIZE": "4"}, False),  # left over: a process that has no rank is none
        ({"MASTER_ADDR": "login1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, False),
        (WHOLE | {"RANK": ""}, False),
        ({"RANK": "0"}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
    ],
)
def test_under_torchrun(environ: dict[str, str], expected: bool) -> None:
    assert under_torchrun(environ) is expected


def test_a_rank_that_cannot_find_the_others() -> None:
    expected = "RANK=0 and WORLD_SIZE=2 in the environment without MASTER_ADDR, MASTER_PORT; allowed: all of RANK, WORL"
    with pytest.raises(ValueError, match=f"^{expected}"):
        under_torchrun({name: value for name, value in WHOLE.items() if not name.startswith("MASTER")})


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(FileNotFoundError):
        run_ranks([], 2, command=(str(tmp_path / "nothing"),), environ={})
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


# As a rank that loses its connection: it fails some milliseconds behind the one that failed.
FOLLOW = """
import select
if rank == 1:
    ready()
    while not (folder / "go").exists(): pass
    os._exit(7)
until_ready(1)
(path,) = folder.glob("pid*")
pidfd = os.pidfd_open(int(path.name[3:]))
(folder / "go").touch()
select.select([pidfd], [], [])
time.sleep(0.005)
os._exit(1)
"""
TOLD = "if rank == 0: time.sleep(0.1); print('connection lost', file=sys.stderr); sys.exit(1)\n"
WAIT_FOR_STOP = """
if rank == 1:
    import psutil
    while not any(psutil.Process(int(path.name[3:])).status() == "stopped" for path in folder.glob("pid*")):
        time.sleep(0.01)
    sys.exit(1)
"""
STOP = "if rank == {}: os.kill(os.getpid(), signal.SIGSTOP)\n"
STOPPED = "; the other ranks were stopped"
READY = "ready(); until_ready(int(os.environ['WORLD_SIZE']))\n"


@pytest.mark.parametrize(
    ("ranks", "limits", "script", "status", "lines", "seconds"),
    [
        (1, {}, "ready(); sys.exit(5)", 5, ["rank 0 ended with status 5"], (0, 5)),
        *wide((2, {"grace_s": 0.2}, f"{READY}if rank: sys.exit(2)\n{SLEEP}", 2, [], (0, 5)),
        (3, {"grace_s": 0.5}, f"{READY}if rank == 1: sys.exit(3)\n{SLEEP}", 3,
         [f"rank 1 ended with status 3{STOPPED}"], (0, 5)),
        # The others get the grace, and one of them that then fails is not the one to name.
        (3, {"grace_s": 1}, f"{READY}if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n{TOLD}{SLEEP}", 137,
         [f"rank 2 was killed by signal 9 (SIGKILL), perhaps since memory was full{STOPPED}"], (1, 6)),
        (2, {}, FOLLOW, 7, [f"rank 1 ended with status 7{STOPPED}"], (0, 5)),
        # SIGKILL comes 5 s after SIGTERM.
        (3, {"grace_s": 0.2}, f"{STUBBORN}{READY}{STOP.format(2)}{WAIT_FOR_STOP}{SLEEP}", 1,
         [f"rank 1 ended with status 1; rank 2 was suspended (SIGSTOP){STOPPED}"], (5, 12)),
        # One that is suspended may hold the lock of the file through which ranks meet: the others never notice.
        (2, {"grace_s": 0.2, "limit_s": 1}, f"{READY}{STOP.format(1)}{SLEEP}", 128 + signal.SIGSTOP,
         [f"rank 1 was suspended (signal 19 (SIGSTOP)) for longer than --timeout 1{STOPPED}"], (6, 15)),),
    ],
)  # fmt: skip
def test_how_ranks_end(
    tmp_path: Path, ranks: int, limits: Any, script: str, status: int, lines: list[str], seconds: tuple[float, float]
) -> None:
    began = time.monotonic()
    parent = Parent(tmp_path, script, ranks, **limits)
    got, _, err = parent.wait()
    said = [f"overlap1f1b: error: {line}" for line in lines]
    assert (got, err.splitlines()) == (status, ["connection lost"] * (TOLD in script) + said)
    assert seconds[0] <= time.monotonic() - began < seconds[1]
    assert_gone(parent.pids(1))


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    parent = Parent(tmp_path, "ready(); ready(subprocess.Popen(['sleep', '60']).pid)", 1)
    assert parent.wait()[0] == 0
    assert_gone(parent.pids(2))


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), *wide((signal.SIGTERM, 143), (signal.SIGHUP, 129))]
)
def test_signal_to_the_parent(tmp_path: Path, parents: list[Parent], number: signal.Signals, status: int) -> None:
    """The ranks get it, and may end in their own way."""
    script = f"""
def end(number, frame):
    os.write(1, f"{{rank}} got {{number}}\\n".encode())  # one call: a line that no other cuts
    sys.exit(1)
for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(n, end)
ready(); {SLEEP}"""
    parents.append(parent := Parent(tmp_path, script, 2))
    pids = parent.pids()
    began = time.monotonic()
    parent.process.send_signal(number)
    got, out, err = parent.wait()
    assert (got, err) == (status, "")
    assert sorted(out.splitlines()) == [f"0 got {number:d}", f"1 got {number:d}"]
    assert time.monotonic() - began < 2.5  # nobody waits for the 3 s to pass
    assert_gone(pids)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("times", [1, *wide(2)])
def test_ctrl_c_with_ranks_that_ignore_it(tmp_path: Path, parents: list[Parent], times: int) -> None:
    """They are killed after 3 s, and at once if it is pressed again."""
    parents.append(parent := Parent(tmp_path, f"{STUBBORN}ready(); {SLEEP}", 2))
    pids = parent.pids()
    began = time.monotonic()
    for _ in range(times):
        parent.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert parent.wait()[0] == 130
    assert (3 <= time.monotonic() - began < 6) if times == 1 else (time.monotonic() - began < 2.5)
    assert_gone(pids)


def test_ctrl_c_while_the_others_have_their_grace(tmp_path: Path, parents: list[Parent]) -> None:
    """It cuts the grace short, and the failure is still named."""
    parents.append(parent := Parent(tmp_path, f"ready(); until_ready(2)\nif rank: sys.exit(3)\n{SLEEP}", 2, grace_s=30))
    pids = parent.pids()
    until(lambda: not all(map(alive, pids)), 5)
    time.sleep(0.3)
    parent.process.send_signal(signal.SIGINT)
    status, _, err = parent.wait()
    assert status == 130
    assert "rank 1 ended with status 3" in err


def test_ranks_die_with_a_killed_parent(tmp_path: Path, parents: list[Parent]) -> None:
    """tests/running/test_wire.py has the same through `ip netns exec`."""
    parents.append(parent := Parent(tmp_path, f"{STUBBORN}ready(); {SLEEP}", 2))
    pids = parent.pids()
    assert all(map(alive, pids))
    parent.process.kill()
    parent.process.wait()
    assert_gone(pids)
