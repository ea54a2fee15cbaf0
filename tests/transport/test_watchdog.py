"""When a watchdog aborts; that hosts end which wait inside CUDA is shown in tests/device and tests/nccl."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from overlap1f1b.transport import devices, groups, streams
from overlap1f1b.transport import watchdog as watchdog_module
from overlap1f1b.transport.communicators import Communicators
from overlap1f1b.transport.failures import Failures, LostRankError
from overlap1f1b.transport.groups import Groups
from overlap1f1b.transport.watchdog import Watchdog

LOOK_S = 0.02


class Told(Failures):
    """A record in which another rank's failure stands after some looks."""

    def __init__(self, looks: int, seconds: float = 60) -> None:
        super().__init__(limit=timedelta(seconds=seconds))
        self.looks = looks

    def read(self, *, wait: bool = False) -> str | None:
        self.looks -= 1
        return "rank 1 failed" if self.looks < 0 else None


def watched(
    monkeypatch: pytest.MonkeyPatch, *, seconds: float, looks: int = 1000, idle: bool = True, timeout: float = 0.1
) -> tuple[bool, str | None]:
    """Return whether a watchdog aborts while a host is busy for some seconds, and what it has found."""
    monkeypatch.setattr(watchdog_module, "LOOK_S", LOOK_S)
    aborted = threading.Event()
    failures = Told(looks, timeout)
    watchdog = Watchdog(failures, [aborted.set], lambda: idle)
    aborted.wait(seconds)
    watchdog.end()
    return aborted.is_set(), failures.lost


def test_a_host_that_is_busy_without_the_device_may_take_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(monkeypatch, seconds=0.5) == (False, None)


def test_a_device_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.monotonic()
    assert watched(monkeypatch, seconds=30, idle=False) == (True, "the device stood still for 0.2 s")
    assert time.monotonic() - begun >= 0.2


def test_a_failure_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(monkeypatch, seconds=30, looks=1, idle=False, timeout=60) == (True, "rank 1 failed")


def test_a_host_that_is_busy_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at its next node, and groups that need no abort can be used by a next engine."""
    assert watched(monkeypatch, seconds=0.3, looks=1) == (False, "rank 1 failed")


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


def test_a_host_that_ends_by_itself_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "LOOK_S", 0.3)
    failures, aborted = Told(0), threading.Event()
    watchdog = Watchdog(failures, [aborted.set], lambda: True)
    while not failures.is_lost():
        time.sleep(0.005)
    watchdog.end()
    assert not aborted.is_set()
    assert not watchdog.aborted


def test_a_host_that_waits_for_groups_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine has is ended first, then what the user has."""
    monkeypatch.setattr(watchdog_module, "LOOK_S", LOOK_S)
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


@pytest.mark.parametrize("how", ["abort", "release"])
def test_another_thread_frees_aborted_groups(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Whoever frees a group on NCCL waits for torch's thread beside it, which sleeps after an abort."""
    monkeypatch.setattr(groups, "FREED_S", 0.0)
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "50")
    noted = list[object]()
    if how == "abort":
        groups.abort(Aborted(noted))  # type: ignore[arg-type]
    else:
        made = Groups.__new__(Groups)
        made._made = {"rows": Aborted(noted)}  # type: ignore[dict-item]
        made.release()
        del made
    assert noted == ["aborted"]
    while len(noted) < 2:
        time.sleep(0.005)
    assert noted[1] is not threading.current_thread()


@pytest.mark.parametrize("error", [None, ValueError("3 rows instead of 5")], ids=["ends well", "fails"])
@pytest.mark.parametrize("waits", [True, False], ids=["in CUDA", "by itself"])
def test_a_body_that_is_watched(monkeypatch: pytest.MonkeyPatch, waits: bool, error: ValueError | None) -> None:
    """What it does after an abort counts as lost; what it does before is its own."""
    monkeypatch.setattr(watchdog_module, "LOOK_S", LOOK_S if waits else 0.3)
    monkeypatch.setattr(streams, "going_on", lambda device: lambda: False)
    aborted = threading.Event()
    communicators = Communicators.__new__(Communicators)
    communicators.__dict__ |= {"timeout": timedelta(seconds=60), "_watch": object(), "_device": torch.device("cpu")}
    communicators.__dict__ |= {"mesh": SimpleNamespace(several=True, failures=Told(0)), "abort": aborted.set}
    lost = pytest.raises(LostRankError, match="^rank 1 failed" + "; here since then: ValueError: 3 rows" * bool(error))
    own = pytest.raises(ValueError, match="3 rows") if error else nullcontext()
    with lost if waits else own, communicators.watched():
        while not (aborted.is_set() if waits else communicators.mesh.failures.is_lost()):
            time.sleep(0.005)
        if error is not None:
            raise error
