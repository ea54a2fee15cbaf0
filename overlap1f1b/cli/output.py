"""Where results go: tables to the terminal, JSON to a file or alone to standard output."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console


def console(json_target: str | None, *, quiet: bool = False) -> Console:
    """The console for everything but JSON: standard error where JSON takes standard output; silent if ``quiet``."""
    screen = Console(stderr=json_target == "-", quiet=quiet)
    return screen if screen.is_terminal else Console(stderr=json_target == "-", quiet=quiet, width=160)


def check_folder(folder: Path, option: str = "--checkpoint") -> None:
    """Raises ``ValueError`` where an option's files could not be written, before steps that would be lost."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{option} {folder}: {there} is a file; allowed: a folder, which may be new")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder}: {there} cannot be written; allowed: a folder that can")


def check_json(target: str) -> None:
    """Raises ``ValueError`` where :func:`write_json` would, before a run whose results would be lost."""
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


def write_json(target: str | None, content: dict[str, Any]) -> None:
    """Writes ``content`` to a file, to standard output for ``-``, nowhere for None.

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
