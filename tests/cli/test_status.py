"""What a long command prints while it runs."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from overlap1f1b.cli.status import showing


def said(screen: Console, output: io.StringIO) -> list[str]:
    with showing(screen, "starting") as say:
        wait_for(output, "starting")
        say("round 1 of 2")
        wait_for(output, "round 1 of 2")
    lines = output.getvalue().splitlines()
    time.sleep(0.05)
    assert output.getvalue().splitlines() == lines  # nothing comes later
    return lines


def wait_for(output: io.StringIO, text: str) -> None:
    end = time.monotonic() + 10
    while text not in output.getvalue() and time.monotonic() < end:
        time.sleep(0.01)


def test_lines_come_by_themselves_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlap1f1b.cli.status.EVERY_S", 0.01)
    lines = said(Console(file=(output := io.StringIO())), output)
    assert lines[0] == "0:00 starting"
    assert lines[-1] == "0:00 round 1 of 2"


def test_a_quiet_screen_and_a_short_command_print_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with showing(Console(file=(output := io.StringIO())), "starting"):
        pass
    monkeypatch.setattr("overlap1f1b.cli.status.EVERY_S", 0.01)
    with showing(Console(file=output, quiet=True), "starting"):
        time.sleep(0.05)
    assert not output.getvalue()
