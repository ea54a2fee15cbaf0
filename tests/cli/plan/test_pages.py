"""The documentation's drawings and tables are what the commands beside them print."""

from __future__ import annotations

import re

import pytest

from overlap1f1b.schedule import SCHEDULES
from tests.cli.plan.pages import PAGE, commands, printed

DRAWINGS = [
    pytest.param(command, text, id=command, marks=[pytest.mark.wide] if "--layers 2" in command else [])
    for command, text, _ in commands()
]


@pytest.mark.parametrize(("command", "text"), DRAWINGS)
def test_drawings_are_what_their_commands_print(command: str, text: str) -> None:
    assert printed(command) == text


def test_pictures_have_the_figures_of_their_commands() -> None:
    """After a change of plans: `python -m tests.cli.plan.pages`."""
    pictures = {picture: text.splitlines()[0] for _, text, picture in commands() if picture}
    assert sorted(pictures) == ["pictures/pairs.svg", "pictures/serial.svg", "pictures/three.svg"]
    for picture, title in pictures.items():
        assert title in (PAGE.parent / picture).read_text()


def test_sections_draw_their_schedules() -> None:
    sections = set(re.findall(r"^### `(\S+)`", PAGE.read_text(), re.MULTILINE))
    drawn = {name for command, _, _ in commands() for name in re.findall(r"--schedule (\S+)", command)}
    assert sections <= drawn
    assert sections <= set(SCHEDULES)
