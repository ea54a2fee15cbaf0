"""The learning rate, and what is decayed."""

from pathlib import Path

import pytest
import torch
from torch import nn

from overlap1f1b.running.options import ModelOptions, TrainOptions
from overlap1f1b.running.ranks import Rank
from overlap1f1b.running.text import Corpus
from overlap1f1b.running.train import History, Trainer, build_optimizer, learning_rate


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, 100, 2.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == 2.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_learning_rate_of_short_runs(steps: int) -> None:
    assert all(0 < learning_rate(step, steps, 1.0) <= 1 for step in range(steps + 1))


def test_only_matrices_are_decayed() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.RMSNorm(4))
    optimizer = build_optimizer(model, lr=0.5)
    decayed = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decayed[p] for p in model.parameters()] == [0.0, 0.1, 0.0, 0.0]


def test_a_resumed_run_has_the_losses_before(text: Path, tmp_path: Path) -> None:
    corpus = Corpus.load([text], sequence=8)
    options = TrainOptions(model=ModelOptions(layers=1, hidden=16, heads=2, intermediate=16), sequence=8, ep=1)
    first, resumed = (
        Trainer(options, Rank(0, 1, torch.device("cpu"), None), corpus, options.program(), overlap=3) for _ in range(2)
    )
    saved, history = History([3.0], [0.1], [(1, 2.5)]), History()
    first.save(tmp_path, 1, saved).result()
    assert resumed.load(tmp_path / "step-00000001", history) == 1
    assert history == saved
