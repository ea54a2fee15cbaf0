"""A refused argument is named in one line; `--help` stays tyro's."""

import re
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import version

import pytest

from overlap1f1b.cli.main import main, parse
from tests.cli.inside import Verb

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("plan --ranks x", ["error: --ranks 'x'; allowed: a whole number; see overlap1f1b plan --help"]),
        ("plan --compare 1f1b zb_h1 --extra_warmup a", ["--extra-warmup", "'a'"]),
        ("plan --schedule 1f1b --forward fast", ["--forward", "a number", "'fast'"]),
        ("plan --ranks", ["error: --ranks without a value; allowed: 1 after it; see "]),
        ("plan --csv --tables", ["error: --csv without a value; allowed: 1 after it; see "]),
        ("report --compare a", ["error: --compare 'a'; allowed: PATH PATH; see "]),
        ("plan --microbatch=3", ["unknown option: --microbatch=3", "--microbatches"]),
        ("plan -x", ["unknown option: -x"]),
        ("plan --no-search", ["unknown option: --no-search", "--search"]),
        ("plan --search 3", ["unexpected: 3"]),
        ("train --lr high", ["error: --lr 'high'; allowed: a number; see overlap1f1b train --help"]),
        ("bench --compute top", ["error: --compute 'top'; allowed: 'real', 'timed'; see "]),
        ("train --text a b --stepz 3", ["unknown option: --stepz 3; perhaps --steps"]),
        ("bench --parts x", ["error: --parts 'x'; allowed: a whole number, or auto; see "]),
        ("bench --overlap x", ["error: --overlap 'x'; allowed: a whole number, or serial,pairs; see "]),
        ("profile train --steps 4", ["unknown option: --steps 4; perhaps --profile-steps"]),
        ("profile bench --rounds 4", ["unknown option: --rounds"]),
        ("train --group-size 3", ["error: unknown option: --group-size 3; see "]),
        ("plan --ep 2", ["error: unknown option: --ep 2; see overlap1f1b plan --help"]),
        ("plan --hiden 2", ["error: unknown option: --hiden 2; see "]),
        ("plann", ["unknown verb 'plann'; allowed: train, bench, plan, "]),
        ("--ranks 2 plan", ["unknown verb '--ranks'; allowed: train, bench, plan, "]),
    ],
)
def test_one_line_names_the_option_and_its_value(capsys: Capture, words: str, parts: list[str]) -> None:
    assert main(shlex.split(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("overlap1f1b: error: ")
    assert not [part for part in parts if part not in err], err
    assert err.count("\n") == 1
    assert err.endswith("--help\n")
    assert not set(err) & set("╭│─")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --schedule zb_v --ranks 2 --microbatches 4 --extra-warmup 2", "--extra-warmup 2 with zb_v; allowed: 0"),
        ("train --heads 3 --ep 1", "--hidden 256 with --heads 3; allowed: multiples of 6"),
        ("train --heads 0", "--heads 0; allowed: 1 or more"),
        ("bench --hidden -4", "--hidden -4; allowed: 1 or more"),
        ("profile train --top-k 9", "--top-k 9 with --experts 8; allowed: 1 to 8"),
        ("profile bench --intermediate 0", "--intermediate 0; allowed: 1 or more"),
        ("train --dropout 1", "--dropout 1.0; allowed: 0 to less than 1"),
        ("train --clip inf", "--clip inf; allowed: more than 0, finite"),
        ("train --pp 9 --layers 4", "--pp 9 makes 9 stages of 6 blocks: embedding, --layers 4, head; "),
        ("train --capacity 0.5", "--capacity 0.5; allowed: 1 or more"),
        ("train --timeout 0.001", "--timeout 0.001; allowed: 1 or more"),
        ("train --ranks 2 --ep=4", "--ranks with --ep, the same option; allowed: one of them"),
        ("train --compare --no-compare", "--compare with --no-compare, the same option; allowed: one of them"),
        ("bench --no_verify --verify", "--no-verify with --verify, the same option; allowed: one of them"),
        ("train --text a --text b", "--text twice; allowed: once, with all its values behind it"),
        ("train --checkpoint ''", "--checkpoint with an empty value; allowed: one that says something"),
        ("bench --ep=", "--ep with an empty value; allowed: one that says something"),
        ("train --gate error:", "--gate error:; allowed: 0 to 1, or error:0 to error:1"),
        ("train --text --steps 3", "--text without a value; allowed: one or more after it"),
        ("plan --compare", "--compare without a value; allowed: one or more after it"),
        ("plan --tables --width 50", "--width 50 with --tables, which draws nothing; allowed: one of them"),
        ("train --finite no", "--finite 'no'; allowed: 'warn', 'raise'; see overlap1f1b train --help"),
        ("train --memory 5X", "--memory 5X; allowed: bytes above 0, such as 70GB or 64GiB, or auto\n"),
        ("train --schedule dualpipe", "dualpipe over 1 rank; allowed: an even number, nearest 2"),
        ("bench --wire balanced --ranks 1", "--wire balanced with 1 rank; allowed: 2 or more"),
        ("train --checkpoint-every 5", "--checkpoint-every 5 alone; allowed: with --checkpoint FOLDER"),
        ("train --ep 1 --compare", "--compare with the schedule sequential, the one beside; allowed: another "),
        ("train --recompute auto", "--recompute auto without --memory; allowed: with --memory and --parts 1, or one "),
        ("bench --recompute auto --memory 1GB --parts 2", "--recompute auto with --parts 2; allowed: with --memory "),
        ("train --ep 1 --layers 1 --memory 5", "--memory 5 for 28.4MB of parameters and gradients on this rank, "),
        ("train --ep 1 --hidden 1000000000000", "can't allocate memory: you tried to allocate "),
    ],
)
def test_errors_of_the_library_name_the_option(capsys: Capture, words: str, message: str) -> None:
    assert main(shlex.split(words)) == 2
    assert capsys.readouterr().err.startswith(f"overlap1f1b: error: {message}")


