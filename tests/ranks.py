"""Run a function on several processes that share a gloo process group.

    def total(rank: int, size: int, x: float) -> float:
        t = torch.tensor(x * rank)
        dist.all_reduce(t)
        return t.item()

    def test_total(ranks2: Ranks) -> None:              # workers kept for the whole pytest session
        assert ranks2.run(total, 3.0) == [3.0, 3.0]

    def test_total_apart() -> None:                     # workers of this test alone
        assert run(total, 2, 3.0) == [3.0, 3.0]

    @over(2)                                            # a test whose body asserts on the kept workers
    def test_sizes(rank: int, size: int) -> None:
        assert size == 2, size                          # pytest rewrites no assertion there: the message says it all

The function is a module-level function (it travels by name) that takes ``(rank, size, *args)``; arguments and results
are pickled. `torch.manual_seed(0)` runs before every call, so that a test does not depend on those before it.
"""

import faulthandler
import gc
import inspect
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.plan.tries import few_tries

LEAVE = b""  # to a worker: the call is over on all ranks
NOT_JOINED = "did not join: "
LEAVE_S = 10.0
THREADS = 150
GRACE_S = 1.0  # after a first failure, how long the other ranks may take to report theirs


class RankError(RuntimeError):
    """A rank raised, died or ran out of time. The message begins with the first rank to do so, and its traceback."""

    def __init__(self, failures: dict[int, str]) -> None:
        super().__init__("\n\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
        self.failures = failures


class Ranks:
    """`size` worker processes with a gloo group.

    They start at the first call and again after one that failed. Every call has process groups of its own. Torch's have
    three threads each, one of which wakes a hundred times a second until the group has no reference left; FSDP2 and
    DTensors keep some. So here all groups of a process share this one thread, as those of an engine do, and processes
    with many of the others end, too.

    threads: how many may be left by calls before the processes end.
    shares: whether torch's groups share their thread, instead of each having its own, as in a user's process.
    few: plans are compiled with few tries there (`tests.plan.tries`), since the search for a user's plan is most of the
        work of a small engine, and what tests say holds for every plan.
    """

    def __init__(
        self,
        size: int,
        timeout: float = 60,
        grace: float = GRACE_S,
        few: bool = True,
        threads: int = THREADS,
        shares: bool = True,
    ) -> None:
        self.size, self.few, self.threads, self.shares = size, few, threads, shares
        self.timeout, self.grace = timeout, grace
        self._workers: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: Path | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """`function(rank, size, *args)` on every rank: the list of what they returned, rank 0 first.

        Raises `RankError` if a rank raises, dies or takes longer than `timeout` seconds (then with every rank's stack).
        """
        timeout = self.timeout if timeout is None else timeout
        try:
            return self._run(function, args, timeout)
        except RankError as error:
            # gloo now and then loses a connection while ranks join, before anything of the test has run.
            if not all(text.startswith(NOT_JOINED) for text in error.failures.values()):
                raise
        return self._run(function, args, timeout)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        call = pickle.dumps((function, args, timeout))
        if not self._workers:
            self._start()
        done = False
        try:
            for pipe in self._pipes:
                pipe.send_bytes(call)
            results = self._collect(timeout)
            for pipe in self._pipes:  # only now: a rank that leaves early breaks the others' last transfers
                pipe.send_bytes(LEAVE)
            done = max(self._collect(timeout)) <= self.threads
        finally:
            if not done:
                self.close()
        return results

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._workers, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        context = fork_server()
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.size):
            pipe, theirs = context.Pipe()
            given = (rank, self.size, theirs, self._folder, self.few, self.shares)
            worker = context.Process(target=_work, args=given, daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(pipe)

    def _collect(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results | failures}
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                break
            if not ready:
                failures = self._stacks(list(waiting.values()), timeout)
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    fine, value = pickle.loads(self._pipes[rank].recv_bytes())
                except EOFError:
                    self._workers[rank].join(GRACE_S)
                    fine, value = False, f"died, exit code {self._workers[rank].exitcode}\n{self._said(rank)}"
                if fine:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + self.grace)
        if failures:
            raise RankError(failures)
        return [results[rank] for rank in range(self.size)]

    def _said(self, rank: int) -> str:
        """The end of what a rank wrote on standard error: why C++ ended it, and the stack that it had then."""
        path = self._folder / f"stderr{rank}"
        return path.read_text(errors="replace")[-4000:] if path.exists() else "(never started)"

    def _stacks(self, ranks: list[int], timeout: float) -> dict[int, str]:
        """What each of `ranks`, which are late, is doing."""
        for rank in ranks:
            pid = self._workers[rank].pid
            if pid is not None and self._workers[rank].is_alive() and (self._folder / f"stack{rank}").exists():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)
        texts = {}
        for rank in ranks:
            path = self._folder / f"stack{rank}"
            texts[rank] = f"not done after {timeout:g} s\n{path.read_text() if path.exists() else '(never started)'}"
        return texts


