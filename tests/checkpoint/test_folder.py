"""A folder of checkpoints, of any files: names, what is kept, what is looked at. For kills see test_save.py."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from overlap1f1b.checkpoint.folder import (
    CONFIG,
    abandon,
    begin,
    check_files,
    checkpoint_in,
    latest,
    publish,
    read_contents,
)
from tests.tiers import wide

HERE: dict[str, object] = {"hidden": 5, "text": "abc"}


def write(
    directory: Path, step: int, content: bytes = b"content", keep: int = 2, config: dict[str, object] = HERE
) -> Path:
    unfinished = begin(directory, step)
    (unfinished / "file").write_bytes(content)
    return publish(unfinished, step, config=config, keep=keep, files={}, added={})


def verify(checkpoint: Path, config: dict[str, object]) -> int:
    contents = read_contents(checkpoint, config)
    check_files(checkpoint, contents.files, contents.files)
    return contents.step


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
    renamed = checkpoint.rename(folder / "step-best")
    assert checkpoint_in(renamed) == renamed


def test_what_is_not_finished_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    begin(tmp_path, 7)
    (tmp_path / "step-7").mkdir()  # somebody else's
    assert latest(tmp_path) is None
    write(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-7"]


def test_one_that_was_being_replaced_is_used_until_its_replacement_is_there(tmp_path: Path) -> None:
    replaced = write(tmp_path, 5, b"old").rename(tmp_path / ".replaced-step-00000005")
    assert latest(tmp_path) == replaced
    begin(tmp_path, 6)
    assert latest(tmp_path) == replaced
    final = write(tmp_path, 5, b"new")
    assert latest(tmp_path) == final
    assert os.listdir(tmp_path) == [final.name]


def test_one_that_is_abandoned_leaves_nothing(tmp_path: Path) -> None:
    unfinished = begin(tmp_path, 7)
    (unfinished / "file").touch()
    assert abandon(unfinished) > 0
    assert os.listdir(tmp_path) == []


def test_verify(tmp_path: Path) -> None:
    path = write(tmp_path, 12)
    assert verify(path, dict(reversed(HERE.items()))) == 12
    path = path.rename(tmp_path / "elsewhere")
    assert verify(path, HERE) == 12


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        ({"hidden": 6, "text": "abc"}, "hidden=5, this run has hidden=6"),
        *wide(
            ({"hidden": 5}, "text=abc, this run has text=none"),
            ({**HERE, "layers": [1]}, "layers=none, this run has layers=[1]"),
        ),
    ],
)
def test_another_configuration_is_named(tmp_path: Path, config: dict[str, object], difference: str) -> None:
    path = write(tmp_path, 1)
    expected = f"checkpoint {path} has {difference}; use the same settings or another checkpoint folder"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        verify(path, config)


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "harm", "why"),
    [
        ("file", lambda path: path.write_bytes(b"c0ntent"), "file has other bytes than were written (7 bytes of 7)"),
        *wide(
            ("file", lambda path: path.write_bytes(b"conten"), "file has other bytes than were written (6 bytes of 7)"),
            ("file", Path.unlink, "file cannot be read (No such file or directory)"),
            ("file", lambda path: (path.unlink(), path.mkdir()), "file cannot be read (Is a directory)"),
            (CONFIG, Path.unlink, "config.json cannot be read (FileNotFoundError)"),
            (CONFIG, lambda path: path.write_text("["), "config.json cannot be read (JSONDecodeError)"),
            (CONFIG, lambda path: path.write_text("[]"), "config.json cannot be read (TypeError)"),
            (CONFIG, lambda path: path.write_text("{}"), "config.json cannot be read (KeyError)"),
            (CONFIG, lambda path: path.write_text("7"), "config.json cannot be read (AttributeError)"),
            (CONFIG, lambda path: path.write_bytes(b"\xff"), "config.json cannot be read (UnicodeDecodeError)"),
            (CONFIG, lambda path: path.write_text("[" * 10**6), "config.json cannot be read (RecursionError)"),
            *[
                (CONFIG, partial(rewrite, **{key: value}), "config.json has other bytes than were written")
                for key, value in [
                    ("step", None),
                    ("step", 2),
                    ("files", {}),
                    ("config", []),
                    ("added", None),
                    ("crc32", 7),
                ]
            ],
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, harm: Callable[[Path], object], why: str) -> None:
    path = write(tmp_path, 1)
    harm(path / name)
    expected = f"checkpoint {path} is damaged: {why}; remove it to resume from an earlier one, or use another "
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}checkpoint folder$"):
        verify(path, HERE)


def test_a_long_difference_is_cut(tmp_path: Path) -> None:
    path = write(tmp_path, 1, config={"hidden": "7" * 10**6, "text": "abc", "k" * 10**6: [[1] * 10**5] * 3})
    with pytest.raises(ValueError, match=r"^[^\n]*\(1000000 characters\)[^\n]*$") as refused:
        verify(path, HERE)
    assert len(str(refused.value)) < 1000
    with pytest.raises(ValueError, match=r"has 'k*'… \(1000000 characters\)=") as refused:
        verify(path, {**HERE, "hidden": "7" * 10**6})
    assert len(str(refused.value)) < 1000


def test_a_folder_that_not_all_ranks_see(tmp_path: Path) -> None:
    unfinished = begin(tmp_path, 7)
    (unfinished / "mine").touch()
    known = {"mine": {"bytes": 0, "crc32": 0}, "yours": {"bytes": 0, "crc32": 0}}
    with pytest.raises(OSError, match=r"unfinished lacks yours, which another rank wrote; allowed: a folder that all"):
        publish(unfinished, 7, config=HERE, keep=2, files=known, added={})
    assert latest(tmp_path) is None


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^checkpoint {tmp_path}/none does not exist$"):
        verify(tmp_path / "none", HERE)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^checkpoint {tmp_path}/file is damaged: it is not a folder; remove it"):
        verify(tmp_path / "file", HERE)


def test_a_file_in_place_of_the_folder_is_refused_and_a_folder_of_other_things_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("")
    with pytest.raises(ValueError, match=r"notes is a file; allowed: a folder of checkpoints"):
        checkpoint_in(tmp_path / "notes")
    with pytest.warns(UserWarning, match="has no checkpoint: training begins at step 0"):
        assert checkpoint_in(tmp_path) is None
