"""A folder of checkpoints: a checkpoint gets its name when it is complete, and its files are checked before use.

    unfinished = begin(folder, 100)             # write files there
    checkpoint = publish(unfinished, 100, config={"hidden": 128}, keep=2, files={}, added={})
    contents = read_contents(latest(folder), config={"hidden": 128})
    check_files(checkpoint, contents.files, contents.files)

A checkpoint is a folder ``step-00000100`` with a ``config.json`` that holds the step, the configuration, data of the
writer, the size and CRC-32 of every other file, and the CRC-32 of all this. It is written under a hidden name and
renamed when its bytes are on the disk, so the previous checkpoint survives a kill at any moment. A kill leaves only
hidden folders. They are ignored, and the next :func:`begin` removes them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from overlap1f1b.schedule.values import quoted

CONFIG = "config.json"
NAME = re.compile(r"(\.replaced-)?step-(\d{8,})", re.ASCII)

Fingerprint = dict[str, int]


class Contents(NamedTuple):
    """Content of a ``config.json``."""

    step: int
    files: dict[str, Fingerprint]  # size and CRC-32 of every other file, by file name
    added: dict[str, Any]  # data of the writer


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def latest(directory: Path) -> Path | None:
    """Return the checkpoint of the highest step in ``directory``, or None if there is none."""
    return next(reversed(_checkpoints(directory)), None)


def checkpoint_in(path: Path) -> Path | None:
    """Return ``path`` if it is a checkpoint, perhaps a renamed one or one that is absent; else the last one in it.

    It warns about a folder in which there is something, but no checkpoint.
    """
    named = path.name.startswith(("step-", ".replaced-step-"))
    folder_of_others = path.is_dir() and NAME.fullmatch(path.name) is None and not (path / CONFIG).exists()
    if named and not folder_of_others:
        return path
    found = latest(path)
    if found is None and any(not other.name.startswith(".") for other in path.glob("*")):
        warnings.warn(f"{path} has no checkpoint: training begins at step 0", stacklevel=2)
    return found


def begin(directory: Path, step: int) -> Path:
    """Remove unfinished checkpoints, and return an empty hidden folder for the files of a new one."""
    unfinished = directory / f".{name_of(step)}.unfinished"
    if directory.is_file():
        raise NotADirectoryError(f"{directory} is a file; allowed: a folder that can be written")
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(".step-*.unfinished"):
        shutil.rmtree(leftover)
    for replaced in directory.glob(".replaced-step-*"):
        if (directory / replaced.name.removeprefix(".replaced-")).exists():
            _discard(replaced)
    unfinished.mkdir()
    return unfinished


def abandon(unfinished: Path) -> int:
    """Remove the folder of :func:`begin`; return the bytes free before: torch does not report a full disk."""
    free = shutil.disk_usage(unfinished).free
    shutil.rmtree(unfinished, ignore_errors=True)
    return free


def publish(
    unfinished: Path,
    step: int,
    *,
    config: Mapping[str, Any],
    keep: int,
    files: Mapping[str, Fingerprint],
    added: Mapping[str, Any],
) -> Path:
    """Give the filled folder of :func:`begin` its name, and remove all but the newest ``keep`` checkpoints.

    ``config`` has JSON values that a run must share to resume from this checkpoint, ``added`` others; ``files`` are
    known fingerprints, by file name, and all other files are read here.
    """
    directory = unfinished.parent
    final = directory / name_of(step)
    there = {path.name for path in unfinished.iterdir()}
    if absent := sorted(files.keys() - there):
        raise OSError(f"{unfinished} lacks {absent[0]}, which another rank wrote; allowed: a folder that all ranks see")
    every = dict(files) | fingerprints(unfinished, sorted(there - files.keys()))
    content = json.loads(json.dumps({"step": step, "config": dict(config), "files": every, "added": dict(added)}))
    write_durably(unfinished / CONFIG, json.dumps({"crc32": _crc(content), **content}, indent=1).encode())
    _sync(unfinished)
    replaced = directory / f".replaced-{final.name}"
    if final.exists():  # a second checkpoint of the same step
        final.rename(replaced)
    unfinished.rename(final)
    _sync(directory)
    if replaced.exists():
        _discard(replaced)
    others = [path for path in _checkpoints(directory) if path != final]
    for path in others[: max(len(others) - keep + 1, 0)]:
        _discard(path)
    return final


def read_contents(checkpoint: Path, config: Mapping[str, Any] | None = None) -> Contents:
    """Return the content of a checkpoint's ``config.json``; without ``config`` of a checkpoint with any.

    Raises:
        ValueError: The checkpoint is missing, has another ``config`` (the message has the first difference with both
            values), or its ``config.json`` is damaged.
    """
    if not checkpoint.exists():
        raise ValueError(f"checkpoint {checkpoint} does not exist")
    if not checkpoint.is_dir():
        raise damaged(checkpoint, "it is not a folder")
    try:
        content = json.loads((checkpoint / CONFIG).read_text())
        crc = content.pop("crc32")
        contents = Contents(content["step"], content["files"], content["added"])
        there = content["config"]
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise damaged(checkpoint, f"{CONFIG} cannot be read ({type(error).__name__})") from None
    if crc != _crc(content):
        raise damaged(checkpoint, f"{CONFIG} has other bytes than were written")
    here = there if config is None else json.loads(json.dumps(dict(config)))
    if (key := first_difference(here, there)) is not None:
        values = (quoted(one[key], plain=True) if key in one else "none" for one in (there, here))
        raise of_another_run(checkpoint, quoted(key, plain=True), *values)
    return contents


def check_files(checkpoint: Path, files: Mapping[str, Fingerprint], names: Iterable[str]) -> None:
    """Compare the files ``names`` with their fingerprints in ``files``; a missing or damaged one is a ValueError."""
    for name in names:
        try:
            found, written = _fingerprint(checkpoint / name), files[name]
        except OSError as error:
            raise damaged(checkpoint, f"{name} cannot be read ({error.strerror})") from None
        if found != written:
            sizes = f"{found['bytes']} bytes of {written['bytes']}"
            raise damaged(checkpoint, f"{name} has other bytes than were written ({sizes})")


def write_durably(path: Path, content: bytes) -> None:
    """Write a file, and wait until its bytes are on the disk."""
    path.write_bytes(content)
    _sync(path)


def fingerprints(folder: Path, names: Collection[str]) -> dict[str, Fingerprint]:
    """Return size and CRC-32 of files in ``folder``, by file name."""
    return {name: _fingerprint(folder / name) for name in names}


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first key that only one of two mappings has, or with another value."""
    return next((k for k in {**one, **other} if k not in one or k not in other or one[k] != other[k]), None)


