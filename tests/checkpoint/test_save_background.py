"""Checkpoints written while the next steps run: the same bits, errors on all ranks, a whole one after every kill."""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from overlap1f1b.checkpoint import Saving
from overlap1f1b.checkpoint.folder import latest
from overlap1f1b.transport import devices, failures
from overlap1f1b.transport.failures import LostRankError
from tests.checkpoint.runs import Run, equal
from tests.checkpoint.test_save import kill_at
from tests.ranks import RankError, Ranks, over, run
from tests.tiers import wide

KILLS = int(os.environ.get("KILLS", "4"))


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Nothing is written before the event is set."""
    event, write = threading.Event(), FileSystemWriter.write_data

    def wait(*args: Any) -> Any:
        assert event.wait(60)
        return write(*args)

    with patch.object(FileSystemWriter, "write_data", wait):
        yield event


def _resumed_twice(rank: int, size: int, folder: Path, layout: dict[str, int]) -> None:
    """From a checkpoint that was written at once, and from one that was written during the next steps."""
    first = Run(layout)
    first.train(2)
    first.save(folder / "at once")
    saved = first.whole()
    with held_back() as event:
        saving = first.save(folder / "later", background=True)
        unbroken = first.train(2)
        assert (saving.done(), latest(folder / "later")) == (False, None)
        event.set()
        assert saving.result() == latest(folder / "later") == folder / "later" / "step-00000003"
    ended = first.whole()
    assert not equal(ended, saved)
    for name in ("at once", "later"):
        again = Run(layout, seed=7)
        again.train(1)
        assert again.load(folder / name) == 3
        assert equal(again.whole(), saved), name
        assert again.train(2) == unbroken, name
        assert equal(again.whole(), ended), name
        again.load(folder / name, state=again.state | {"random": None})
        assert again.train(2) != unbroken, "random numbers change nothing"


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {"ep": 2}),
        *wide((2, {"pp": 2}), (4, {"pp": 2, "ep": 2}), (4, {"dp": 2, "ep": 2}), (4, {"ep": 2, "tp": 2}), (1, {})),
    ],
)
def test_a_resumed_run_is_the_run_that_never_stopped(
    kept: dict[int, Ranks], tmp_path: Path, size: int, layout: dict[str, int]
) -> None:
    if size > 1:
        kept[size].run(_resumed_twice, tmp_path, layout)
    else:
        _resumed_twice(0, 1, tmp_path, layout)
    for name in ("at once", "later"):
        assert len(list((tmp_path / name / "step-00000003").iterdir())) == size + 1  # one of each rank, and the index


def test_the_thread_that_writes_uses_the_device_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, found = Run({}), list[tuple[bool, torch.device]]()

    def note(device: torch.device) -> None:
        found.append((threading.current_thread() is threading.main_thread(), device))

    gpu = SimpleNamespace(set_device=note, is_initialized=lambda: False)
    monkeypatch.setattr(devices, "gpu_of", lambda device: gpu)
    one.save(tmp_path, background=True).result()
    assert found == [(False, torch.device("cpu"))]


@over(2)
def test_the_next_call_waits(rank: int, size: int, tmp_path: Path) -> None:
    one = Run({"ep": size})
    with held_back() as event:
        first = one.save(tmp_path, 1, background=True)
        one.train(1)
        threading.Timer(0.1, event.set).start()
        second = one.save(tmp_path, 2, background=True)
        assert first.done()
        assert one.load(tmp_path) == 2
        assert second.done()
        third = one.save(tmp_path, 3, background=True, keep=3)
        one.engine.close()
    assert third.done()
    assert sorted(os.listdir(tmp_path)) == [f"step-0000000{step}" for step in (1, 2, 3)]


@over(2, timeout=20)
def test_an_interrupt_of_a_rank_that_waits_ends_the_others(rank: int, size: int, tmp_path: Path) -> None:
    """Before its limit of 30 s."""
    one = Run({"ep": size})
    with held_back() as event:
        one.save(tmp_path, 1, background=True)
        if rank == 1:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                one.load(tmp_path)
        event.set()
    if rank == 0:
        with pytest.raises(LostRankError) as caught:
            one.load(tmp_path)
        said = "\n".join([str(caught.value), *caught.value.__notes__])
        assert "rank ep 1 failed in load_checkpoint: KeyboardInterrupt" in said


@over(2)
def test_an_error_is_raised_on_all_ranks(rank: int, size: int, tmp_path: Path) -> None:
    one = Run({"ep": size})
    start = re.escape(f"checkpoint {tmp_path}/step-00000004 cannot be written: rank ep 1: OSError: ")
    text = rf"^{start}.*No space left on device \(\d+ MiB are free\)$"

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for ask in ("result", "save", "load", "close"):
        with patch.object(FileSystemWriter, "write_data", fail if rank == 1 else FileSystemWriter.write_data):
            saving: Saving = one.save(tmp_path, 4, background=True)
            while not saving.done():
                time.sleep(0.005)
        call = {"result": saving.result, "close": one.engine.close}.get(ask) or partial(getattr(one, ask), tmp_path)
        with pytest.raises(OSError, match=text):
            call()
        if ask != "close":
            one.train(1)
            one.save(tmp_path, 5)  # which does not say it again
    dist.barrier()
    assert os.listdir(tmp_path) == ["step-00000005"]


def _lost(rank: int, size: int, folder: Path) -> None:
    one = Run({"ep": size})
    one.train(1)
    with held_back() as event:
        saving = one.save(folder, background=True)
        dist.barrier()  # else the other may still make its groups
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        event.set()
        with patch.object(failures, "ROLL_CALL_S", 0.5):
            saving.result()


def test_a_rank_that_is_killed_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run(_lost, 2, tmp_path, grace=20)
    assert "exit code -9" in caught.value.failures[1]
    text = caught.value.failures[0]
    assert f"checkpoint {tmp_path}/step-00000003 cannot be written: the ranks along 'ep' did not meet" in text
    assert "no word, within 0.5 s, from rank ep 1: killed, stopped" in text


# Killed while it is written.


def _killed(rank: int, size: int, folder: Path, events: list[int]) -> None:
    """Train and save in the background, step after step; this process ends at a use of the file system."""
    one = Run({"ep": size})
    kill_at(folder, events[rank])
    for step in range(1, 100):
        one.train(1)
        one.save(folder, step, background=True)


def _resumed(rank: int, size: int, folders: list[Path]) -> list[int]:
    """For each folder the steps of its newest checkpoint, which is what the run that never stopped had."""
    unbroken, run = {}, Run({"ep": size})
    for step in range(1, 8):
        run.train(1)
        unbroken[step] = run.whole()
    found = []
    for folder in folders:
        again = Run({"ep": size}, seed=7)
        found.append(step := again.load(folder))
        assert again.loader.served == again.scheduler.last_epoch == step, folder
        assert not step or equal(again.whole(), unbroken[step]), folder
        again.save(folder, 50)
    return found


@pytest.mark.wide  # a rank that is killed meanwhile is above, and every moment of a save in test_save.py
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """The newest checkpoint is whole, and has the bits of the run that never stopped. KILLS=50 kills more often."""
    source = random.Random(2)
    folders = [tmp_path / str(number) for number in range(KILLS)]
    for folder in folders:
        with pytest.raises(RankError, match="exit code -9"):
            run(_killed, 2, folder, [source.randrange(1, 120) for _ in range(2)])
    steps, _ = run(_resumed, 2, folders, timeout=300)
    assert len(set(steps)) > 1
    for folder in folders:
        assert not list(folder.glob(".*"))
