"""Local ranks: subprocesses of `overlap1f1b train`, `bench` and `profile`, how they end, and nsys around them.

Not torch's elastic agent: that names the first failed rank of a round of polling instead of the first that failed, ends
the others before they can name the cause, waits for a suspended rank for ever, leaves ranks behind if it is killed,
and takes seconds to import.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import NoReturn

from overlap1f1b.running.wire import Wire
from overlap1f1b.transport.limits import COMMAND_LINE_LIMIT_S, FOLLOW_S, INTERRUPT_S, KILL_S, LOOK_S, TERM_S

COMMAND = (sys.executable, "-m", "overlap1f1b")
STORE = "OVERLAP1F1B_STORE"  # set exactly in the ranks that `run_ranks` started: the path of their FileStore
INSIDE = "OVERLAP1F1B_NSYS"  # set in a rank that runs under nsys
PR_SET_PDEATHSIG = 1
NOT_JOINED = 75  # status of a rank whose others did not join within its limit: EX_TEMPFAIL of sysexits
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun, or what sets the same variables, started this process as one of several ranks.

    Without RANK it is none, whatever a shell or a cluster's job has left. ValueError if RANK and WORLD_SIZE are there,
    but not all that a rank needs to find the others: each such process would train a whole model.
    """
    missing = [name for name in TORCHRUN if not environ.get(name)]
    rank, size = environ.get("RANK"), environ.get("WORLD_SIZE")
    if missing and rank and size and size != "1":
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={size} in the environment without {', '.join(missing)}; "
            f"allowed: all of {', '.join(TORCHRUN)}, as torchrun sets them, or no RANK"
        )
    return not missing


def end_with_agent() -> None:
    """Let the kernel end this rank when torchrun's agent ends, even if that is killed; on Linux.

    Without it the rank goes on, and with it the ranks of all other machines, although nobody supervises them any more.
    """
    if sys.platform.startswith("linux") and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def end_with(run: Callable[[], int]) -> NoReturn:
    """Run this process as one of several ranks and end it with the status that `run` returns, or as its error says.

    Python's finalization is left out: during it, a thread of gloo that frees a tensor, or a thread of the engine that
    still waits for a lost rank, would abort the process and hide its exit status.
    """
    try:
        status = run()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BrokenPipeError:  # the reader is gone
        status = 128 + signal.SIGPIPE
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def run_ranks(
    argv: Sequence[str],
    ranks: int,
    *,
    wire: Wire | None = None,
    environ: Mapping[str, str] = os.environ,
    grace_s: float = FOLLOW_S,
    limit_s: float = COMMAND_LINE_LIMIT_S,
    command: Sequence[str] = COMMAND,
) -> int:
    """Run `command` with `argv` as ranks 0 to `ranks` - 1, wait for them and return an exit status.

        sys.exit(run_ranks(["train", "--ep", "4"], 4))

    0 means that every rank returned 0; otherwise it is the status of the rank that failed first, 128 + n for signal n.
    When one fails, the others have `grace_s` seconds to end by themselves, then get SIGTERM and `TERM_S` later SIGKILL,
    and one line on stderr names the first failure, except for status 2, whose rank has written its own line.
    Ranks that are suspended (SIGSTOP) cannot end by themselves: they are killed at once, and named. A suspended rank is
    itself a failure `TERM_S` behind the ranks' own limit `limit_s`: it may hold what the others need to start.
    SIGINT, SIGTERM and SIGHUP are sent on to the ranks, which are killed `INTERRUPT_S` later (at once on a second
    signal); the status is then 128 + n.

    The ranks inherit stdout and stderr but not stdin, have a session each, and end with this process on Linux, even if
    it is killed by SIGKILL. Processes that a rank leaves in its process group are killed when the rank ends.
    In a thread other than the main one, signals are not handled.
    """
    group = _Group()
    with TemporaryDirectory(prefix="overlap1f1b-", ignore_cleanup_errors=True) as folder, _signals(group.events):
        try:
            for rank in range(ranks):
                prefix = wire.prefix(rank) if wire else []
                group.start([*prefix, *command, *argv], _environment(environ, rank, ranks, folder, wire))
            return group.supervise(grace_s, limit_s)
        finally:
            group.kill()


