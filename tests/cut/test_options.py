"""An option of the engine is one of train, of bench and of Trainer, or it is a program's."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from overlap1f1b.cli.main import parse
from overlap1f1b.cut.options import EngineOptions, UserOptions
from overlap1f1b.running.options import BenchOptions, TrainOptions

GIVEN = {
    "overlap": "2",
    "recompute": "block",
    "parts": "2",
    "capacity": "1.5",
    "memory": "1GB",
    "offload": "auto",
    "offload_threshold": "7",
    "host_link": "2.5",
    "tries": "1",
    "finite": "raise",
    "gate": "error:0.8",
    "timeout": "7.5",
}
"""Another value of each option that takes one; the others are switches, ``drift`` is switched on in all cases."""
SWITCHES = {"verify", "drift"}
OF_PROGRAMS = {"costs", "plan", "reduce", "count_tokens", "dynamic_shapes", "experts_over", "block_weights", "device"}


def words(switch: str) -> list[str]:
    return [switch, "--drift", *(word for name, value in GIVEN.items() for word in (f"--{name}", value))]


def check(options: UserOptions, *, verify: bool) -> None:
    """They reach the engine as they were given."""
    found = options.engine_options()
    assert {name: str(getattr(found, name)) for name in GIVEN} == GIVEN
    assert found.verify is verify
    assert found.drift


def test_an_option_is_a_users_or_a_programs() -> None:
    """What does not follow from the model and its loop belongs to UserOptions, so that every command line has it."""
    users = {one.name for one in fields(UserOptions)}
    assert users == {*GIVEN, *SWITCHES}
    assert {one.name for one in fields(EngineOptions)} - users == OF_PROGRAMS


@pytest.mark.parametrize(("verb", "kind", "verify"), [("train", TrainOptions, False), ("bench", BenchOptions, True)])
def test_options_of_a_command_line(verb: str, kind: type[Any], verify: bool) -> None:
    switch = f"--{'' if verify else 'no-'}verify"
    check(parse([verb, *words(switch)], {verb: kind, "other": kind}, prog="p", description=""), verify=verify)


def test_options_of_trainer() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from overlap1f1b.integrations.transformers import OverlapArguments

    parser = transformers.HfArgumentParser(OverlapArguments)
    (found,) = parser.parse_args_into_dataclasses(words("--no_verify"))
    check(found, verify=False)
    assert all(one.metadata["help"] for one in fields(OverlapArguments))
    assert OverlapArguments().options.dynamic_shapes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recompute": "auto"}, "recompute='auto' without memory; allowed: with memory and parts=1, or one of none, "),
        ({"recompute": "auto", "memory": "1GB", "parts": 2}, "recompute='auto' with parts=2; allowed: with memory"),
        ({"recompute": "all"}, "recompute='all'; allowed: none, experts, attention, block, or auto"),
        ({"finite": "never"}, "finite='never'; allowed: warn, raise, or None"),
        ({"gate": 1.5}, "gate=1.5; allowed: 0 to 1, or error:0 to error:1, such as error:0.8"),
        ({"gate": "error:-1"}, "gate='error:-1'; allowed: 0 to 1"),
        ({"gate": "never"}, "gate='never'; allowed: 0 to 1"),
        ({"gate": float("nan")}, "gate=nan; allowed: 0 to 1"),
        ({"memory": 1.5}, "memory=1.5; allowed: bytes above 0, such as 70GB or 64GiB, or auto"),
        ({"timeout": True}, "timeout=True; allowed: seconds > 0, at most 1e"),
        ({"parts": 9}, "parts=9; allowed: 1 to 8, or auto"),
        ({"parts": 0}, "parts=0; allowed: 1 to 8, or auto"),
        ({"parts": "2"}, "parts='2'; allowed: 1 to 8, or auto"),
        ({"offload": "auto"}, "offload='auto' without memory; allowed: with memory, or True, False"),
        ({"offload": "all"}, "offload='all'; allowed: False, True, or auto"),
        ({"offload": 1}, "offload=1; allowed: False, True, or auto"),
        ({"offload_threshold": -1}, "offload_threshold=-1; allowed: 0 or more"),
        ({"host_link": 0.0}, "host_link=0.0; allowed: a finite number, more than 0"),
        ({"memory": "much"}, "memory='much'; allowed: bytes above 0, such as 70GB or 64GiB, or auto"),
    ],
)
def test_values_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        EngineOptions(**given)
