"""What TensorBoard is given can be read back."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="reads TensorBoard's files")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from overlap1f1b.learn.purpose import Purpose
from overlap1f1b.running.train import StepFigures, board
from tests.cli.inside import Verb


def scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Pairs of (step, value) by name."""
    found = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def step(loss: float, hidden: float | None) -> StepFigures:
    return StepFigures(
        loss=loss, grad_norm=0.5, seconds=0.25, exposed=0.125, waited=0.0, hidden=hidden, purpose=Purpose.SETTLED
    )


def test_every_figure_and_a_resumed_run_replaces_what_came_after(tmp_path: Path) -> None:
    with board(tmp_path, tokens=100, start=0) as write:
        write(1, step(3.0, None), None)
        write(2, step(2.5, 0.75), 2.75)
        write(3, step(9.0, 0.75), None)
    with board(tmp_path, tokens=100, start=2) as write:
        write(3, step(2.0, 0.25), None)
    assert scalars(tmp_path) == {
        "loss": [(1, 3.0), (2, 2.5), (3, 2.0)],
        "grad_norm": [(1, 0.5), (2, 0.5), (3, 0.5)],
        "tokens_per_s": [(1, 400.0), (2, 400.0), (3, 400.0)],
        "hidden_fraction": [(2, 0.75), (3, 0.25)],
        "exposed_ms": [(1, 125.0), (2, 125.0), (3, 125.0)],
        "held_out_loss": [(2, 2.75)],
    }


def test_the_other_ranks_show_nothing(tmp_path: Path) -> None:
    with board(None, tokens=1, start=0) as write:
        write(1, step(1.0, 0.5), 1.0)
    assert not list(tmp_path.iterdir())


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    expected = "--tensorboard needs its package; pip install tensorboard"
    assert Verb("train").refused(capsys, "--tensorboard", "folder") == expected
