"""What arguments cannot be is said in one line; `--help` stays tyro's."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import pytest

from overlap1f1b.cli.arguments import parse
from overlap1f1b.cli.main import main

Capture = pytest.CaptureFixture[str]
WHOLE, NUMBER = "allowed: a whole number", "allowed: a number"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --ranks x", f"--ranks x; {WHOLE}"),
        ("plan --ranks 2.5", f"--ranks 2.5; {WHOLE}"),
        ("plan --ranks=2.5", f"--ranks 2.5; {WHOLE}"),
        ("plan --ranks ''", f"--ranks ''; {WHOLE}"),
        ("plan --ranks -5x", f"--ranks -5x; {WHOLE}"),
        ("plan --compare 1f1b zb_h1 --extra_warmup a", f"--extra_warmup a; {WHOLE}"),
        ("plan --schedule 1f1b --forward fast", f"--forward fast; {NUMBER}"),
        (f"plan --ranks {'9x' * 60}", f"--ranks {'9x' * 60}; {WHOLE}"),
        ("plan --ranks", f"--ranks without a value; {WHOLE} after it"),
        ("plan --csv --tables", "--csv without a value; allowed: a file or folder after it"),
        ("plan --schedule", "--schedule without a value; allowed: a text after it"),
        (
            "plan --foo 3",
            "--foo is no option of overlap1f1b plan; allowed: those of overlap1f1b plan --help, nearest --top",
        ),
        ("plan --microbatch=3", "--microbatch is no option of overlap1f1b plan; allowed: those of overlap1f1b plan"),
        ("plan -x", "-x is no option of overlap1f1b plan; allowed: those of overlap1f1b plan --help"),
        ("plan --no-search", "--no-search is no option of overlap1f1b plan"),
        ("plan 1f1b", "'1f1b' after overlap1f1b plan; allowed: options, which begin with --"),
        ("plan --search 3", "'3' after --search; allowed: options, which begin with --"),
        ("plan --ranks 2 3", "'3' after --ranks; allowed: options, which begin with --"),
        ("train --ranks x", f"--ranks x; {WHOLE}"),
        ("train --ep 1.0", f"--ep 1.0; {WHOLE}"),
        ("train --lr high", f"--lr high; {NUMBER}"),
        ("train --layers many", f"--layers many; {WHOLE}"),
        ("train --router top", "--router top; allowed: softmax, sigmoid"),
        ("train --weights-in input", "--weights-in input; allowed: combine, activation"),
        ("train --no-compare 3", "'3' after --no-compare; allowed: options, which begin with --"),
        (
            "train --text a b --stepz 3",
            "--stepz is no option of overlap1f1b train; allowed: those of overlap1f1b train",
        ),
        ("train --chunks x", f"--chunks x; {WHOLE}"),
        ("bench --compute slow", "--compute slow; allowed: real, timed"),
        ("bench --rounds 1e3", f"--rounds 1e3; {WHOLE}"),
        ("plann", "unknown verb 'plann'; allowed: train, bench, plan, "),
        ("--ranks 2 plan", "unknown verb '--ranks'; allowed: train, bench, plan, "),
        ("--version", "unknown verb '--version'; allowed: train, bench, plan, "),
    ],
)
def test_one_line_names_the_value_and_what_is_allowed(capsys: Capture, words: str, message: str) -> None:
    assert main(shlex.split(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"overlap1f1b: error: {message}")
    assert err.count("\n") == 1
    assert err.endswith("\n")


@pytest.mark.parametrize("words", ["--help", "-h", "", "plan --help", "train --ranks x --help", "bench --help"])
def test_help_stays(capsys: Capture, words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    out, err = capsys.readouterr()
    assert not ended.value.code
    assert out.startswith("usage: overlap1f1b")
    assert "--help" in out
    assert "error" not in out
    assert err == ""


def test_what_only_tyro_finds_is_said_in_one_line_too() -> None:
    @dataclass
    class Options:
        sides: tuple[int, int] = (1, 2)

    verbs = {"draw": Options, "paint": Options}
    assert parse(["draw", "--sides", "3", "4"], verbs, prog="p", description="") == Options((3, 4))
    with pytest.raises(ValueError, match=r"^[^\n╭│─]*--sides[^\n╭│─]*; allowed: see p draw --help$"):
        parse(["draw", "--sides", "3"], verbs, prog="p", description="")
