"""What ranks tell each other of failures: a cause, a word of each, and which rank is silent."""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch.distributed as dist

from overlap1f1b.transport import failures as failures_module
from overlap1f1b.transport.failures import Failures, LostRankError, Store, headline
from tests.ranks import over
from tests.tiers import wide

LABELS = {0: "rank ep 0", 1: "rank ep 1"}
GLOO = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically …"


def _notes(failures: Failures, error: Exception, message: str) -> str:
    failures.tell(error, message)
    failures.explain(error)
    return "\n".join([str(error), *error.__notes__])


@over(2)
def test_a_rank_that_lost_another_says_why_that_one_failed(rank: int, size: int) -> None:
    failures = Failures("both", LABELS)
    if rank == 0:
        said = _notes(failures, ValueError("a bad batch"), "rank ep 0 failed at dispatch.f[1] m2")
        assert said.splitlines() == ["a bad batch", "rank ep 0 failed at dispatch.f[1] m2"]
        return
    said = _notes(failures, LostRankError("counts.f[1] m2 failed"), "rank ep 1 failed at counts.f[1] m2")
    cause = "the first to fail: rank ep 0 failed at dispatch.f[1] m2: ValueError: a bad batch"
    assert said.splitlines() == [f"{cause}; here: counts.f[1] m2 failed", "rank ep 1 failed at counts.f[1] m2"]


@over(2)
def test_a_rank_without_a_word_is_named(rank: int, size: int) -> None:
    failures = Failures("silent", LABELS)
    dist.barrier()
    if rank:
        with patch.object(failures_module, "ROLL_CALL_S", 0.2):
            said = _notes(failures, RuntimeError(GLOO), "rank ep 1 failed at m0")
        assert "no word, within 0.2 s, from rank ep 0: killed, stopped, ended or busy" in said
    dist.barrier()


@over(2)
def test_a_rank_that_has_ended_is_named(rank: int, size: int) -> None:
    failures = Failures("ended", LABELS)
    if rank == 0:
        sys.last_value = ArithmeticError("the loop broke")  # as the interpreter sets it
        failures.end()
        del sys.last_value
    dist.barrier()
    if rank:
        said = _notes(failures, LostRankError("no answer"), "rank ep 1 failed at m0")
        assert "rank ep 0 has ended by ArithmeticError: the loop broke" in said


@over(2)
def test_an_error_of_the_model_is_a_cause(rank: int, size: int) -> None:
    """Also one that looks like torch's own."""
    failures = Failures("own", LABELS)
    if rank == 0:
        _notes(failures, RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "rank ep 0 failed")
        return
    while (said := failures.read()) is None:
        time.sleep(0.01)
    assert said == "rank ep 0 failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied"


@over(2)
def test_a_rank_that_does_not_come_is_named(rank: int, size: int) -> None:
    failures = Failures("late", LABELS, limit=timedelta(seconds=0.1))
    if rank:
        return
    start = time.monotonic()
    with pytest.raises(
        LostRankError,
        match=r"^rank ep 1 did not come to the construction of an engine within 0\.1 s; "
        "all ranks make their engines in one order$",
    ):
        failures.meet()
    assert time.monotonic() - start < 5


def test_one_rank_alone_tells_nobody() -> None:
    failures, error = Failures(), ValueError("x")
    failures.meet()
    assert _notes(failures, error, "rank 0 failed") == "x\nrank 0 failed"
    assert failures.failed
    assert failures.read() is None


def test_headline_leaves_out_gloos_source_and_advice() -> None:
    assert headline(RuntimeError(GLOO)) == "RuntimeError: Connection closed by peer [127.0.0.1]:1."
    assert headline(KeyError()) == "KeyError"


# Scripts that fail or end where threads are still at work: they end as scripts do, interpreter and all.

# Starts are most of such a script's time, so that one process imports what all need, and begins scripts as its forks.
BEGINS = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import gc, time
from datetime import timedelta
import torch, torch.distributed as dist
import torch._dynamo, torch.distributed.tensor
import overlap1f1b.engine
import tests.models
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
gc.freeze()  # what all scripts share is not looked through at the end of each

def begin(job):
    # The script in a fork, or the process number of each fork and None.
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            sys.argv[1:] = [str(rank), job["store"], job["how"]]
            os.dup2(os.open(f"{job['store']}-{rank}", os.O_WRONLY | os.O_CREAT, 0o600), 2)
            return pids, job["script"]
    return pids, None

for line in sys.stdin:
    job = json.loads(line)
    pids, script = begin(job)
    if script is not None:
        break
    status = []
    for pid in pids:
        status.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if job["alone"] and pid == pids[0]:
            os.kill(pids[1], signal.SIGKILL)
    print(json.dumps(status), flush=True)
else:
    sys.exit()