def of_another_run(checkpoint: Path, key: str, there: str, here: str) -> ValueError:
    """Return the error for a checkpoint whose ``key`` differs from this run's."""
    return ValueError(
        f"checkpoint {checkpoint} has {key}={there}, this run has {key}={here}; "
        "use the same settings or another checkpoint folder"
    )


def damaged(checkpoint: Path, why: str) -> ValueError:
    """Return the error for a checkpoint that cannot be read."""
    return ValueError(
        f"checkpoint {checkpoint} is damaged: {why}; remove it to resume from an earlier one, "
        "or use another checkpoint folder"
    )


def _checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in ``directory``, lowest step first; for one step the replaced one comes first."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; allowed: a folder of checkpoints, which may be new")
    found = [(match, path) for path in directory.glob("*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda pair: (int(pair[0][2]), pair[0][1] is None))]


def _discard(checkpoint: Path) -> None:
    """Rename a checkpoint, then remove it, so that a partial checkpoint is never visible under its name."""
    name = checkpoint.name.removeprefix(".replaced-")
    shutil.rmtree(checkpoint.rename(checkpoint.parent / f".{name}.unfinished"))


def _crc(content: object) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _fingerprint(path: Path) -> Fingerprint:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            crc = zlib.crc32(block, crc)
        return {"bytes": file.tell(), "crc32": crc}


def _sync(path: Path) -> None:
    """Flush the bytes of a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
