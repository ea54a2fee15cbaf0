"""Pages of the documentation whose pictures are what `overlap1f1b plan` prints.

    python -m tests.cli.plan.pages    # draws them again

A block of code that begins with `$ overlap1f1b plan …` holds the command and its output.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from overlap1f1b.cli.main import main

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", "docs/schedules.md")
_BLOCK = re.compile(r"(?<=```text\n)\$ overlap1f1b (plan[^\n]*)\n(.*?)(?=```)", re.DOTALL)


def commands(page: str) -> list[tuple[str, str]]:
    """The commands of a page and what stands below them."""
    return _BLOCK.findall((ROOT / page).read_text())


def printed(command: str) -> str:
    """What a command prints, without the blanks at the ends of lines."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(shlex.split(command)) == 0
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def redraw(page: str) -> None:
    """Writes the page with all its pictures drawn again."""
    file = ROOT / page
    file.write_text(_BLOCK.sub(lambda found: f"$ overlap1f1b {found[1]}\n{printed(found[1])}", file.read_text()))


if __name__ == "__main__":
    for page in PAGES:
        redraw(page)