def test_the_version_is_that_of_the_package(capsys: Capture) -> None:
    assert Verb("--version")(capsys) == (0, f"overlap1f1b {version('overlap1f1b')}\n", "")


def test_a_shell_can_complete_verbs_and_options(capsys: Capture) -> None:
    status, script, _ = Verb("--tyro-print-completion")(capsys, "bash")
    assert status == 0
    assert "complete -F" in script
    assert all(word in script for word in ("doctor", "--microbatches", "--width", "--compare"))


VERBS = ("train", "bench", "plan", "report", "doctor", "profile train", "profile bench", "train --ranks x")


@pytest.mark.parametrize("words", ["", "-h", "--help", *(f"{verb} --help" for verb in VERBS)])
def test_help_stays_and_names_what_an_option_takes_and_what_holds_without_it(capsys: Capture, words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    out, err = capsys.readouterr()
    assert not ended.value.code
    assert out.startswith("usage: overlap1f1b")
    assert "--help" in out
    assert not re.findall("error: |None|default: \\)", out)
    assert err == ""


def test_the_line_says_where_the_options_are() -> None:
    @dataclass
    class Options:
        sides: tuple[int, int] = (1, 2)

    verbs = {"draw": Options, "paint": Options}
    assert parse(["draw", "--sides", "3", "4"], verbs, prog="p", description="") == Options((3, 4))
    with pytest.raises(ValueError, match=r"^[^\n╭│─]*--sides[^\n╭│─]*; see p draw --help$"):
        parse(["draw", "--sides", "3"], verbs, prog="p", description="")


def test_a_text_of_tyro_without_a_box_is_said_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Options:
        side: int = 1

    def ends(*_: object, **__: object) -> None:
        sys.stderr.write("something else")
        raise SystemExit(2)

    monkeypatch.setattr("tyro.cli", ends)
    with pytest.raises(ValueError, match=r"^something else; see p draw --help$"):
        parse(["draw"], {"draw": Options}, prog="p", description="")