class Kept(dict[int, Ranks]):
    """Processes by their number, which start with the first test that needs so many: ``kept[2].run(function)``."""

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self._timeout = timeout

    def __missing__(self, size: int) -> Ranks:
        self[size] = Ranks(size, timeout=self._timeout)
        return self[size]

    def close(self) -> None:
        """End them."""
        for ranks in self.values():
            ranks.close()


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Whose processes begin as forks (20 ms) of one that has imported torch and transformers once (5 s)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def run(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60, grace: float = GRACE_S, few: bool = True
) -> list[Any]:
    """`function(rank, ranks, *args)` on `ranks` fresh processes: see `Ranks` and `Ranks.run`."""
    workers = Ranks(ranks, timeout, grace, few, shares=False)
    try:
        return workers.run(function, *args)
    finally:
        workers.close()


class Body(NamedTuple):
    """The body of a test by `over`, which has no name of its own to travel by."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        return getattr(import_module(self.module), self.name).body(*args)


def over(size: int | Callable[..., int], *, timeout: float | None = None) -> Callable[[Callable[..., None]], Any]:
    """Make a test of a function `(rank, size, *args)` that asserts, on 2, 4 or 8 kept ranks, or `size(*args)`.

    The arguments are fixtures and parameters of the test. It fails with the message of the first rank that fails. A
    body returns nothing: what it returns would be a claim that nobody looks at.
    """

    def make(body: Callable[..., None]) -> Any:
        _, _, *names = inspect.signature(body).parameters

        def test(**given: Any) -> None:
            args = [given[name] for name in names]
            ranks = size if isinstance(size, int) else size(*args)
            found = given["kept"][ranks].run(Body(body.__module__, body.__name__), *args, timeout=timeout)
            assert found == [None] * ranks, f"the body returned {found}; allowed: None, since it asserts by itself"

        signature = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in ("kept", *names)])
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(body, name))
        vars(test).update(body=body, __signature__=signature)
        return test

    return make


def _work(rank: int, size: int, pipe: Connection, folder: Path, few: bool, shares: bool) -> None:
    """The body of a worker: answer calls, and leave their groups, until the pipe closes."""
    with few_tries() if few else nullcontext(), _one_device() if shares else nullcontext([]) as devices:
        _answer(rank, size, pipe, folder, devices)


def _answer(rank: int, size: int, pipe: Connection, folder: Path, devices: list[Any]) -> None:
    stack = (folder / f"stack{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    stderr = (folder / f"stderr{rank}").open("w")
    os.dup2(stderr.fileno(), 2)
    faulthandler.enable(stderr)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for number in itertools.count():
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        step = ""
        try:
            function, args, timeout = (_leave, (), LEAVE_S) if call == LEAVE else pickle.loads(call)
            signal.setitimer(signal.ITIMER_REAL, timeout + 10)  # ends this process even if nobody watches it any more
            import torch

            if call != LEAVE:
                step = NOT_JOINED
                _join(rank, size, folder / f"store{number}", timeout)
                torch.manual_seed(0)
                step = ""
            answer = pickle.dumps((True, function(rank, size, *args)))
        except BaseException:
            answer = pickle.dumps((False, step + traceback.format_exc()))
        if call == LEAVE:
            devices.clear()  # its thread would wake a hundred times a second until the next call
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(answer)


@contextmanager
def _one_device() -> Iterator[list[Any]]:
    """Let groups that torch makes in this process have one device of gloo, and with it one thread, together.

    The device is made when the list is empty.
    """
    import torch.distributed as dist

    backend: Any = dist.ProcessGroupGloo
    made, devices = backend.__init__, list[Any]()

    def make(
        self: Any, store: Any, rank: int, size: int, *given: Any, timeout: timedelta | None = None, **_: bool
    ) -> None:
        if timeout is not None:  # only torch gives it by name, since 2.15 with enable_reconfigure
            if not devices:
                devices.append(backend.create_device(interface="lo"))
            options = backend._Options()
            options._devices, options._timeout = devices, timeout
            given = (options,)
        made(self, store, rank, size, *given)

    with patch.object(backend, "__init__", make):
        yield devices


def _join(rank: int, size: int, store: Path, timeout: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)


def _leave(rank: int, size: int) -> int:
    """Leave the groups; return the number of threads that are left."""
    import psutil
    import torch.distributed as dist

    if dist.is_initialized():  # a test may have ended it
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:  # its caches hold meshes, and the names of groups that are gone
        from torch.distributed.tensor import _redistribute, debug
        from torch.distributed.tensor._collective_utils import MeshTopoInfo

        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()  # engines and meshes hold groups
    gc.freeze()  # what stays is modules and caches: the next collections do not look at it
    return psutil.Process().num_threads()
