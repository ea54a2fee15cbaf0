"""What a long command prints while it runs."""

import io
import os
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from overlap1f1b.terminal.output import showing
from tests.running.fork import ROOT, Fork
from tests.running.run import SIZES, until
from tests.tiers import wide


def said(screen: Console, output: io.StringIO) -> list[str]:
    with showing(screen, "starting") as say:
        until(lambda: "starting" in output.getvalue(), 10)
        say("round 1 of 2")
        until(lambda: "round 1 of 2" in output.getvalue(), 10)
    lines = output.getvalue().splitlines()
    time.sleep(0.05)
    assert output.getvalue().splitlines() == lines  # nothing comes later
    return lines


def test_lines_come_by_themselves_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlap1f1b.terminal.output.EVERY_S", 0.01)
    lines = said(Console(file=(output := io.StringIO())), output)
    assert lines[0] == "0:00 starting"
    assert lines[-1] == "0:00 round 1 of 2"


def test_a_quiet_screen_and_a_short_command_print_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with showing(Console(file=(output := io.StringIO())), "starting"):
        pass
    monkeypatch.setattr("overlap1f1b.terminal.output.EVERY_S", 0.01)
    with showing(Console(file=output, quiet=True), "starting"):
        time.sleep(0.05)
    assert not output.getvalue()


def test_a_line_that_is_printed_at_once_puts_the_next_one_off() -> None:
    with showing(Console(file=(output := io.StringIO())), "starting") as say:
        say("step 1 of 2")
        say("step 2 of 2", now=True)
    assert output.getvalue() == "step 2 of 2\n"


def test_a_terminal_has_one_live_line_and_what_is_printed_at_once() -> None:
    screen = Console(file=(terminal := io.StringIO()), force_terminal=True, width=20)
    with showing(screen, "starting, which is longer than a line") as say:
        say("step 1", now=True)
        say("step 2 of a long text that is cut")
        time.sleep(0.2)  # the spinner turns a few times a second
    assert "starting, which i…" in terminal.getvalue()
    assert "\nstep 1\n" in re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]|\r", "\n", terminal.getvalue())
    assert "step 2 of a long …" in terminal.getvalue()


def test_results_in_a_file_do_not_go_to_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spinner is on the standard error, the standard output is a file."""
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr("sys.stdout", file)
        with showing(Console(file=io.StringIO(), force_terminal=True), "starting"):
            print("{}")
    assert (tmp_path / "out").read_text() == "{}\n"


@pytest.mark.parametrize(
    ("verb", "target", "expected"),
    [
        ("train --steps 2", "running.train:Trainer.step", ["step 0/2", "step 2/2 runs"]),
        *wide(
            ("train --steps 2", "running.train:Trainer.evaluate", ["step 2/2 runs"]),
            (
                "bench --rounds 1 --layers 1 --microbatches 2 --batch 2",
                "running.bench.measure:Bench.step",
                [
                    r"measuring nodes, row 1 of (\d+), \S+.*",
                    r"warming up for 1 round, row 1 of \1, .*",
                    r"round 1 of 1, row 2 of \1, .*",
                ],
            ),
            (
                "profile train --profile-steps 2 --profile-warmup 1 --layers 1",
                "engine:Engine.step",
                [
                    "measuring nodes, then 2 steps",
                    "0 of 2 steps profiled, 0 of 1 for warming up done",
                    "1 of 2 steps profiled",
                ],
            ),
        ),
    ],
)
def test_steps_that_last_say_what_is_done_and_left(
    text: Path, tmp_path: Path, verb: str, target: str, expected: list[str]
) -> None:
    command, dashes, options = verb.partition(" --")
    words = [*command.split(), *SIZES, *f"{dashes}{options}".split(), "--ep", "1", "--text", str(text)]
    words += ["--out", str(tmp_path / "out")] if command.startswith("profile") else []
    environ = dict(os.environ, GLOO_SOCKET_IFNAME="lo")
    status, out, err = Fork([f"overlap1f1b.{target}", *words], environ, ROOT / "tests/cli/lasting.py").wait()
    assert (status, err) == (0, "")
    figures = re.findall(r"step \d/2  loss .*", out)
    assert len(figures) == len(set(figures)) == (2 if command == "train" else 0)  # none is said a second time
    said = "\n".join(re.findall(r"^\d:\d\d (.*)$", out, re.M)) + "\n"
    assert re.search(r"\n(?:.*\n)*".join(expected) + r"\n", said), out
