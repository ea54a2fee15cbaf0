"""The pages of the documentation whose drawings are what `overlap1f1b plan` prints.

    python -m tests.cli.plan.pages    # draws them again

A block of code that begins with `$ overlap1f1b plan …` holds the command and its output. The picture below it, if there
is one, is what the command draws with `--svg`.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from overlap1f1b.cli.main import main

DOCS = Path(__file__).parents[3] / "docs"
_BLOCK = re.compile(
    r"(?<=```text\n)\$ overlap1f1b (plan[^\n]*)\n(.*?)```\n(?:\n!\[\w+\]\(([\w./]+\.svg)\)\n)?", re.DOTALL
)


class Drawing(NamedTuple):
    """A command of a page, what stands below it, and its picture."""

    page: Path
    command: str
    text: str
    picture: Path | None


def drawings(docs: Path = DOCS) -> list[Drawing]:
    """Return the drawings of all pages below a folder."""
    return [
        Drawing(page, command, text, (page.parent / picture).resolve() if picture else None)
        for page in sorted(docs.rglob("*.md"))
        for command, text, picture in _BLOCK.findall(page.read_text())
    ]


def printed(command: str) -> str:
    """Return what a command prints, without the blanks at the ends of lines."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(shlex.split(command)) == 0
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def redraw(docs: Path = DOCS) -> None:
    """Write the pages and their pictures again."""
    for page, command, text, picture in drawings(docs):
        drawn = printed(command)
        if picture:  # the command then says what it has written, too
            printed(f"{command} --svg {shlex.quote(str(picture))}")
        page.write_text(page.read_text().replace(f"{command}\n{text}```", f"{command}\n{drawn}```"))


if __name__ == "__main__":
    redraw()