class _Group:
    """The ranks' processes. `events` has the ranks that ended and the signals that arrived, in order."""

    def __init__(self) -> None:
        self.events: SimpleQueue[int | signal.Signals] = SimpleQueue()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.running: set[int] = set()
        self.first_failure: tuple[int, int] | None = None  # rank and returncode
        self.interrupt: signal.Signals | None = None

    def start(self, command: list[str], environ: dict[str, str]) -> None:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent(),  # noqa: PLW1509 - it takes no lock
        )
        self.processes.append(process)
        self.running.add(len(self.processes) - 1)

    def supervise(self, grace_s: float, limit_s: float) -> int:
        """Wait for the ranks, end those that are left, and return the exit status."""
        # Threads, unlike a poll, see the ends in order: ranks that lose their connection to a killed rank end within
        # milliseconds. They start after the last fork.
        for rank in self.running:
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()
        since: dict[int, float] = {}  # of the suspended ranks
        while self.running and not (self.first_failure or self.interrupt):
            self._wait(LOOK_S, until_failure=True)
            since = {rank: since.get(rank, time.monotonic()) for rank in self._suspended()}
            if since and time.monotonic() > min(since.values()) + limit_s + TERM_S:
                break
        failure, others = self.first_failure, bool(self.running)
        if not self.interrupt:
            self._send(signal.SIGKILL, since)
        if since and not failure and not self.interrupt:
            failure = min(since), -signal.SIGSTOP
            self._wait(TERM_S)  # they may be in a wait that no signal ends
        elif failure:
            self._wait(0.0 if failure[1] == NOT_JOINED else grace_s)
            if not self.interrupt:
                self._send(signal.SIGTERM)
                self._wait(TERM_S)
        if self.interrupt:
            self._send(self.interrupt)
            self._wait(INTERRUPT_S)
        self.kill()
        if failure:
            _report(*failure, others, since, limit_s)
        code = failure[1] if failure else 0
        return 128 + self.interrupt if self.interrupt else code if code >= 0 else 128 - code

    def _watch(self, rank: int) -> None:
        if hasattr(os, "waitid"):
            with suppress(ChildProcessError):  # reaped already, by kill()
                os.waitid(os.P_PID, self.processes[rank].pid, os.WEXITED | os.WNOWAIT)
        else:  # macOS before Python 3.13
            self.processes[rank].wait()
        self.events.put(rank)

    def _wait(self, seconds: float, *, until_failure: bool = False) -> None:
        """Return when every rank has ended, a signal arrives, `seconds` have passed or, if asked, a rank fails."""
        deadline = time.monotonic() + seconds
        while self.running and not (until_failure and self.first_failure):
            try:
                event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return
            if isinstance(event, signal.Signals):
                self.interrupt = self.interrupt or event
                return
            self._send(signal.SIGKILL, [event])  # before the process is reaped, so that its number is still its own
            code = self.processes[event].wait()
            self.running.discard(event)
            if code and not self.first_failure:
                self.first_failure = event, code

    def _suspended(self) -> list[int]:
        found = []
        for rank in sorted(self.running) if hasattr(os, "waitid") else ():  # not on macOS before Python 3.13
            with suppress(ChildProcessError):  # it has ended
                if os.waitid(os.P_PID, self.processes[rank].pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT):
                    found.append(rank)
        return found

    def _send(self, number: signal.Signals, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to ranks, by default to all that run, and to what they have started."""
        for rank in self.running if ranks is None else ranks:
            with suppress(ProcessLookupError, PermissionError):  # macOS refuses where only a zombie is left
                os.killpg(self.processes[rank].pid, number)

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        for rank in sorted(self.running):
            with suppress(subprocess.TimeoutExpired):
                self.processes[rank].wait(max(0.0, deadline - time.monotonic()))
                self.running.discard(rank)


def _report(rank: int, code: int, others: bool, suspended: Iterable[int], limit_s: float) -> None:
    """Print how the first failed rank ended, below the lines of all ranks."""
    if code == 2:
        return
    names = {number.value: f" ({number.name})" for number in signal.Signals}  # most real-time signals have none
    by = f"signal {-code}{names.get(-code, '')}"
    how = f"ended with status {code}" if code > 0 else f"was killed by {by}"
    if code == -signal.SIGKILL:
        how += ", perhaps since memory was full"
    elif code == -signal.SIGSTOP:
        how = f"was suspended ({by}) for longer than --timeout {limit_s:g}"
    elif code == NOT_JOINED:
        how = f"waited longer than --timeout {limit_s:g} for the others to join"
    how += "".join(f"; rank {other} was suspended (SIGSTOP)" for other in suspended if other != rank)
    stopped = "; the other ranks were stopped" if others else ""
    print(f"overlap1f1b: error: rank {rank} {how}{stopped}", file=sys.stderr, flush=True)


def _environment(base: Mapping[str, str], rank: int, ranks: int, folder: str, wire: Wire | None) -> dict[str, str]:
    """Return the variables with which a rank starts."""
    # left by a cluster's shell, the first two would make `under_torchrun` true in the ranks
    environ = {name: value for name, value in base.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    environ |= {STORE: f"{folder}/store", "PYTHONUNBUFFERED": "1"}
    # Even over the user's GLOO_SOCKET_IFNAME: the machine's own interfaces do not exist in a wire's namespaces.
    return environ | (wire.environment(rank) if wire else {})


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _die_with_parent() -> Callable[[], None] | None:
    """Return the function that a rank calls between fork and exec, so that it ends with this process.

    The kernel kills the rank when the thread that forked it ends. The setting survives exec, also `ip netns exec`.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: after it, imports and allocations may hang
    parent = os.getpid()
    kill = int(signal.SIGKILL)

    def after_fork() -> None:
        prctl(PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)

    return after_fork


@contextmanager
def _signals(events: SimpleQueue[int | signal.Signals]) -> Iterator[None]:
    """Turn signals into events. In a SimpleQueue, unlike a Queue, a handler may put while it interrupts a get."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup
            del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, lambda got, _frame: events.put(signal.Signals(got)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def enter_nsys(folder: Path, argv: Sequence[str]) -> NoReturn:
    """Replace this rank by nsys, which runs it again, and writes ``rank<N>.nsys-rep`` and ``.sqlite`` for report."""
    folder.mkdir(parents=True, exist_ok=True)
    options = "--trace=cuda,nvtx --sample=none --cpuctxsw=none --capture-range=cudaProfilerApi --capture-range-end=stop"
    options += " --export=sqlite --force-overwrite=true"

    def line(rank: str) -> list[str]:
        return ["nsys", "profile", *options.split(), f"--output={folder}/rank{rank}", *COMMAND, *argv]

    rank = os.environ.get("RANK", "0")
    if rank == "0":  # nsys reads the number from the environment where there are several
        print(shlex.join(line("%q{RANK}" if "RANK" in os.environ else rank)), file=sys.stderr, flush=True)
    os.execvpe("nsys", line(rank), {**os.environ, INSIDE: "1"})
