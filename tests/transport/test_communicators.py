"""What does not fit a device is said in one line; that engines release what they made is shown in tests/device."""

import threading
import time
from collections import deque
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.transport import communicators, devices, groups, streams
from overlap1f1b.transport import mesh as mesh_module
from overlap1f1b.transport.boundary import LINK_CTAS
from overlap1f1b.transport.budget import LEAST_CTAS, DeviceOptions
from overlap1f1b.transport.communicators import Communicators, Watchdog
from overlap1f1b.transport.devices import Stamp
from overlap1f1b.transport.failures import Failures, LostRankError
from overlap1f1b.transport.mesh import Mesh
from overlap1f1b.transport.streams import EventMark
from tests.ranks import over

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("ctas", [LEAST_CTAS, 32, 100])
def test_all_transfers_fit_the_budget(ctas: int) -> None:
    """Rows, two sums, counts and four links."""
    budget = DeviceOptions(ctas=ctas)
    assert budget.rows + 2 * budget.sums + 1 + 4 * LINK_CTAS <= ctas


def test_more_blocks_than_multiprocessors() -> None:
    DeviceOptions(ctas=132).check(GPU, 132)
    with pytest.raises(ValueError, match=r"^ctas=133 on cuda:0; allowed: 16 to its 132 multiprocessors$"):
        DeviceOptions(ctas=133).check(GPU, 132)
    with pytest.raises(ValueError, match=r"^ctas=15; allowed: 16 or more$"):
        DeviceOptions(ctas=15)


@over(2)
def test_groups_and_model_on_different_devices(rank: int, size: int) -> None:
    mesh = Mesh(init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), timedelta(seconds=20))
    mesh.check_device(torch.device("cpu"))
    kinds = {id(None): "nccl", id(mesh.group("ep")): "gloo"}
    with (
        patch.object(mesh_module, "backend_of", lambda group, device: kinds[id(group)]),
        pytest.raises(ValueError, match="group along 'ep' is on gloo for a model on 'cuda:0'; allowed: nccl, as the"),
    ):
        mesh.check_device(GPU)
    with patch.object(mesh_module, "backend_of", lambda group, device: "nccl"):
        with pytest.raises(ValueError, match=r"^a mesh of 'cpu' for a model on 'cuda:0'; allowed: a mesh of 'cuda'$"):
            mesh.check_device(GPU)
        mesh.device_type = "cuda"
        mesh.check_device(GPU)

        bound = SimpleNamespace(bound_device_id=torch.device("cuda", 1))
        said = r"^init_process_group\(device_id=cuda:1\) for a model on 'cuda:0'; allowed:"
        with (
            patch.object(dist.distributed_c10d, "_get_default_group", lambda: bound),
            pytest.raises(ValueError, match=said),
        ):
            mesh.check_device(GPU)


@pytest.mark.parametrize("done", [False, True], ids=["waits", "was aborted"])
def test_a_wait_for_a_device_looks_for_failures(done: bool) -> None:
    class Event:
        def query(self) -> bool:
            return done

    mark = EventMark(GPU, None, Stamp(Event(), deque()))
    failures = Failures(limit=timedelta(seconds=0.01))
    with nullcontext() if done else pytest.raises(TimeoutError):
        mark.synchronize(failures)
    failures.lost = "rank 1 failed"
    with pytest.raises(ConnectionError, match="another rank failed"):
        mark.synchronize(failures)


# The watchdog: that hosts end which wait inside CUDA is shown in tests/device and tests/nccl.

LOOK_S = 0.02


class Told(Failures):
    """A record in which another rank's failure stands after some looks."""

    def __init__(self, looks: int, seconds: float = 60) -> None:
        super().__init__(limit=timedelta(seconds=seconds))
        self.looks = looks

    def read(self, *, wait: bool = False) -> str | None:
        self.looks -= 1
        return "rank 1 failed" if self.looks < 0 else None


