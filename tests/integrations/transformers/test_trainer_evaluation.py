"""Evaluation over stages: several batches pass the pipeline together, and all figures are Trainer's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import transformers

from overlap1f1b.integrations.transformers import OverlapArguments, Overlapped, OverlapTrainer
from tests.integrations.transformers.loops import Sentences, Spec, Stream, launched
from tests.ranks import Ranks
from tests.tiers import first, wide

ROWS = 13
"""Of the evaluation: the last batch is smaller, or is filled with rows that metrics must drop."""


def metrics(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    counted = labels != -100
    return {
        "right": float((logits.argmax(-1) == labels)[counted].mean()),
        "norm": float((logits[counted] ** 2).mean()),
        "rows": len(labels),
    }


def chosen(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def of_choices(prediction: Any) -> dict[str, float]:
    right = prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]
    counted = float(right[prediction.label_ids[:, 1:] != -100].mean())
    assert 0 < counted < 1
    return {"right": counted, "rows": len(prediction.label_ids)}


class Batch:
    """A metric of one batch after another; what it returns at the last one counts."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        self.rows.append(len(prediction.label_ids))
        return {"batches": len(self.rows), "rows": sum(self.rows)} if compute_result else {}


def evaluated(rank: int, size: int, spec: Spec) -> tuple[list[dict[str, float]], Any, list[int]]:
    """Return the metrics of an evaluation with losses alone and of one with logits; the predictions; plays of each."""
    with launched(rank, size):
        trainer, plays = spec.build(), []
        if isinstance(trainer, Overlapped):
            play = trainer.engine.play

            def counted(*args: Any, **kwargs: Any) -> Any:
                plays[-1] += 1
                return play(*args, **kwargs)

            trainer.engine.play = counted
        found = []
        for compute in (None, trainer.compute_metrics or metrics):
            trainer.compute_metrics = compute
            plays.append(0)
            found.append(trainer.evaluate())
        plays.append(0)
        predictions = trainer.predict(trainer.eval_dataset).predictions
    timed = ("runtime", "per_second", "preparation_time")
    return [{name: line[name] for name in line if not name.endswith(timed)} for line in found], predictions, plays


def same(found: Any, expected: Any, plays: int) -> None:
    lines, predictions, counted = found
    assert lines == [pytest.approx(line, rel=5e-6) for line in expected[0]]
    assert predictions == pytest.approx(expected[1], abs=1e-5)
    assert counted == [plays] * 3


def spec_of(folder: Path, batch: int, **changes: Any) -> Spec:
    given: dict[str, Any] = {"trainer": {"eval_dataset": Sentences(ROWS, seed=9)}, **changes}
    return Spec(folder, arguments={"per_device_eval_batch_size": batch}, **given)


REDUCED = {"preprocess_logits_for_metrics": chosen, "compute_metrics": of_choices}
CASES: dict[str, tuple[int, OverlapArguments, int, dict[str, Any]]] = {  # ranks, and plays of each evaluation
    "one rank": (1, OverlapArguments(), 2, {}),
    "rows without a length": (1, OverlapArguments(), 2, {"eval_dataset": Stream(Sentences(ROWS, seed=9))}),
    "logits that are reduced first": (2, OverlapArguments(pp=2), 2, REDUCED),
    "ep 2": (2, OverlapArguments(ep=2), 2, {}),  # 4 batches at a time
    "pp 2 × ep 2": (4, OverlapArguments(pp=2, ep=2), 2, {}),
    "dp 2 × ep 2": (4, OverlapArguments(dp=2, ep=2), 1, {}),
    "both pipes": (2, OverlapArguments(pp=2, schedule="dualpipe"), 4, {}),  # 2 at a time: those that end on one rank
}


@pytest.mark.parametrize("case", first(CASES, *list(CASES)[:3]))
def test_figures_are_trainers(kept: dict[int, Ranks], case: str, tmp_path: Path) -> None:
    ranks, sizes, plays, more = CASES[case]
    shards = ranks // sizes.pp
    trainer = {"eval_dataset": Sentences(ROWS, seed=9), **more}
    spec = spec_of(tmp_path, max(1, 2 // shards), layout=sizes, trainer=trainer)  # 7 batches, with four shards 4
    plain = replace(spec, kind=transformers.Trainer, layout=None)
    expected = kept[shards].run(evaluated, plain)[0] if shards > 1 else evaluated(0, 1, plain)
    assert expected[0][1]["eval_rows"] == ROWS
    for found in kept[ranks].run(evaluated, spec) if ranks > 1 else [evaluated(0, 1, spec)]:
        same(found, expected, plays)


def test_metrics_of_one_batch_after_another(ranks2: Ranks, tmp_path: Path) -> None:
    """The last batch says that it is the last, although it was read with others."""
    trainer = {"eval_dataset": Sentences(ROWS, seed=9), "compute_metrics": Batch()}
    spec = spec_of(tmp_path, 1, trainer=trainer)
    spec = replace(spec, arguments={**spec.arguments, "batch_eval_metrics": True})
    expected = ranks2.run(_by_batch, replace(spec, kind=transformers.Trainer))
    assert expected[0] == {"eval_batches": 7, "eval_rows": ROWS}
    assert ranks2.run(_by_batch, replace(spec, layout=OverlapArguments(ep=2))) == expected


def _by_batch(rank: int, size: int, spec: Spec) -> dict[str, float]:
    with launched(rank, size):
        found = spec.build().evaluate()
    return {name: found[name] for name in ("eval_batches", "eval_rows")}


class Again(OverlapTrainer):
    """Evaluates batches of its own, which were not read ahead."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().prediction_step(model, dict(inputs), *args, **kwargs)


class Masked(transformers.Trainer):
    """Leaves a label out of each batch, in the batch itself, before Trainer's own code sees it."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["labels"] = inputs["labels"].clone()
        inputs["labels"][:, 2] = -100
        return super().prediction_step(model, inputs, *args, **kwargs)


class OverlapMasked(Masked, OverlapTrainer):
    """The same under the engine: ``OverlapTrainer.prediction_step`` comes behind."""


@pytest.mark.parametrize("kind", [Again, *wide(OverlapMasked)])
def test_batches_of_a_subclass(kind: Any, tmp_path: Path) -> None:
    """Those that were not read ahead, or were changed since, are played one by one, as they are then."""
    spec, changes = spec_of(tmp_path, 2), issubclass(kind, Masked)
    unchanged = evaluated(0, 1, replace(spec, kind=transformers.Trainer))
    expected = evaluated(0, 1, replace(spec, kind=Masked)) if changes else unchanged
    assert (expected[0][0]["eval_loss"] != pytest.approx(unchanged[0][0]["eval_loss"], rel=1e-3)) == changes
    same(evaluated(0, 1, replace(spec, kind=kind)), expected, 7)
