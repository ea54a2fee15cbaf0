"""The documentation's drawings and tables are what the commands beside them print."""

import re
from pathlib import Path

import pytest

from overlap1f1b.schedule import SCHEDULES
from tests.cli.plan.pages import DOCS, drawings, printed, redraw
from tests.plan.tries import all_tries

DRAWINGS = drawings()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        pytest.param(command, text, id=command, marks=[pytest.mark.wide] if "--layers 2" in command else [])
        for _, command, text, _ in DRAWINGS
    ],
)
def test_drawings_are_what_their_commands_print(command: str, text: str) -> None:
    with all_tries():
        assert printed(command) == text


def test_pictures_have_the_figures_of_their_commands() -> None:
    """After a change of plans: `python -m tests.cli.plan.pages`."""
    pictures = {picture: text.splitlines()[0] for _, _, text, picture in DRAWINGS if picture}
    assert sorted(picture.name for picture in pictures) == ["pairs.svg", "serial.svg", "three.svg"]
    for picture, title in pictures.items():
        assert title in picture.read_text()


def test_pages_are_drawn_again(tmp_path: Path) -> None:
    command = "plan --schedule 1f1b --ranks 2 --microbatches 2 --width 80"
    page = tmp_path / "a folder" / "page.md"
    page.parent.mkdir()
    page.write_text(f"Text.\n\n```text\n$ overlap1f1b {command}\nstale\n```\n\n![drawn](drawn.svg)\n")
    redraw(tmp_path)
    ((_, _, text, picture),) = drawings(tmp_path)
    assert text == printed(command)
    assert text.splitlines()[0] in picture.read_text()


def test_every_schedule_has_a_section_with_its_drawing() -> None:
    pages = [DOCS / "schedules" / name for name in ("plain.md", "pairs.md")]
    sections = {name for page in pages for name in re.findall(r"^## `(\S+)`", page.read_text(), re.MULTILINE)}
    drawn = {
        name for page, command, *_ in DRAWINGS if page in pages for name in re.findall(r"--schedule (\S+)", command)
    }
    assert sections == drawn == set(SCHEDULES)
