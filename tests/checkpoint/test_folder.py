"""A folder of checkpoints, of any files: names, what is kept, what goes. For kills see test_save.py."""

import os
from functools import partial
from pathlib import Path

import pytest

from overlap1f1b.checkpoint.folder import INDEX, abandon, begin, checkpoint_in, latest, publish, said_of


def write(directory: Path, step: int, content: bytes = b"content", keep: int = 2) -> Path:
    unfinished = begin(directory, step)
    (unfinished / INDEX).write_bytes(content)
    return publish(unfinished, step, keep, {INDEX})


def test_the_newest_are_kept(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    for step in (8, 9, 10, 99_999_999, 100_000_000):
        assert write(tmp_path, step) == latest(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step-100000000", "step-99999999"]
    write(tmp_path, 5, keep=1)
    assert os.listdir(tmp_path) == ["step-00000005"]


def test_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "step-by-step"  # begins as a checkpoint does
    assert checkpoint_in(folder.parent) is None
    checkpoint = write(folder, 5)
    assert checkpoint_in(folder) == checkpoint == checkpoint_in(checkpoint)
    assert checkpoint_in(absent := folder / "step-00000006") == absent
    renamed = checkpoint.rename(folder / "best")
    assert checkpoint_in(renamed) == renamed


def test_what_is_not_finished_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    (begin(tmp_path, 7) / "file").touch()
    (tmp_path / "step-7").mkdir()  # somebody else's
    assert latest(tmp_path) is None
    write(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-7"]


def test_one_that_was_being_replaced_is_used_until_its_replacement_is_there(tmp_path: Path) -> None:
    replaced = write(tmp_path, 5, b"old").rename(tmp_path / ".replaced-step-00000005")
    assert latest(tmp_path) == replaced
    begin(tmp_path, 5)  # of a save that is killed
    assert latest(tmp_path) == replaced
    final = write(tmp_path, 5, b"new")
    assert latest(tmp_path) == final
    assert (final / INDEX).read_bytes() == b"new"
    assert os.listdir(tmp_path) == [final.name]


def test_one_that_is_abandoned_leaves_nothing(tmp_path: Path) -> None:
    unfinished = begin(tmp_path, 7)
    (unfinished / "file").touch()
    assert abandon(unfinished) > 0
    assert os.listdir(tmp_path) == []


def test_a_folder_that_not_all_ranks_see(tmp_path: Path) -> None:
    unfinished = begin(tmp_path, 7)
    (unfinished / "mine").touch()
    with pytest.raises(OSError, match=r"unfinished lacks yours, which another rank wrote; allowed: a folder that all"):
        publish(unfinished, 7, 2, {"mine", "yours"})
    assert latest(tmp_path) is None


def test_what_is_no_folder_of_checkpoints_is_refused_and_one_of_other_things_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("")
    with pytest.raises(ValueError, match=r"notes is a file; allowed: a folder of checkpoints"):
        checkpoint_in(tmp_path / "notes")
    with pytest.raises(NotADirectoryError, match="notes is a file; allowed: a folder that can be written"):
        begin(tmp_path / "notes", 1)
    with pytest.warns(UserWarning, match="has no checkpoint: training begins at step 0"):
        assert checkpoint_in(tmp_path) is None
    assert said_of(tmp_path) == f"{tmp_path} has no checkpoint: training begins at step 0"
    checkpoint = write(tmp_path, 5)
    for refuse in (latest, partial(begin, step=6)):
        with pytest.raises(ValueError, match=f"^{checkpoint} is a checkpoint; allowed: the folder that holds it$"):
            refuse(checkpoint)
    assert said_of(tmp_path) is said_of(tmp_path / "new") is None
