"""Output: tables to the terminal, JSON to a file or alone to standard output, and checks of files before a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console


def by_default(metavar: str, default: object = "none") -> Any:
    """Return the help note of an option that is None unless it is given: its value and its default in ``--help``."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


def console(json_target: str | None, *, quiet: bool = False) -> Console:
    """Return the console for all text: standard error if JSON goes to standard output; silent if ``quiet``."""
    screen = Console(stderr=json_target == "-", quiet=quiet)
    return screen if screen.is_terminal else Console(stderr=json_target == "-", quiet=quiet, width=160)


def check_folder(folder: Path, option: str = "--checkpoint") -> None:
    """Raise ``ValueError`` if an option's folder cannot be written: otherwise a run's steps would be lost."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{option} {folder}: {there} is a file; allowed: a folder, which may be new")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder}: {there} cannot be written; allowed: a writable folder")


def check_json(target: str) -> None:
    """Raise ``ValueError`` if :func:`write_json` could not write: otherwise a run's results would be lost."""
    path = Path(target)
    folder = path.parent
    why = None
    if target == "-":
        return
    if not folder.is_dir():
        why = "its folder does not exist"
    elif path.is_dir():
        why = "it is a folder"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "it cannot be written"
    if why:
        raise ValueError(f"--json {target}: {why}; allowed: a file in a folder that can be written, or -")


def check_files(written: Mapping[str, Path | str | None], read: Mapping[Path, str]) -> None:
    """Raise ``ValueError`` if two options name one file, or a file cannot be made.

    Args:
        written: Files by the names of their options; ``-`` is allowed for ``json`` alone.
        read: Names of the files that are read, by their resolved paths.
    """
    taken = dict(read)
    for name, value in written.items():
        if value is None or (name == "json" and value == "-"):
            continue
        path = Path(value)
        if str(path) == "-":
            raise ValueError(f"--{name} -; allowed: a file (--json alone goes to standard output)")
        if not path.parent.is_dir():
            allowed = "a file in a folder that exists" + (", or -" if name == "json" else "")
            raise ValueError(f"--{name} {path}: its folder does not exist; allowed: {allowed}")
        if path.is_dir():
            raise ValueError(f"--{name} {path} is a folder; allowed: a file")
        if (of := taken.get(path.resolve())) is not None:
            raise ValueError(f"--{name} {path} is the file of {of}; allowed: another file for each")
        taken[path.resolve()] = f"--{name} {path}"


def write_json(target: str | None, content: dict[str, Any]) -> None:
    """Write ``content`` as JSON to a file, to standard output for ``-``, or nowhere for None.

    Raises:
        ValueError: The file cannot be written.
    """
    if target is None:
        return
    text = json.dumps(content, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise ValueError(
            f"--json {target}: {error.strerror}; allowed: a file in a folder that can be written, or -"
        ) from error
