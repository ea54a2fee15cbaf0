"""The page of the documentation whose drawings are what `overlap1f1b plan` prints.

    python -m tests.cli.plan.pages    # draws them again

A block of code that begins with `$ overlap1f1b plan …` holds the command and its output. The picture below it, if there
is one, is what the command draws with `--svg`.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from overlap1f1b.cli.main import main

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/schedules.md"
_BLOCK = re.compile(
    r"(?<=```text\n)\$ overlap1f1b (plan[^\n]*)\n(.*?)```\n(?:\n!\[\w+\]\((pictures/\w+\.svg)\)\n)?", re.DOTALL
)


def commands() -> list[tuple[str, str, str]]:
    """Return the commands of the page, what stands below each, and the name of its picture, or ""."""
    return _BLOCK.findall(PAGE.read_text())


def printed(command: str) -> str:
    """Return what a command prints, without the blanks at the ends of lines."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(shlex.split(command)) == 0
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def redraw() -> None:
    """Write the page and its pictures again."""
    text = PAGE.read_text()
    for command, below, picture in commands():
        svg = f" --svg {PAGE.parent / picture}" if picture else ""
        text = text.replace(f"{command}\n{below}```", f"{command}\n{printed(command + svg)}```")
    PAGE.write_text(text)


if __name__ == "__main__":
    redraw()
