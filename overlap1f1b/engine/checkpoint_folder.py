"""A folder of checkpoints: each under its name only when it is whole, the newest kept, and looked through before use.

    unfinished = begin(folder, 100)             # write files there
    checkpoint = publish(unfinished, 100, config={"hidden": 128}, keep=2)
    step = verify(latest(folder), config={"hidden": 128})

A checkpoint is a folder `step-00000100` with a `config.json` that holds the step, the configuration, and the size and
CRC-32 of every other file. It is written under a hidden name and renamed when the bytes are on the disk, so a kill at
any moment leaves the previous one; what a kill leaves behind is hidden, is ignored, and is removed by the next `begin`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = "config.json"
NAME = re.compile(r"(\.replaced-)?step-(\d{8,})")


def name_of(step: int) -> str:
    """Of the checkpoint of this step."""
    return f"step-{step:08d}"


def latest(directory: Path) -> Path | None:
    """The checkpoint of the highest step in `directory`, or None where there is none."""
    found = _checkpoints(directory)
    return found[-1] if found else None


def begin(directory: Path, step: int) -> Path:
    """An empty hidden folder for the files of a checkpoint. Removes what unfinished ones left."""
    unfinished = directory / f".{name_of(step)}.unfinished"
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(".step-*.unfinished"):
        shutil.rmtree(leftover)
    for replaced in directory.glob(".replaced-step-*"):
        if (directory / replaced.name.removeprefix(".replaced-")).exists():
            _discard(replaced)
    unfinished.mkdir()
    return unfinished


def abandon(unfinished: Path) -> int:
    """Remove what :func:`begin` made. Returns the bytes that were free with it, for torch does not name a full disk."""
    free = shutil.disk_usage(unfinished).free
    shutil.rmtree(unfinished, ignore_errors=True)
    return free


def publish(unfinished: Path, step: int, *, config: Mapping[str, Any], keep: int) -> Path:
    """Give what :func:`begin` made, now full, its name, and remove all but the newest `keep` checkpoints."""
    directory = unfinished.parent
    final = directory / name_of(step)
    files = {path.name: _fingerprint(path) for path in sorted(unfinished.iterdir())}
    with (unfinished / CONFIG).open("w") as file:
        json.dump({"step": step, "config": dict(config), "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(unfinished)
    replaced = directory / f".replaced-{final.name}"
    if final.exists():  # the same step once more
        final.rename(replaced)
    unfinished.rename(final)
    _sync(directory)
    if replaced.exists():
        _discard(replaced)
    others = [path for path in _checkpoints(directory) if path != final]
    for path in others[: max(len(others) - keep + 1, 0)]:
        _discard(path)
    return final


def verify(checkpoint: Path, config: Mapping[str, Any]) -> int:
    """The step of a checkpoint that is whole and of this `config`.

    Raises ValueError: it is not (the first difference, with both values), or a file of it is missing or damaged.
    """
    if not checkpoint.exists():
        raise ValueError(f"checkpoint {checkpoint} does not exist")
    if not checkpoint.is_dir():
        raise damaged(checkpoint, "it is no folder")
    try:
        written = json.loads((checkpoint / CONFIG).read_text())
        step, there = int(written["step"]), dict(written["config"])
        files = {name: {"bytes": of["bytes"], "crc32": of["crc32"]} for name, of in dict(written["files"]).items()}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise damaged(checkpoint, f"{CONFIG} cannot be read ({type(error).__name__})") from None
    here = json.loads(json.dumps(dict(config)))
    for key in here | there:
        if key not in here or key not in there or here[key] != there[key]:
            raise other(checkpoint, key, *(str(one[key]) if key in one else "none" for one in (there, here)))
    for name, expected in files.items():
        try:
            actual = _fingerprint(checkpoint / name)
        except OSError as error:
            raise damaged(checkpoint, f"{name} cannot be read ({error.strerror})") from None
        if actual != expected:
            what = "has other bytes than were"
            if actual["bytes"] != expected["bytes"]:
                what = f"has {actual['bytes']} bytes, not the {expected['bytes']}"
            raise damaged(checkpoint, f"{name} {what} written")
    return step


def other(checkpoint: Path, key: str, there: str, here: str) -> ValueError:
    """What to raise where a checkpoint is of another run."""
    return ValueError(
        f"checkpoint {checkpoint} has {key}={there}, this run has {key}={here}; "
        "use the same settings or another checkpoint folder"
    )


def damaged(checkpoint: Path, why: str) -> ValueError:
    """What to raise where a checkpoint cannot be read."""
    return ValueError(
        f"checkpoint {checkpoint} is damaged: {why}; remove it to resume from an earlier one, "
        "or use another checkpoint folder"
    )


def _checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in `directory`, lowest step first. One that is being replaced comes before its replacement."""
    found = [(match, path) for path in directory.glob("*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda pair: (int(pair[0][2]), pair[0][1] is None))]


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint, at no moment leaving half of one under its name."""
    name = checkpoint.name.removeprefix(".replaced-")
    shutil.rmtree(checkpoint.rename(checkpoint.parent / f".{name}.unfinished"))


def _fingerprint(path: Path) -> dict[str, int]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return {"bytes": size, "crc32": crc}


def _sync(folder: Path) -> None:
    """Bring the names in `folder` to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
