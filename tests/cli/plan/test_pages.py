"""The documentation's pictures and tables are what the commands beside them print."""

from __future__ import annotations

import re

import pytest

from overlap1f1b.schedule import SCHEDULES
from tests.cli.plan.pages import PAGES, ROOT, commands, printed

PICTURES = [
    pytest.param(command, text, id=f"{page}: {command}", marks=[pytest.mark.slow] if "--layers" in command else [])
    for page in PAGES
    for command, text in commands(page)
]


@pytest.mark.parametrize(("command", "text"), PICTURES)
def test_pictures_are_what_their_commands_print(command: str, text: str) -> None:
    assert printed(command) == text


def test_every_schedule_has_a_picture() -> None:
    drawn = {name for command, _ in commands("docs/schedules.md") for name in re.findall(r"--schedule (\S+)", command)}
    assert drawn >= set(SCHEDULES)
    assert commands("README.md")


def test_every_schedule_has_a_section() -> None:
    sections = re.findall(r"^### `(\S+)`", (ROOT / "docs/schedules.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(SCHEDULES)
