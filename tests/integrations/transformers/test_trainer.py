"""OverlapTrainer against transformers' Trainer on one process with the same microbatches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from overlap1f1b.integrations.transformers import OverlapArguments
from tests.integrations.transformers.loops import SHOWN, Spec, alone, history, train, weights
from tests.ranks import Ranks

EVALUATES = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"tie_word_embeddings": True},
    "mixtral": {"output_router_logits": True},
}


def plain(spec: Spec, shards: int = 1, **changes: Any) -> Any:
    """Trainer on one process, with the microbatches of all ranks."""
    arguments = {**spec.arguments}
    if "per_device_eval_batch_size" in arguments:
        arguments["per_device_eval_batch_size"] *= shards
    accumulation = spec.accumulation * shards
    own = {"kind": transformers.Trainer, "layout": None, "arguments": arguments, "accumulation": accumulation}
    return alone(replace(spec, folder=spec.folder / "plain", **own, **changes))


def close(found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float = 5e-6) -> None:
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)


def shown(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    kept = [{name: line[name] for name in SHOWN if name in line} for line in lines]
    return [line for line in kept if line]


def same_weights(folder: Path, other: Path, tolerance: float = 1e-6) -> None:
    found, expected = weights(folder), weights(other)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= tolerance, name


@pytest.mark.parametrize("model", MODELS)
def test_on_one_rank(model: str, tmp_path: Path) -> None:
    """The last step of an epoch has two microbatches of four."""
    spec = Spec(tmp_path, model, MODELS[model], steps=7, arguments=EVALUATES)
    expected = plain(spec)
    trainer = alone(spec)
    close(history(trainer), history(expected))
    same_weights(tmp_path, tmp_path / "plain")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in trainer.stages.state_dict().items())


LAYOUTS = {
    "ep 2": (2, OverlapArguments(ep=2), 4),
    "pp 2 × ep 2": (4, OverlapArguments(pp=2), 4),
    "pp 2, dualpipev": (2, OverlapArguments(pp=2, schedule="dualpipev"), 4),
    "dp 2 × ep 2": (4, OverlapArguments(dp=2, ep=2), 2),
}


@pytest.mark.parametrize(
    ("layout", "model"), [*[(name, "qwen3_moe") for name in LAYOUTS], ("ep 2", "mixtral"), ("pp 2 × ep 2", "mixtral")]
)
def test_over_ranks(ranks2: Ranks, ranks4: Ranks, layout: str, model: str, tmp_path: Path) -> None:
    ranks, sizes, accumulation = LAYOUTS[layout]
    shards = ranks // sizes.pp
    spec = Spec(tmp_path, model, MODELS[model], 40, accumulation, arguments=EVALUATES, layout=sizes)
    expected = history(plain(spec, shards))
    lines = {2: ranks2, 4: ranks4}[ranks].run(train, spec)
    for found in lines:
        close(shown(found), expected)
    same_weights(tmp_path, tmp_path / "plain")
