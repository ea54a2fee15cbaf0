"""Where results go: tables to the terminal, JSON to a file or alone to standard output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console


def console(json_target: str | None, *, quiet: bool = False) -> Console:
    """The console for everything but JSON: standard error where JSON takes standard output; silent if ``quiet``."""
    screen = Console(stderr=json_target == "-", quiet=quiet)
    return screen if screen.is_terminal else Console(stderr=json_target == "-", quiet=quiet, width=160)


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
        raise ValueError(f"--json {target}: {error.strerror}; allowed: a file in a folder that exists, or -") from error