@pytest.mark.parametrize(
    ("seconds", "looks", "idle", "timeout", "wanted"),
    [
        # A host that is busy without the device may take any time.
        (0.3, 1000, True, 0.1, (False, None)),
        (30, 1000, False, 0.1, (True, "the device stood still for 0.2 s")),
        (30, 1, False, 60, (True, "rank 1 failed")),
        # A busy host ends at its next node, and groups that need no abort can be used by a next engine.
        (0.15, 1, True, 0.1, (False, "rank 1 failed")),
    ],
)
def test_what_a_watchdog_aborts(
    monkeypatch: pytest.MonkeyPatch, seconds: float, looks: int, idle: bool, timeout: float, wanted: object
) -> None:
    """While a host is busy for some seconds; and what it has found."""
    monkeypatch.setattr(communicators, "LOOK_S", LOOK_S)
    begun, aborted, failures = time.monotonic(), threading.Event(), Told(looks, timeout)
    watchdog = Watchdog(failures, [aborted.set], lambda: idle)
    aborted.wait(seconds)
    watchdog.end()
    assert (aborted.is_set(), failures.lost) == wanted
    assert looks == 1 or time.monotonic() - begun >= 0.2


@pytest.mark.parametrize("where", ["record", "synchronize"])
def test_a_device_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It stands still in front of an event; or the host is in a copy to pageable memory, and no event can be recorded.

    However often it is asked, one thread waits.
    """
    answers, asked = threading.Event(), list[str]()

    class Event:
        def __init__(self, **options: bool) -> None:
            self.record = lambda stream: self.act("record")
            self.synchronize = lambda: self.act("synchronize")

        def act(self, name: str) -> None:
            asked.append(name)
            if name == where:
                answers.wait(30)

    current = SimpleNamespace(device="cuda:3")
    gpu = SimpleNamespace(Event=Event, current_stream=lambda device: current, set_device=asked.append)
    monkeypatch.setattr(devices, "KINDS", {"cuda": gpu})
    goes_on = streams.going_on(torch.device("cuda"))
    assert goes_on()  # nothing was asked before
    while where not in asked:
        time.sleep(0.005)
    assert not goes_on()
    assert not goes_on()
    answers.set()
    while not goes_on():
        time.sleep(0.005)
    assert asked[:2] == ["cuda:3", "record"]
    assert asked.count("cuda:3") == 2


def test_a_host_that_waits_for_groups_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine has is ended first, then what the user has."""
    monkeypatch.setattr(communicators, "LOOK_S", LOOK_S)
    ended, last = list[str](), threading.Event()
    watchdog = Watchdog(Told(0), [lambda: ended.append("own"), last.set], lambda: False)
    assert last.wait(30)
    watchdog.end()
    assert ended == ["own"]
    assert watchdog.aborted


class Aborted:
    """A group of a device, which notes its abort, and the thread that frees it."""

    def __init__(self, noted: list[object]) -> None:
        self.noted = noted

    def abort(self) -> None:
        self.noted.append("aborted")

    def __del__(self) -> None:
        self.noted.append(threading.current_thread())


def test_another_thread_frees_aborted_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever frees a group on NCCL waits for torch's thread beside it, which sleeps after an abort."""
    monkeypatch.setattr(groups, "FREED_S", 0.0)
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "50")
    noted = list[object]()
    groups.abort(Aborted(noted))  # type: ignore[arg-type]
    assert noted == ["aborted"]
    while len(noted) < 2:
        time.sleep(0.005)
    assert noted[1] is not threading.current_thread()


@pytest.mark.parametrize("error", [None, ValueError("3 rows instead of 5")], ids=["ends well", "fails"])
@pytest.mark.parametrize("waits", [True, False], ids=["in CUDA", "by itself"])
def test_a_body_that_is_watched(monkeypatch: pytest.MonkeyPatch, waits: bool, error: ValueError | None) -> None:
    """What it does after an abort counts as lost; what it does before is its own."""
    monkeypatch.setattr(communicators, "LOOK_S", LOOK_S if waits else 0.3)
    monkeypatch.setattr(streams, "going_on", lambda device: lambda: False)
    monkeypatch.setattr(communicators, "watch_of", lambda device: object())
    aborted, failures = threading.Event(), Told(0)
    own = SimpleNamespace(abort=aborted.set, release=lambda: None)
    mesh: Any = SimpleNamespace(own=own, inner=(), several=True, failures=failures, check_device=lambda _: None)
    made = Communicators(owner := DeviceOptions(), mesh, owner)
    made.use(torch.device("cpu"))
    lost = pytest.raises(LostRankError, match="^rank 1 failed" + "; here since then: ValueError: 3 rows" * bool(error))
    its = pytest.raises(ValueError, match="3 rows") if error else nullcontext()
    with lost if waits else its, made.watched():
        while not (aborted.is_set() if waits else failures.lost):
            time.sleep(0.005)
        if error is not None:
            raise error
