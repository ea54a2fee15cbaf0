"""Checkpoints: the same bits back, on any number of ranks, whatever was killed, and a clear word if they do not fit."""

import os
import shutil
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from overlap1f1b.checkpoint import folder as checkpoint_folder
from overlap1f1b.checkpoint.folder import latest
from tests.checkpoint.runs import Tiny, ep, equal, joined, load_on, save_on
from tests.ranks import RankError, Ranks, over, run
from tests.tiers import wide


def killed_on(rank: int, size: int, folder: Path, victim: int) -> None:
    """`victim` is killed: rank 0 when all have written and nothing is renamed, rank 1 instead of writing."""

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    model = Tiny(ep(size)).train_steps(0, 4)
    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            patch.setattr(*[(checkpoint_folder, "_sync"), (FileSystemWriter, "write_data")][rank], die)
        model.save(folder, 4)


# The same bits.


def test_the_same_bits_on_any_number_of_ranks(ranks2: Ranks, ranks4: Ranks, tmp_path: Path) -> None:
    whole = joined(ranks2.run(save_on, tmp_path / "two"))
    one = Tiny(seed=1)
    assert one.load(latest(tmp_path / "two")) == 3
    assert equal(one.state(), whole)
    for ranks in (ranks2, ranks4):
        assert equal(joined(ranks.run(load_on, tmp_path / "two")), whole)
    assert not equal(whole, Tiny(seed=1).state())
    assert {"experts.weight.exp_avg", "experts.weight.step", "dense.bias.exp_avg_sq", "dense.seen"} <= whole.keys()
    one.save(tmp_path / "one", 3)
    assert equal(joined(ranks2.run(load_on, tmp_path / "one")), whole)


def test_before_the_first_step(tmp_path: Path) -> None:
    fresh = Tiny()
    fresh.save(tmp_path, 0)
    other = Tiny(seed=1)
    assert other.load(tmp_path / "empty") == 0
    assert other.load(latest(tmp_path)) == 0
    assert equal(other.state(), fresh.state())


# The folder.


def test_nothing_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tiny().train_steps(0, 1).save(tmp_path, 1)
        Tiny().load(latest(tmp_path))
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    model = Tiny()
    with pytest.raises(ValueError, match=r"^directory=3; allowed: str or PathLike$"):
        model.save(3, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep=0; allowed: 1 or more"):
        model.save(tmp_path, 1, keep=0)
    with pytest.raises(ValueError, match="step=-1; allowed: 0 or more"):
        model.save(tmp_path, -1)
    with pytest.raises(ValueError, match="model='some'; allowed: all, trained, or none"):
        model.save(tmp_path, 1, model="some")
    for config in (["a"], "abc", 5):
        with pytest.raises(ValueError, match=r"^config=.*; allowed: Mapping or None$"):
            model.save(tmp_path, 1, config=config)
    for value in (float("nan"), float("inf"), {1}, object()):
        with pytest.raises(ValueError, match=r"^config=\{'a': .*\}: .*; allowed: JSON values$"):
            model.save(tmp_path, 1, config={"a": value})
    assert os.listdir(tmp_path) == []
    model.save(tmp_path / "there", 1)
    with pytest.raises(ValueError, match=r"^config=5; allowed: Mapping or None$"):
        model.load(tmp_path / "there", config=5)  # type: ignore[arg-type]
    optimizers = {None: "optimizer=None; allowed: a list of Optimizer", "adam": "optimizer='adam'; allowed: a list of"}
    for optimizer, message in (*optimizers.items(), ([3], r"optimizer\[0\]=3; allowed: Optimizer")):
        model.adamw = optimizer  # type: ignore[assignment]
        for way in (partial(model.save, tmp_path / "new", 1), partial(model.load, tmp_path / "there")):
            with pytest.raises(ValueError, match=f"^{message}"):
                way()
    model = Tiny()
    for state in ("x", [model.adamw]):
        with pytest.raises(ValueError, match=r"^state=.*; allowed: Mapping or None$"):
            model.save(tmp_path / "new", 1, state=state)


# Killed, or out of disk.


def kill_at(folder: Path, left: int) -> None:
    """Let this process end at so many uses of a folder of the file system from now."""

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if (event == "open" or event.startswith(("os.", "shutil."))) and args and str(folder) in str(args[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def kill_at_each_event(rank: int, size: int, start: Path, step: int, keep: int) -> list[tuple[int, list[str]]]:
    """Save `step` again and again from the folder `start`, each time killed at a later use of the file system.

    Returns, for each, how many steps the newest checkpoint was trained for, and the folder after the same save and one
    more.
    """
    outcomes = []
    for last in range(1, 1000):
        folder = start.with_name(f"killed-{last}")
        shutil.copytree(start, folder)
        child = os.fork()
        if child == 0:
            model = Tiny().train_steps(0, 2)
            kill_at(folder, last)
            model.save(folder, step, keep=keep)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            break
        for path in [*folder.glob("step-*"), latest(folder), folder]:  # the last one may have another name then
            model = Tiny(seed=1)
            model.load(path)
            trained = int(model.dense.seen)
            assert equal(model.state(), Tiny().train_steps(0, trained).state())
        model.save(folder, step, keep=keep)
        model.save(folder, 9, keep=1)
        outcomes.append((trained, os.listdir(folder)))
    return outcomes


@pytest.mark.parametrize(("step", "keep"), [(2, 1), *wide((1, 1))], ids=["in place of", "the same step"])
def test_killed_at_any_moment_of_a_save(tmp_path: Path, step: int, keep: int) -> None:
    Tiny().train_steps(0, 1).save(tmp_path / "start", 1)
    (outcomes,) = run(kill_at_each_event, 1, tmp_path / "start", step, keep)
    trained = [steps for steps, _ in outcomes]
    assert len(outcomes) > 10
    assert trained == sorted(trained)
    assert set(trained) == {1, 2}  # the old one until the rename, the new one from then on
    assert all(names == ["step-00000009"] for _, names in outcomes)


@pytest.mark.parametrize("victim", [0, *wide(1)])
def test_a_rank_killed_before_all_have_written_and_renamed(ranks2: Ranks, tmp_path: Path, victim: int) -> None:
    saved = ranks2.run(save_on, tmp_path)
    with pytest.raises(RankError, match=f"rank {victim}: died, exit code -9"):
        run(killed_on, 2, tmp_path, victim)
    assert sorted(os.listdir(tmp_path)) == [".step-00000004.unfinished", "step-00000003"]
    assert equal(joined(ranks2.run(load_on, tmp_path)), joined(saved))
    ranks2.run(save_on, tmp_path)
    assert os.listdir(tmp_path) == ["step-00000003"]


@over(2)
def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(rank: int, size: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file is a file; allowed: a folder that can be written"):
        Tiny(ep(size)).save(tmp_path / "file", 3)
