"""The script of faults finds what it looks for, and its faults are of every kind."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.running.fork import Fork
from tests.tiers import wide

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "faults.py"


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faults", SCRIPT)
    module = sys.modules["faults"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GOOD = "LostRankError: dispatch.f[1] m2 failed: StruckError: the rank broke\nrank pp 0, ep 0 failed at dispatch.f[1] m2"


@pytest.mark.parametrize(
    ("statuses", "text", "wrong"),
    [
        ([1, 1, 1, 1], GOOD, []),
        *wide(
            (
                [1, -6, 1, 1],
                GOOD + "\nterminate called without an active exception",
                ["aborted", "rank 1 ended with -6"],
            ),
            ([1, None, 1, 1], GOOD, ["hung: ranks [1]"]),
            ([1, 0, 1, 1], GOOD, ["silent: rank 1 went on"]),
            ([1, 1, 1, 1], GOOD.replace("StruckError", "Error"), ["rank 1 does not tell the cause"]),
            ([1, 1, 1, 1], GOOD.replace("pp 0, ep 0", "1"), ["rank 1 does not tell the rank"]),
            ([0, 1, 1, 1], GOOD, ["rank 0 ended with 0, not 1"]),
        ),
    ],
)
def test_what_is_wrong_is_said(
    faults: ModuleType, tmp_path: Path, statuses: list[Any], text: str, wrong: list[str]
) -> None:
    fault = faults.Fault(0, "raise", "forward 2", 0)
    found = faults.judged(faults.Outcome(fault, statuses, [text] * 4, 1.0)).wrong
    assert len(found) >= len(wrong)
    assert bool(found) == bool(wrong)
    for part in wrong:
        assert any(part in said for said in found), found


def test_there_are_over_a_hundred_faults_of_every_act_phase_and_option(faults: ModuleType) -> None:
    every = faults.every_fault()
    assert [fault.number for fault in every] == list(range(107))
    assert {(f.act, f.phase) for f in every} >= {(act, phase) for act in faults.ACTS for phase in faults.PHASES}
    assert {f.phase for f in every if f.act == "differ"} == set(faults.OTHERS)
    assert {f.culprit for f in every} == set(range(faults.RANKS))


def test_one_fault_runs() -> None:
    status, out, err = Fork(["--only", "12"], os.environ, SCRIPT).wait(200)
    assert status == 0, err
    assert "1 faults, 0 wrong" in out
