"""When a watchdog aborts; that hosts end which wait inside CUDA is shown in tests/device and tests/nccl."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from overlap1f1b.transport import groups, streams
from overlap1f1b.transport import watchdog as watchdog_module
from overlap1f1b.transport.communicators import Communicators
from overlap1f1b.transport.failures import Failures, LostRankError
from overlap1f1b.transport.watchdog import Watchdog

LOOK_S = 0.02


class Told(Failures):
    """A record in which another rank's failure stands after some looks."""

    def __init__(self, looks: int) -> None:
        super().__init__()
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
    failures = Told(looks)
    watchdog = Watchdog(failures, [aborted.set], timeout, lambda: idle)
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


def test_a_host_that_holds_a_lock_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in a copy to pageable memory; until that ends, no other thread can record an event."""
    free = threading.Event()
    event = SimpleNamespace(query=lambda: True, record=lambda stream: free.wait(30))
    free.set()
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(streams, "ANSWER_S", 0.1)
    goes_on = streams.going_on(torch.device("cuda"))
    assert goes_on()
    free.clear()
    assert not goes_on()
    assert not goes_on()
    free.set()
    while not goes_on():
        time.sleep(0.005)


def test_a_host_that_ends_by_itself_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "LOOK_S", 0.3)
    failures, aborted = Told(0), threading.Event()
    watchdog = Watchdog(failures, [aborted.set], 60, lambda: True)
    while not failures.is_lost():
        time.sleep(0.005)
    watchdog.end()
    assert not aborted.is_set()
    assert not watchdog.aborted


def test_a_host_that_waits_for_groups_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine has is ended first, then what the user has."""
    monkeypatch.setattr(watchdog_module, "LOOK_S", LOOK_S)
    ended, last = list[str](), threading.Event()
    watchdog = Watchdog(Told(0), [lambda: ended.append("own"), last.set], 60, lambda: False)
    assert last.wait(30)
    watchdog.end()
    assert ended == ["own"]
    assert watchdog.aborted


def test_aborted_groups_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread than the user's drops them, and waits for what torch has to do before they end."""
    monkeypatch.setattr(groups, "KEPT_S", 0.2)
    ended = list[threading.Thread]()

    class Group:
        def __del__(self) -> None:
            ended.append(threading.current_thread())

    groups.keep([Group()])
    assert not ended
    while not ended:
        time.sleep(0.005)
    assert ended[0] is not threading.current_thread()


@pytest.mark.parametrize("error", [None, ValueError("3 rows instead of 5")], ids=["ends well", "fails"])
@pytest.mark.parametrize("waits", [True, False], ids=["in CUDA", "by itself"])
def test_a_body_that_is_watched(monkeypatch: pytest.MonkeyPatch, waits: bool, error: ValueError | None) -> None:
    """What it does after an abort counts as lost; what it does before is its own."""
    monkeypatch.setattr(watchdog_module, "LOOK_S", LOOK_S if waits else 0.3)
    monkeypatch.setattr(streams, "going_on", lambda device: lambda: False)
    aborted = threading.Event()
    communicators = Communicators.__new__(Communicators)
    communicators.__dict__ |= {"timeout": timedelta(seconds=60), "_stamp": object, "_device": torch.device("cpu")}
    communicators.__dict__ |= {"mesh": SimpleNamespace(several=True, failures=Told(0)), "abort": aborted.set}
    lost = pytest.raises(LostRankError, match="^rank 1 failed" + "; here since then: ValueError: 3 rows" * bool(error))
    own = pytest.raises(ValueError, match="3 rows") if error else nullcontext()
    with lost if waits else own, communicators.watched():
        while not (aborted.is_set() if waits else communicators.mesh.failures.is_lost()):
            time.sleep(0.005)
        if error is not None:
            raise error