del begin, job, line, pids
exec(script)
"""


class Scripts:
    """Two ranks of a script at a time: `ends` says what each wrote to its standard error, and its status."""

    def __init__(self) -> None:
        environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", BEGINS, str(Path(__file__).parents[2])]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environ, start_new_session=True
        )

    def ends(self, store: Path, script: str, how: str, *, alone: bool = False) -> list[tuple[str, int]]:
        """alone: rank 1 never ends by itself, and is killed when rank 0 has ended."""
        job = {"store": str(store), "script": textwrap.dedent(script), "how": how, "alone": alone}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], 100)[0], "a rank does not end"
        status = json.loads(self.process.stdout.readline())
        # Triton of torch 2.15 lists at the end what its bindings have left.
        said = [Path(f"{store}-{rank}").read_text().partition("nanobind: leaked")[0] for rank in range(2)]
        return list(zip(said, status, strict=True))


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    begun = Scripts()
    yield begun
    os.killpg(begun.process.pid, signal.SIGKILL)
    begun.process.wait()


# A thread of a lane is inside gloo, waiting for a rank that never answers, when the interpreter ends.
PROGRAM = """
    import sys, time
    from datetime import timedelta
    import torch, torch.distributed as dist
    from overlap1f1b.transport.failures import Failures
    from overlap1f1b.transport.lanes import Lane
    from overlap1f1b.transport.exchange import Transfer
    from overlap1f1b.transport.groups import Groups, abort
    from overlap1f1b.plan import Node, Op
    from overlap1f1b.schedule import Kind

    rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    group = Groups([0, 1], timedelta(seconds=60)).new([0, 1], "test")
    if rank == 1:
        time.sleep(100)
    lane = Lane("test", Failures(limit=timedelta(seconds=60)), background=True, abort=lambda: abort(group))
    received = torch.zeros(4)
    post = {
        "receive": lambda: Transfer(received, [group.recv([received], 1, 7)]),
        "collective": lambda: Transfer(received, [group.allreduce([received])]),
        "send": lambda: Transfer(None, sends=[group.send([torch.zeros(2**22)], 1, 7)], source=received),
    }[how]
    lane.launch(Node(Op.DISPATCH, Kind.F, 0, 0), post)
    time.sleep(0.2)
    raise ArithmeticError("the loop broke")
"""


@pytest.mark.parametrize("how", ["receive", *wide("collective", "send")])
def test_a_process_ends_by_its_own_status_whatever_its_lanes_wait_for(
    tmp_path: Path, scripts: Scripts, how: str
) -> None:
    (said, status), (_, other) = scripts.ends(tmp_path / "store", PROGRAM, how, alone=True)
    assert status == 1, said
    assert said.rstrip().endswith("ArithmeticError: the loop broke")
    assert other == -signal.SIGKILL, "rank 1 was there to the end"


# An engine that is dropped before the end, as where it is a local of main(): its threads end by themselves meanwhile.
DROPPED = """
    import gc, sys
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from overlap1f1b import Engine, EngineOptions, NodeCosts, build_schedule
    from tests import models

    def main(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        program = build_schedule("combined_1f1b", microbatches=3)
        options = EngineOptions(costs=NodeCosts(), overlap="pairs", timeout=30)
        model = models.build(mesh.get_group("ep"))
        engine = Engine(model, program, mesh=mesh, loss_fn=models.loss_fn, options=options)
        data = models.batch(3, seed=rank)
        for _ in range(2):
            engine.step(data[0], target=data[1])

    rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    main(rank)
    if how != "plain":
        gc.collect()
    if how == "destroyed":
        dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["plain", *wide("collected", "destroyed")])
def test_a_process_whose_engine_was_dropped_ends_by_its_own_status(tmp_path: Path, scripts: Scripts, how: str) -> None:
    assert scripts.ends(tmp_path / "store", DROPPED, how) == [("", 0)] * 2


@over(2)
def test_a_store_that_does_not_answer_is_given_up(rank: int, size: int) -> None:
    """Nobody waits for it again."""
    stopped = SimpleNamespace(check=lambda keys: time.sleep(60), set=lambda *_: time.sleep(60))
    default = SimpleNamespace(clone=lambda: stopped)
    with patch.object(dist.distributed_c10d, "_get_default_store", lambda: default):
        failures = Failures("stopped", LABELS)
    start = time.monotonic()
    with patch.multiple(failures_module, ANSWER_S=0.2, ROLL_CALL_S=0.2):
        said = _notes(failures, LostRankError("no answer"), "rank ep 1 failed at m0")
        failures.read(wait=True)
    assert "the process group's store, which rank ep 0 may hold, gives no word" in said
    assert time.monotonic() - start < 20


def test_a_request_is_answered_while_another_thread_waits_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL does for its communicators; a watchdog asks meanwhile."""
    default = dist.TCPStore("localhost", 0, 1, True, timedelta(seconds=10))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: default)
    store = Store("engine/")
    waiting = threading.Thread(target=lambda: default.wait(["at last"], timedelta(seconds=30)))
    waiting.start()
    time.sleep(0.2)
    store.set("word", "here")
    assert store.get("word") == "here"
    assert waiting.is_alive()
    assert not store.gone
    dist.TCPStore("localhost", default.port, 1, False).set("at last", "")  # by another connection
    waiting.join()
