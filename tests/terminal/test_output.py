"""Where results may go is known before there are any."""

import json
import os
import re
from pathlib import Path

import pytest

from overlap1f1b.terminal.output import check_files, check_folder, console, write_json


def test_json_to_a_file_and_alone_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"loss": [1.5, None], "text": "▸"}
    for target in (str(tmp_path / "new"), "-"):
        check_files({"json": target})
        console(target).print("a table")
        write_json(target, content)
    assert json.loads((tmp_path / "new").read_text()) == content
    out, err = capsys.readouterr()
    assert (out.split("\n", 1)[0], err) == ("a table", "a table\n")
    assert json.loads(out.split("\n", 1)[1]) == content
    write_json(None, content)
    assert capsys.readouterr() == ("", "")


def locked(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As a folder without permission is, also for root."""
    access, mkdir = os.access, os.mkdir

    def made(at: str, mode: int = 0o777) -> None:
        if Path(at).parent == path:
            raise PermissionError(at)
        mkdir(at, mode)

    monkeypatch.setattr("os.access", lambda at, mode: Path(at) != path and access(at, mode))
    monkeypatch.setattr("os.mkdir", made)
    return path


def test_json_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "file").touch()
    for target, why in {
        tmp_path / "none" / "file": "its folder does not exist",
        tmp_path / "file" / "file": "its folder does not exist",
        tmp_path: "it is a folder",
        locked(tmp_path / "locked", monkeypatch) / "file": "it cannot be written",
    }.items():
        expected = f"--json {target}: {why}; allowed: a file in a folder that can be written, or -"
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            check_files({"json": target})


def test_a_checkpoint_folder_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "file").touch()
    check_folder(tmp_path)
    check_folder(tmp_path / "new" / "newer")
    assert sorted(os.listdir(tmp_path)) == ["file", "locked"]
    for name in ("file", "file/run"):
        expected = f"--checkpoint {tmp_path}/{name}: {tmp_path}/file is a file; allowed: a folder, which may be new"
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            check_folder(tmp_path / name)
    folder = locked(tmp_path / "locked", monkeypatch)
    for path in (folder, folder / "run" / "a"):
        with pytest.raises(ValueError, match=f"^--checkpoint {path}: {folder} cannot be written; allowed: a writable"):
            check_folder(path)


def test_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_folder(Path("runs/new"))
