"""A folder of checkpoints: a checkpoint gets its name when it is complete.

    unfinished = begin(folder, 100)  # write files there
    checkpoint = publish(unfinished, 100, keep=2)  # folder/step-00000100
    latest(folder)

A checkpoint is written under a hidden name and renamed when its bytes are on the disk, so the previous checkpoint
survives a kill at any moment. A kill leaves only hidden folders. They are ignored, and the next :func:`begin` removes
them.
"""

import os
import re
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path

INDEX = ".metadata"
"""DCP's file in a checkpoint that says where tensors lie."""
NAME = re.compile(r"(\.replaced-)?step-(\d{8,})", re.ASCII)


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def latest(directory: Path) -> Path | None:
    """Return the checkpoint of the highest step, or None; a file, or a folder that is a checkpoint, is a ValueError."""
    return next(reversed(_checkpoints(directory)), None)


def checkpoint_in(path: Path) -> Path | None:
    """Return ``path`` if it is a checkpoint, perhaps a renamed one or one that is absent; else the last one in it.

    It warns about a folder in which there is something, but no checkpoint.
    """
    is_one = NAME.fullmatch(path.name) is not None or (path / INDEX).exists()
    if is_one or (path.name.startswith("step-") and not path.is_dir()):
        return path
    if said := said_of(path):
        warnings.warn(said, stacklevel=2)
    return latest(path)


def said_of(directory: Path) -> str | None:
    """Return a line about a folder in which there is something, but no checkpoint; None for others."""
    if latest(directory) is None and any(not other.name.startswith(".") for other in directory.glob("*")):
        return f"{directory} has no checkpoint: training begins at step 0"
    return None


def begin(directory: Path, step: int) -> Path:
    """Remove unfinished checkpoints, and return an empty hidden folder for the files of a new one."""
    if directory.is_file():
        raise NotADirectoryError(f"{directory} is a file; allowed: a folder that can be written")
    latest(directory)  # it refuses a checkpoint, in which the next load would not look for others
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{directory}: {error.strerror}; allowed: a folder that can be written") from error
    _remove_leftovers(directory)
    unfinished = directory / f".{name_of(step)}.unfinished"
    unfinished.mkdir()
    return unfinished


def abandon(unfinished: Path) -> int:
    """Remove the folder of :func:`begin`; return the bytes free before: torch does not report a full disk."""
    free = shutil.disk_usage(unfinished).free
    shutil.rmtree(unfinished, ignore_errors=True)
    return free


def publish(unfinished: Path, step: int, keep: int, files: Collection[str]) -> Path:
    """Name the folder of :func:`begin`, with ``files`` in it; keep the newest ``keep`` checkpoints.

    OSError if a file is missing, or the folder cannot be renamed.
    """
    directory = unfinished.parent
    final = directory / name_of(step)
    if absent := sorted({*files} - {path.name for path in unfinished.iterdir()}):
        raise OSError(f"{unfinished} lacks {absent[0]}, which another rank wrote; allowed: a folder that all ranks see")
    for path in (*unfinished.iterdir(), unfinished):  # DCP does so before the last bytes are in a file
        _sync(path)
    if final.exists():  # a second checkpoint of the same step
        final.rename(directory / f".replaced-{final.name}")
    unfinished.rename(final)
    _sync(directory)
    _remove_leftovers(directory)
    others = [path for path in _checkpoints(directory) if path != final]
    for path in others[: max(len(others) - keep + 1, 0)]:
        _discard(path)
    return final


def _checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in ``directory``, lowest step first; for one step the replaced one comes first."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; allowed: a folder of checkpoints, which may be new")
    if (directory / INDEX).exists():
        raise ValueError(f"{directory} is a checkpoint; allowed: the folder that holds it")
    found = [(match, path) for path in directory.glob("*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda pair: (int(pair[0][2]), pair[0][1] is None))]


def _remove_leftovers(directory: Path) -> None:
    for unfinished in directory.glob(".step-*.unfinished"):
        shutil.rmtree(unfinished)
    for replaced in directory.glob(".replaced-step-*"):
        if (directory / replaced.name.removeprefix(".replaced-")).exists():
            _discard(replaced)


def _discard(checkpoint: Path) -> None:
    """Rename a checkpoint, then remove it, so that a partial checkpoint is never visible under its name."""
    name = checkpoint.name.removeprefix(".replaced-")
    shutil.rmtree(checkpoint.rename(checkpoint.parent / f".{name}.unfinished"))


def _sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
