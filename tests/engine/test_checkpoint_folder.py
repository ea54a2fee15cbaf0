"""A folder of checkpoints, of any files: names, what is kept, what is looked at. For kills see test_checkpoint.py."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from overlap1f1b.engine.checkpoint_folder import CONFIG, abandon, begin, latest, publish, verify

HERE = {"hidden": 5, "text": "abc"}


def write(directory: Path, step: int, content: bytes = b"content", keep: int = 2) -> Path:
    unfinished = begin(directory, step)
    (unfinished / "file").write_bytes(content)
    return publish(unfinished, step, config=HERE, keep=keep)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    for step in (8, 9, 10, 99_999_999, 100_000_000):
        assert write(tmp_path, step) == latest(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step-100000000", "step-99999999"]
    write(tmp_path, 5, keep=1)
    assert os.listdir(tmp_path) == ["step-00000005"]


def test_the_same_step_once_more(tmp_path: Path) -> None:
    write(tmp_path, 5, b"old")
    path = write(tmp_path, 5, b"new")
    assert (path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["step-00000005"]


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
    assert verify(path.rename(tmp_path / "elsewhere"), HERE) == 12


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        ({"hidden": 6, "text": "abc"}, "hidden=5, this run has hidden=6"),
        ({"hidden": 5}, "text=abc, this run has text=none"),
        ({**HERE, "layers": [1]}, "layers=none, this run has layers=[1]"),
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
        ("file", lambda path: path.write_bytes(b"c0ntent"), "file has other bytes than were written"),
        ("file", lambda path: path.write_bytes(b"conten"), "file has 6 bytes, not the 7 written"),
        ("file", Path.unlink, "file cannot be read (No such file or directory)"),
        (CONFIG, Path.unlink, "config.json cannot be read (FileNotFoundError)"),
        (CONFIG, lambda path: path.write_text("["), "config.json cannot be read (JSONDecodeError)"),
        (CONFIG, lambda path: path.write_text("[]"), "config.json cannot be read (TypeError)"),
        (CONFIG, lambda path: path.write_text("{}"), "config.json cannot be read (KeyError)"),
        (CONFIG, lambda path: path.write_bytes(b"\xff"), "config.json cannot be read (UnicodeDecodeError)"),
        (CONFIG, lambda path: rewrite(path, step=None), "config.json cannot be read (TypeError)"),
        (CONFIG, lambda path: rewrite(path, files=7), "config.json cannot be read (TypeError)"),
        (CONFIG, lambda path: rewrite(path, files={"file": 7}), "config.json cannot be read (TypeError)"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, harm: Callable[[Path], object], why: str) -> None:
    path = write(tmp_path, 1)
    harm(path / name)
    expected = f"checkpoint {path} is damaged: {why}; remove it to resume from an earlier one, or use another "
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}checkpoint folder$"):
        verify(path, HERE)


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^checkpoint {tmp_path}/none does not exist$"):
        verify(tmp_path / "none", HERE)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^checkpoint {tmp_path}/file is damaged: it is no folder; remove it"):
        verify(tmp_path / "file", HERE)
