"""The campaign itself: it compares what it says, and a fault does not pass."""

from itertools import combinations, product
from unittest.mock import patch

import pytest
import torch

from overlap1f1b.engine import Engine, StepResult
from tests.campaign.__main__ import main
from tests.campaign.draw import KINDS, RANKS, Case, draw
from tests.campaign.play import play
from tests.engines import CALLS


def test_a_seed_is_one_case() -> None:
    drawn = [draw(seed) for seed in range(200)]
    assert drawn == [draw(seed) for seed in range(200)]
    assert len(set(map(repr, drawn))) == 200
    assert {case.kind for case in drawn} == set(KINDS)
    assert all(case.ranks in RANKS[case.kind] for case in drawn)
    assert {(case.model.masked, case.model.biased) for case in drawn if isinstance(case, Case)} == set(
        product((False, True), repeat=2)
    )
    pairs = {case.calls for seed in range(600) if isinstance(case := draw(seed), Case)}
    assert () in pairs
    assert {frozenset(pair) for pair in pairs if pair} == set(map(frozenset, combinations(CALLS, 2)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kinds", "engines"], "'engines'; allowed: engine, combined, dualpipe, pipelining"),
        (["--ranks", "two"], "'two'; allowed: numbers such as 1,2"),
        (["--kinds", "dualpipe", "--ranks", "3"], "no case of dualpipe on [3] ranks"),
    ],
)
def test_what_is_never_drawn_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.wide
@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's V schedules do not run on gloo before")
def test_a_handful_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "5", "--seed", "179", "--ranks", "1,2"]) == 0
    out = capsys.readouterr().out
    assert ": 0 failed" in out
    assert all(f" {kind}" in out for kind in KINDS), "one of each kind at least"


def faulty(rank: int, size: int, case: Case) -> list[str]:
    """On the last rank every step of the engine leaves one gradient a hundredth too large."""
    step = Engine.step

    def wrong(engine: Engine, *args: object, **kwargs: object) -> StepResult:
        result = step(engine, *args, **kwargs)  # type: ignore[arg-type]
        gradients = [p.grad for p in engine.parameters() if p.grad is not None and p.grad.any()]
        if rank == size - 1:
            gradients[-1].mul_(1.01)
        return result

    with patch.object(Engine, "step", wrong):
        return play(rank, size, case)


@pytest.mark.wide
def test_a_gradient_that_is_wrong_fails(capsys: pytest.CaptureFixture[str]) -> None:
    seed, case = 874, draw(874)  # a small one, in which a small fault shows
    assert case.double
    assert case.deterministic
    assert main(["--only", str(seed)], play=faulty) == 1
    out = capsys.readouterr().out
    assert f"--only {seed}: rank " in out
    assert "differs by" in out
    assert f"Case(seed={seed}, kind='engine', ranks=2" in out
    assert "1 cases (1 engine)" in out
    assert main(["--only", str(seed)]) == 0
