"""OverlapTrainer against transformers' Trainer on one process with the same microbatches."""

from __future__ import annotations

import copy
import io
import multiprocessing
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import tokenizers
import transformers

from overlap1f1b.engine import LostRankError
from overlap1f1b.engine.tuner import State
from overlap1f1b.integrations.transformers import OverlapArguments, Overlapped, OverlapTrainer
from overlap1f1b.integrations.transformers.arguments import _REFUSED, check_arguments
from overlap1f1b.plan import RECOMPUTES, Node, Op
from overlap1f1b.plan.node import MOST_PARTS
from tests.integrations.transformers import tiny
from tests.integrations.transformers.loops import (
    Sentences,
    Spec,
    alone,
    close,
    history,
    launched,
    pad,
    same_weights,
    shown,
    train,
    weights,
)
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


def counted(spec: Spec, microbatches: int) -> list[int]:
    """Return the tokens that count in each step, in the order in which Trainer reads the rows."""
    loader = replace(spec, kind=transformers.Trainer, layout=None, accumulation=1).build().get_train_dataloader()
    tokens: list[int] = []
    for epoch in range(spec.steps):
        loader.set_epoch(epoch)
        every = [int((batch["labels"][:, 1:] != -100).sum()) for batch in loader]
        tokens += [sum(every[start : start + microbatches]) for start in range(0, len(every), microbatches)]
    return tokens[: spec.steps]


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


def layers_of(layout: str) -> int:
    """Return as many layers as the layout has stages, at least two."""
    return 4 if layout == "pp 2, dualpipev" else 2


@pytest.mark.parametrize(
    ("layout", "model", "config"),
    [
        ("ep 2", "mixtral", {}),
        ("pp 2 × ep 2", "qwen3_moe", MODELS["qwen3_moe"]),
        ("pp 2, dualpipev", "mixtral", MODELS["mixtral"]),
        ("dp 2 × ep 2", "qwen3_moe", MODELS["qwen3_moe"]),
    ],
)
def test_over_ranks(
    ranks2: Ranks, ranks4: Ranks, layout: str, model: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """All ranks log what one process logs; rows, their lengths and the tokens that count differ from rank to rank."""
    ranks, sizes, accumulation = LAYOUTS[layout]
    spec = Spec(tmp_path, model, config, rows=40, accumulation=accumulation, layout=sizes, layers=layers_of(layout))
    if "output_router_logits" not in config:  # the router's loss of an evaluation is that of each rank's batch: below
        spec = replace(spec, arguments=EVALUATES)
    expected = history(plain(spec, ranks // sizes.pp))
    tokens = counted(spec, spec.accumulation * ranks // sizes.pp)
    for found in {2: ranks2, 4: ranks4}[ranks].run(train, spec):
        close(shown(found), expected)
        logged = [line for line in found if "loss" in line]
        if layout == "pp 2, dualpipev":  # no ranks share experts
            assert not any(name.startswith("exchange") for line in logged for name in line)
        else:
            assert all(0 <= line["exchange_hidden"] <= 1 and line["exchange_exposed_s"] > 0 for line in logged)
        assert [line["tokens"] for line in logged] == tokens
    same_weights(tmp_path, tmp_path / "plain")


def unbalanced() -> Any:
    """Return a model whose routers give all tokens to the same two experts."""
    model = tiny.build("qwen3_moe", num_hidden_layers=2)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.zero_()
    return model


def test_experts_without_tokens(ranks2: Ranks, tmp_path: Path) -> None:
    """Those of one rank are updated as in the whole model, where others of the same tensor had tokens."""
    spec = Spec(tmp_path, model=None, trainer={"model_init": unbalanced}, layout=OverlapArguments(), rows=40)
    expected = history(plain(spec, 2))
    for found in ranks2.run(train, spec):
        close(shown(found), expected)
    same_weights(tmp_path, tmp_path / "plain")


def test_the_routers_loss_of_an_evaluation(ranks2: Ranks, ranks4: Ranks, tmp_path: Path) -> None:
    """It is that of Trainer over as many processes with data, which adds the losses of their batches."""
    _, sizes, accumulation = LAYOUTS["pp 2 × ep 2"]
    spec = Spec(tmp_path, "mixtral", MODELS["mixtral"], rows=40, accumulation=accumulation, arguments=EVALUATES)
    expected = shown(ranks2.run(train, replace(spec, folder=tmp_path / "plain", kind=transformers.Trainer))[0])
    assert sum("eval_loss" in line for line in expected) == 2
    for found in ranks4.run(train, replace(spec, layout=sizes)):
        close(shown(found), expected)


def classifying() -> Any:
    torch.manual_seed(3)
    config = tiny.configuration("mixtral", num_labels=3, num_hidden_layers=2)
    return transformers.AutoModelForSequenceClassification.from_config(config)


def pad_with_class(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = pad(rows)
    return {**batch, "labels": batch["input_ids"][:, 0] % 3}


def test_the_loss_of_a_classifier(ranks2: Ranks, tmp_path: Path) -> None:
    """Trainer over two processes shows twice the mean in an evaluation; the step is that of one process."""
    trainer = {"model_init": classifying, "data_collator": pad_with_class}
    spec = Spec(tmp_path, None, rows=40, arguments=EVALUATES, trainer=trainer, layout=OverlapArguments(ep=2))
    alone = history(plain(spec, 2))
    expected = shown(ranks2.run(train, replace(spec, kind=transformers.Trainer, layout=None))[0])
    for found in ranks2.run(train, spec):
        close(shown(found), expected)
        close(shown(found), [{n: v * (1 + (n == "eval_loss")) for n, v in line.items()} for line in alone], 5e-5)


# ------------------------------------------------------------------------------------------------------------- resume


RESUMED = {
    "on four ranks, and from them on one": ("pp 2 × ep 2", "pp 2 × ep 2", "one rank"),
    "on one rank, and from it on four": ("one rank", "one rank", "pp 2 × ep 2"),
    "from stages on experts": ("pp 2, dualpipev", "ep 2"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_resume(ranks2: Ranks, ranks4: Ranks, case: str, tmp_path: Path) -> None:
    """A run that stopped after the second of four steps goes on in the middle of an epoch, as if it had not stopped."""

    def run(where: str, **changes: Any) -> list[dict[str, float]]:
        ranks, sizes, _ = LAYOUTS.get(where, (1, OverlapArguments(), 0))
        config, layers = {"tie_word_embeddings": True}, max(map(layers_of, RESUMED[case]))
        given = {"rows": 48, "accumulation": 8 * sizes.pp // ranks, "layout": sizes, "layers": layers}
        spec = Spec(tmp_path, "mixtral", config, **given, **changes)
        if ranks == 1:
            return history(alone(spec))
        return shown({2: ranks2, 4: ranks4}[ranks].run(train, spec)[0])

    first, *places = RESUMED[case]
    unbroken = run(first, arguments={"save_strategy": "steps", "save_steps": 2})
    final = weights(tmp_path)
    if first == "pp 2 × ep 2":
        weights_are_written_once(tmp_path / "checkpoint-2")
    for then in places:
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()
        again = run(then, seed=4, resume=str(tmp_path / "checkpoint-2"))
        assert len(again) == 4, then  # two of them from the checkpoint
        close(again, unbroken)
        same_weights(tmp_path, final)
        if first == then == "one rank":
            assert again == unbroken


@pytest.mark.parametrize("where", ["one rank", "pp 2 × ep 2"])
def test_random_numbers_go_on(ranks4: Ranks, where: str, tmp_path: Path) -> None:
    """With dropout, in the middle of an epoch; the batches that are read again draw none of the model's numbers."""
    sizes = OverlapArguments(pp=2) if where != "one rank" else OverlapArguments()
    config = {"attention_dropout": 0.3, "tie_word_embeddings": True}

    def run(**changes: Any) -> list[dict[str, float]]:
        spec = Spec(tmp_path, "mixtral", config, rows=64, accumulation=2, layout=sizes, **changes)
        return history(alone(spec)) if where == "one rank" else shown(ranks4.run(train, spec)[0])

    unbroken = run(arguments={"save_strategy": "steps", "save_steps": 3})
    assert run(seed=4, resume=str(tmp_path / "checkpoint-3")) == unbroken
    assert run(seed=4, resume=_without_random(tmp_path / "checkpoint-3")) != unbroken


def _without_random(folder: Path) -> str:
    for file in folder.glob("rng_state*"):
        file.unlink()
    return str(folder)


def weights_are_written_once(folder: Path) -> None:
    """The engine's checkpoint has what the folder around it has not."""
    assert not {"optimizer.pt", "scheduler.pt"} & {path.name for path in folder.iterdir()}
    (step,) = (folder / "overlap1f1b").iterdir()
    stored = FileSystemReader(step).read_metadata().state_dict_metadata
    assert stored
    assert all(name.startswith("optimizer.") for name in stored)
    assert {path.name for path in step.glob("state-*")} == {"state-scheduler.pt"}


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_other_optimizers_go_on(ranks2: Ranks, optimizer: str, tmp_path: Path) -> None:
    """SGD has no state: only the learning rates are stored."""
    arguments = {"save_strategy": "steps", "save_steps": 2, "optim": optimizer}
    spec = Spec(tmp_path, arguments=arguments, layout=OverlapArguments(pp=2))
    unbroken = shown(ranks2.run(train, spec)[0])
    again = replace(spec, seed=4, resume=str(tmp_path / "checkpoint-2"))
    assert shown(ranks2.run(train, again)[0]) == unbroken


def test_callbacks_that_stop_and_checkpoints_that_stay(ranks4: Ranks, tmp_path: Path) -> None:
    """Patience goes on where it was, on one rank in place of four; the best checkpoint and the last one stay."""
    arguments = {**EVALUATES, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    arguments |= {"metric_for_best_model": "loss", "greater_is_better": False, "save_total_limit": 2}
    arguments |= {"lr_scheduler_type": "constant", "restore_callback_states_from_checkpoint": True}
    stopping = {"callbacks": [transformers.EarlyStoppingCallback(2)]}
    spec = Spec(tmp_path, layers=4, rows=48, arguments=arguments, trainer=stopping, accumulation=2)
    spec = replace(spec, layout=OverlapArguments(pp=2))
    expected = plain(replace(spec, steps=8), 2)
    assert expected.state.global_step == 6  # the best evaluation was the first
    ranks4.run(train, replace(spec, arguments={**arguments, "load_best_model_at_end": False}))
    arguments["per_device_eval_batch_size"] = 8
    one = {"layout": OverlapArguments(), "accumulation": 4, "arguments": arguments}
    trainer = alone(replace(spec, **one, steps=8, seed=4, resume=str(tmp_path / "checkpoint-4")))
    assert trainer.state.global_step == 6
    close(history(trainer), history(expected))
    for folder in (tmp_path, tmp_path / "plain"):
        assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-6"}
    # Not with what Trainer has at its end: transformers 5.23 reads no experts of the best checkpoint.
    same_weights(tmp_path, tmp_path / "plain" / "checkpoint-2", 5e-6)  # without warm-up Adam's first step is large


def test_weights_of_trainer_go_on_without_its_optimizer(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    plain(Spec(tmp_path, steps=2, arguments=saves))
    folder = tmp_path / "plain" / "checkpoint-2"
    trainer = Spec(tmp_path, seed=4).build()
    trainer._load_from_checkpoint(str(folder))
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in trainer.stages.state_dict().items())
    plain(Spec(tmp_path, steps=2, arguments={**saves, "save_only_model": False}))
    with pytest.raises(ValueError, match="the optimizer of a plain Trainer; allowed: "):
        trainer.train(resume_from_checkpoint=str(folder))


def test_the_best_weights_are_loaded_at_the_end(ranks2: Ranks, tmp_path: Path) -> None:
    arguments = {**EVALUATES, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    arguments |= {"metric_for_best_model": "loss", "greater_is_better": False}
    (lines, _) = ranks2.run(train, Spec(tmp_path, layers=4, arguments=arguments, layout=OverlapArguments(pp=2)))
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert losses[0] < losses[1]  # the best one is not the last
    same_weights(tmp_path, tmp_path / "checkpoint-2", 0.0)


# ------------------------------------------------------------------------------------------------- losses, evaluation


class Own(transformers.Trainer):
    """A subclass with code of its own for the loss and for a step: it counts tokens over all ranks."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1  # once a microbatch, as in Trainer
        return super().training_step(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        labels, ranks = inputs["labels"], self.accelerator.num_processes
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        right = (outputs.logits[:, :-1].argmax(-1) == labels[:, 1:]).sum()
        logits = outputs.logits[labels != -100]
        self.right = getattr(self, "right", 0) + int(self.accelerator.gather_for_metrics(right).sum())
        assert model.config.model_type == "qwen3_moe"
        loss = loss + 1e-3 * ranks * logits.logsumexp(-1).square().sum() / more["num_items_in_batch"]
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, "right": getattr(self, "right", -1), "calls": getattr(self, "calls", -1)}, start_time)


class OverlappedOwn(Overlapped, Own):
    pass


def smoothed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.2, reduction="sum") / num_items_in_batch


LOSSES: dict[str, dict[str, Any]] = {
    "label smoothing": {"arguments": {"label_smoothing_factor": 0.1}},
    "compute_loss_func": {"trainer": {"compute_loss_func": smoothed}},
}


@pytest.mark.parametrize("case", LOSSES)
def test_other_losses_are_trainers_own(ranks2: Ranks, case: str, tmp_path: Path) -> None:
    changes = LOSSES[case]
    spec = Spec(tmp_path, layout=OverlapArguments(pp=2), trainer=changes.get("trainer", {}))
    spec = replace(spec, arguments={**EVALUATES, **changes.get("arguments", {})})
    expected = history(plain(spec))
    default = plain(replace(spec, folder=tmp_path / "default", trainer={}, arguments={}, steps=1))
    assert expected[0]["loss"] != history(default)[0]["loss"]
    for found in ranks2.run(train, spec):
        close(shown(found), expected)
    same_weights(tmp_path, tmp_path / "plain")


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        tiny.build("qwen3_moe", num_hidden_layers=2), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )


def test_label_smoothing_of_a_model_with_adapters(tmp_path: Path) -> None:
    """Trainer shifts the labels of a causal LM inside PEFT's model, too."""
    pytest.importorskip("peft")
    arguments = {"label_smoothing_factor": 0.1}
    spec = Spec(tmp_path, None, steps=2, trainer={"model_init": adapted}, arguments=arguments)
    close(history(alone(spec)), history(plain(spec)))


def test_each_rank_has_its_own_mean(ranks2: Ranks, tmp_path: Path) -> None:
    """As Trainer over two processes."""
    spec = Spec(tmp_path, rows=40, arguments={**EVALUATES, "average_tokens_across_devices": False})
    expected = ranks2.run(train, replace(spec, folder=tmp_path / "plain", kind=transformers.Trainer))
    found = ranks2.run(train, replace(spec, layout=OverlapArguments()))
    close(shown(found[0]), shown(expected[0]))
    assert [line["tokens"] for line in found[1] if "loss" in line] == counted(spec, 8)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_subclass_keeps_its_own_code(ranks4: Ranks, recompute: Any, tmp_path: Path) -> None:
    """It runs once for each microbatch, also where layers are computed again."""
    spec = Spec(tmp_path, kind=OverlappedOwn, arguments=EVALUATES, rows=40, layers=4)
    spec = replace(spec, layout=OverlapArguments(pp=2, recompute=recompute))
    alone_spec = replace(spec, folder=tmp_path / "plain", layout=None, kind=Own, accumulation=8)
    alone_spec = replace(alone_spec, arguments={**EVALUATES, "per_device_eval_batch_size": 8})
    expected = alone(alone_spec)
    every = ranks4.run(_played, spec)
    for found, _, nodes in every:
        close(shown(found), history(expected))
        assert any(node.op in RECOMPUTES for node in nodes) == (recompute != "none")
    own = [(line["right"], line["calls"]) for line in expected.state.log_history]
    for found, _, _ in every:  # the last stage's own code has run there alone
        seen = [(line["right"], line["calls"]) for line in found]
        assert [right for right, _ in seen] == [right for right, _ in own]
        assert [2 * calls for _, calls in seen] == [calls for _, calls in own]  # of two ranks with data
    assert own[-1][0] > 0


def test_evaluation_and_prediction_without_training(tmp_path: Path) -> None:
    spec = Spec(tmp_path, arguments={"per_device_eval_batch_size": 3})
    expected = replace(spec, kind=transformers.Trainer).build()
    trainer = spec.build()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=5e-6)
    found, wanted = trainer.predict(trainer.eval_dataset), expected.predict(expected.eval_dataset)
    assert found.predictions == pytest.approx(wanted.predictions, abs=1e-5)
    assert trainer.model.training is False
    rows = [{"input_ids": row["input_ids"]} for row in trainer.eval_dataset]
    for one in (trainer, expected):
        one.data_collator = lambda rows: {"input_ids": torch.stack([row["input_ids"][:3] for row in rows])}
    found, wanted = trainer.predict(rows), expected.predict(rows)
    assert found.predictions == pytest.approx(wanted.predictions, abs=1e-5)
    assert "test_loss" not in found.metrics


class Regularised(OverlapTrainer):
    """Adds a term of all parameters to the loss, after other requests of the same kind."""

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, *args, **kwargs)
        for asked in (model.parameters, model.state_dict, model.modules, model.named_modules, model.children):
            with pytest.raises(ValueError, match="parameters or modules of the model in a loss"):
                asked()
        return loss + 1e-3 * sum(p.square().sum() for _, p in model.named_parameters())


def test_a_loss_of_parameters_is_refused(tmp_path: Path) -> None:
    """The model that a loss gets has none: the term would vanish."""
    trainer = Spec(tmp_path, kind=Regularised, steps=1).build()
    with pytest.raises(ValueError, match=r"parameters or modules of the model in a loss, .*; allowed: ") as caught:
        trainer.train()
    assert "\n" not in str(caught.value)


class Reducing(transformers.Trainer):
    """Reduces figures of each microbatch over the ranks with data."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows, reduce = torch.tensor(float(len(inputs["input_ids"]))), self.accelerator.reduce
        longest = reduce(torch.tensor(float(inputs["input_ids"].shape[1])), "max")
        own = torch.arange(4 + self.accelerator.process_index)
        padded = [
            self.accelerator.pad_across_processes({"own": own}, pad_index=-1, pad_first=first)["own"]
            for first in (False, True)
        ]
        self.reduced = [float(figure) for figure in (reduce(rows), reduce({"rows": rows}, "mean")["rows"], longest)]
        self.reduced += [*padded[0].tolist(), *padded[1].tolist()]
        self.reduced += self.accelerator.gather_for_metrics([self.accelerator.process_index], use_gather_object=True)
        return super().compute_loss(model, inputs, *args, **kwargs)


class OverlappedReducing(Overlapped, Reducing):
    pass


def _reduced(rank: int, size: int, spec: Spec) -> list[float]:
    with launched(rank, size):
        trainer = spec.build()
        trainer.train()
        return list(getattr(trainer, "reduced", []))


def test_sums_of_a_loss_over_ranks(ranks2: Ranks, ranks4: Ranks, tmp_path: Path) -> None:
    """The ranks of a first stage compute no loss, and are not waited for."""
    spec = Spec(tmp_path, kind=Reducing, steps=1)
    expected = ranks2.run(_reduced, spec)
    assert expected[0][:2] == [4.0, 2.0]
    assert expected[0][3:] == [0, 1, 2, 3, -1, -1, 0, 1, 2, 3, 0, 1]
    layout = OverlapArguments(pp=2, timeout=20.0)
    assert ranks4.run(_reduced, replace(spec, kind=OverlappedReducing, layout=layout)) == [[], [], *expected]


class Telling(OverlapTrainer):
    """Logs while it computes a loss, also what a line of Trainer has."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.log({"rows": len(inputs["input_ids"]), "loss": -1.0})
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("layout", ["pp 2, dualpipev", "ep 2"])
def test_a_loss_that_logs(ranks2: Ranks, layout: str, tmp_path: Path) -> None:
    """Its entries come with the next line, on all ranks: a line of its own would wait for ranks without a loss."""
    _, sizes, accumulation = LAYOUTS[layout]
    sizes = replace(sizes, timeout=20.0)
    spec = Spec(tmp_path, kind=Telling, rows=40, accumulation=accumulation, layout=sizes, arguments=EVALUATES)
    spec = replace(spec, layers=layers_of(layout))
    expected = history(plain(spec, 2 if layout == "ep 2" else 1))
    for found in ranks2.run(train, spec):
        own = [line for line in found if line.get("loss") == -1.0]  # where Trainer's line has none
        assert [line.pop("loss") for line in own if "eval_loss" in line] == [-1.0] * 2
        close(shown(found), expected)
        assert [line.get("rows") for line in found] == [2, 2, 4, 2, 2, 4, None]


class TellingAlone(OverlapTrainer):
    """Logs on the first rank alone, in a loss and around a step."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_world_process_zero():
            self.log({"rows": len(inputs["input_ids"])})
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self.is_world_process_zero() and self.accelerator.sync_gradients:
            self.log({"own_loss": 1.0, "own_runtime": 1.0})
        return loss


@pytest.mark.parametrize("layout", ["pp 2, dualpipev", "ep 2"])
def test_a_first_rank_that_logs(ranks2: Ranks, layout: str, tmp_path: Path) -> None:
    """No other rank is waited for, and an entry of a loss reaches the first rank, which computes none."""
    _, sizes, accumulation = LAYOUTS[layout]
    sizes = replace(sizes, timeout=20.0)
    spec = Spec(tmp_path, kind=TellingAlone, rows=40, accumulation=accumulation, layout=sizes)
    spec = replace(spec, layers=layers_of(layout))
    expected = history(plain(spec, 2 if layout == "ep 2" else 1))
    found = ranks2.run(train, spec)
    for one in found:
        close(shown(one), expected)
    assert [line.get("own_loss") for line in found[0]] == [1.0, None] * 4 + [None]
    assert [line.get("rows") for line in found[0]] == [None, 2] * 4 + [None]


class Noting(OverlapTrainer):
    """Keeps the tokens of its batches."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.read = [*getattr(self, "read", []), inputs["input_ids"].tolist()]
        return super().training_step(model, inputs, *args, **kwargs)


class DrawnRows(Sentences):
    """Rows with a token that is drawn."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        ids = row["input_ids"].clone()
        ids[-1] = torch.randint(3, tiny.V, ())
        return {**row, "input_ids": ids}


def _read(rank: int, size: int, spec: Spec) -> list[Any]:
    vars(multiprocessing.current_process())["_config"]["daemon"] = False  # else there may be no workers
    multiprocessing.set_start_method("fork", force=True)  # else each worker imports everything anew
    with launched(rank, size):
        trainer = spec.build()
        trainer.train(resume_from_checkpoint=spec.resume)
        return list(trainer.read)


def test_workers_that_draw(ranks2: Ranks, tmp_path: Path) -> None:
    """The workers of a pipeline's ranks draw the same random numbers."""
    data = {"train_dataset": DrawnRows(40)}
    arguments = {"dataloader_num_workers": 2}
    spec = Spec(tmp_path, kind=Noting, steps=2, layout=OverlapArguments(pp=2), arguments=arguments, trainer=data)
    first, second = ranks2.run(_read, spec)
    assert first == second
    assert len(first) == 8


@pytest.mark.parametrize("strategy", ["group_by_length", "random"])
def test_resuming_on_more_stages_reads_the_same_rows(
    ranks2: Ranks, ranks4: Ranks, strategy: str, tmp_path: Path
) -> None:
    """Ranks without random numbers of their own in the checkpoint get those of their pipeline's first rank."""
    arguments = {"train_sampling_strategy": strategy, "save_strategy": "steps", "save_steps": 3}
    spec = Spec(tmp_path, rows=32, kind=Noting, steps=3, layout=OverlapArguments(ep=2), arguments=arguments)
    spec = replace(spec, trainer={"train_dataset": DrawnRows(32)})  # two steps an epoch
    ranks2.run(_read, spec)
    resume = str(tmp_path / "checkpoint-3")
    found = ranks4.run(_read, replace(spec, steps=6, layout=OverlapArguments(pp=2, ep=2), resume=resume))
    assert found[0] == found[2] != found[1] == found[3]
    assert len(found[0]) == 12


class RankRows(Sentences):
    """Rows of equal length, on the last rank in another order of tokens."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        self.rows = [row[:3].flip(0) if last else row[:3] for row in self.rows]


@pytest.mark.parametrize(("dp", "evaluates"), [(2, False), (1, True)])
def test_other_rows_along_a_pipeline_are_refused(ranks4: Ranks, dp: int, evaluates: bool, tmp_path: Path) -> None:
    """The ranks of the other pipeline learn of it at once."""
    spec = Spec(tmp_path, steps=2, layout=OverlapArguments(pp=2, dp=dp, ep=2 // dp, timeout=30.0))
    for rank, (found, took) in enumerate(ranks4.run(_refused_rows, spec, evaluates)):
        assert found.startswith("ranks of a pipeline have read different" if rank % 2 else "LostRankError: "), found
        assert "ranks of a pipeline have read different batches; allowed: the same rows" in found
        assert took < 15.0


def _refused_rows(rank: int, size: int, spec: Spec, evaluates: bool) -> tuple[str, float]:
    with launched(rank, size):
        trainer = replace(spec, trainer={"train_dataset": RankRows(40), "eval_dataset": RankRows(40)}).build()
        begin = time.monotonic()
        with pytest.raises((ValueError, LostRankError)) as caught:
            trainer.evaluate() if evaluates else trainer.train()
        name = "" if caught.type is ValueError else "LostRankError: "
        return name + str(caught.value), time.monotonic() - begin


class Sampling(OverlapTrainer):
    """Makes lists of rows of its own, as trainers by reinforcement do."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(model, [inputs], *args, **kwargs)


def test_batches_that_are_lists_are_refused(tmp_path: Path) -> None:
    trainer = Spec(tmp_path, kind=Sampling).build()
    with pytest.raises(ValueError, match=r"^Sampling, a Trainer, has a batch of type list; allowed: trainers whose "):
        trainer.train()


def test_batches_without_tokens_are_refused(tmp_path: Path) -> None:
    """As of losses that join columns of their own."""
    batch = {"data_collator": lambda rows: {"chosen_input_ids": torch.ones(len(rows), 3, dtype=torch.int64)}}
    trainer = Spec(tmp_path, trainer=batch).build()
    with pytest.raises(ValueError, match=r"^OverlapTrainer, a Trainer, has a batch of chosen_input_ids; allowed: "):
        trainer.train()


class Weighing(transformers.Trainer):
    """Weighs the loss by a column of its own, and calls the model by position."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        weight, labels = inputs.pop("weights").mean(), inputs["labels"]
        output = model(inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels)
        loss = weight * output.loss / self.args.gradient_accumulation_steps
        return (loss, output) if return_outputs else loss


class OverlappedWeighing(Overlapped, Weighing):
    pass


def pad_with_weights(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = pad(rows)
    return {**batch, "weights": 1.0 + batch["input_ids"][:, 0] / tiny.V}


def test_columns_of_the_loss_alone(ranks2: Ranks, tmp_path: Path) -> None:
    arguments, more = {"remove_unused_columns": False, **EVALUATES}, {"data_collator": pad_with_weights}
    spec = Spec(tmp_path, rows=40, kind=OverlappedWeighing, arguments=arguments, trainer=more)
    spec = replace(spec, layout=OverlapArguments(pp=2))
    expected = history(alone(replace(spec, folder=tmp_path / "plain", kind=Weighing, layout=None)))
    for found in ranks2.run(train, spec):
        close(shown(found), expected)


class ByToken(transformers.Trainer):
    """Weighs tokens by numbers on the model's device."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        output = model(**inputs)
        weight = torch.linspace(0.5, 1.5, tiny.V, device=model.device)
        logits, targets = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets, weight) / self.args.gradient_accumulation_steps
        return (loss, output) if return_outputs else loss


class OverlappedByToken(Overlapped, ByToken):
    pass


def test_a_loss_on_the_models_device(ranks2: Ranks, tmp_path: Path) -> None:
    """The last stage has no embedding, whose device would be the model's."""
    spec = Spec(tmp_path, kind=OverlappedByToken, steps=2, layout=OverlapArguments(pp=2))
    expected = history(alone(replace(spec, folder=tmp_path / "plain", kind=ByToken, layout=None)))
    for found in ranks2.run(train, spec):
        close(shown(found), expected)


class Calling(OverlapTrainer):
    """Calls the model in an evaluation by itself."""

    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).loss, None, None


def test_an_evaluation_that_calls_the_model_is_refused(tmp_path: Path) -> None:
    trainer = Spec(tmp_path, kind=Calling).build()
    with pytest.raises(ValueError, match=r"as a whole model; allowed: super\(\).prediction_step") as caught:
        trainer.evaluate()
    assert "\n" not in str(caught.value)


class Asking(OverlapTrainer):
    """Calls the model with one more argument."""

    more: dict[str, Any]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, {**inputs, **self.more}, *args, **kwargs)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_a_loss_of_outputs_of_layers_is_refused(name: str, tmp_path: Path) -> None:
    trainer = Spec(tmp_path, kind=Asking, steps=1).build()
    trainer.more = {name: True}
    with pytest.raises(ValueError, match=f"{name}=True of a model in stages; allowed: False"):
        trainer.train()


def test_router_logits_that_only_the_loss_asks_for(tmp_path: Path) -> None:
    trainer = Spec(tmp_path, kind=Asking, steps=1).build()
    trainer.more = {"output_router_logits": True}
    with pytest.raises(RuntimeError, match="allowed: set it in the config before split_model"):
        trainer.train()


class Modes(OverlapTrainer):
    """Keeps the mode of the model that each loss is computed with."""

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self.modes = [*getattr(self, "modes", []), model.training]
        return super().compute_loss(model, *args, **kwargs)


def test_an_evaluation_is_no_training(tmp_path: Path) -> None:
    trainer = Spec(tmp_path, kind=Modes, steps=1).build()
    trainer.evaluate()
    assert trainer.modes == [False, False]
    trainer.train()
    assert trainer.modes == [False, False, *[True] * 4]


# --------------------------------------------------------------------------------------------------------- the rest


def one_expert_after_another() -> Any:
    """Return a model whose experts round as those of the engine: transformers' other ways round otherwise."""
    model = tiny.build("mixtral")
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("layout", ["one rank", "pp 2 × ep 2"])
def test_bf16(ranks2: Ranks, ranks4: Ranks, layout: str, tmp_path: Path) -> None:
    """Autocast around the model alone: weights stay float32. After two steps, rounding changes a token's experts."""
    ranks, sizes, _ = LAYOUTS.get(layout, (1, OverlapArguments(), 4))
    arguments, model = {**EVALUATES, "bf16": True}, {"model_init": one_expert_after_another}
    spec = Spec(tmp_path, None, trainer=model, arguments=arguments, layout=sizes, rows=40)
    expected = history(plain(spec, ranks // sizes.pp))
    exact = history(plain(replace(spec, arguments=EVALUATES, steps=1), ranks // sizes.pp))
    assert expected[0]["grad_norm"] != pytest.approx(exact[0]["grad_norm"], rel=5e-4)
    every = [_in_bf16(0, 1, spec)] if ranks == 1 else {2: ranks2, 4: ranks4}[ranks].run(_in_bf16, spec)
    for lines, types in every:
        close(shown(lines)[:3], expected[:3], 1e-3)  # two steps, and the evaluation after them
        close(shown(lines), expected, 5e-2)
        assert types == {torch.float32}


def _in_bf16(rank: int, size: int, spec: Spec) -> tuple[list[dict[str, Any]], set[torch.dtype]]:
    with launched(rank, size):
        trainer = spec.build()
        trainer.train()
        return list(trainer.state.log_history), {parameter.dtype for parameter in trainer.stages.parameters()}


def pad_with_masks(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch with a mask [B, 1, S, S] of its own."""
    batch = pad(rows)
    seen = batch["attention_mask"].bool()
    causal = torch.ones(seen.shape[1], seen.shape[1]).tril().bool()
    mask = causal & (seen[:, None, None, :] | torch.eye(seen.shape[1]).bool())
    return {**batch, "attention_mask": mask}


def test_masks_of_the_collator(tmp_path: Path) -> None:
    """The third step has two microbatches of four: the others get a token with a mask of its own."""
    spec = Spec(tmp_path, rows=20, trainer={"data_collator": pad_with_masks})
    close(history(alone(spec)), history(plain(spec)))


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        rows = Sentences(48)
        return (rows[index] for index in range(len(rows)))


def test_rows_without_a_length(ranks4: Ranks, tmp_path: Path) -> None:
    arguments = {"train_dataset": Stream()}
    spec = Spec(tmp_path, layout=OverlapArguments(pp=2), steps=2, trainer=arguments)
    expected = history(plain(spec, 2))
    for found in ranks4.run(train, spec):
        close(shown(found), expected)


def test_callbacks_and_reports(ranks2: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    arguments = {"report_to": ["tensorboard"], "include_num_input_tokens_seen": "all", "logging_steps": 2}
    spec = Spec(tmp_path, layout=OverlapArguments(pp=2), steps=4, arguments=arguments, trainer={"callbacks": [Events]})
    expected = plain(spec)
    names = ranks2.run(_events, spec)
    own = next(one for one in expected.callback_handler.callbacks if isinstance(one, Events)).names
    assert names == [own, own]
    assert own.count("substep_end") == 12
    for name, folder in (("ours", tmp_path), ("plain", tmp_path / "plain")):
        lines = [line for line in expected.state.log_history if "loss" in line]
        assert [step for step, _ in reported(folder, "loss")] == [line["step"] for line in lines], name
        assert [value for _, value in reported(folder, "loss")] == pytest.approx([line["loss"] for line in lines])
    tokens = counted(spec, 4)
    assert [value for _, value in reported(tmp_path, "tokens")] == [sum(tokens[:2]), sum(tokens[2:])]


def reported(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return steps and values of a figure that tensorboard shows for a run, whose files may be several."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: list[tuple[int, float]] = []
    for path in sorted((folder / "runs").rglob("*tfevents*")):
        events = EventAccumulator(str(path))
        events.Reload()
        if f"train/{name}" in events.Tags()["scalars"]:
            found += [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
    return found


class Events(transformers.TrainerCallback):
    """Keeps the names of the events."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.names.append("step_begin")

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.names.append("substep_end")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.names.append("pre_optimizer_step")

    def on_log(self, _: Any, state: Any, *__: Any, logs: dict[str, float], **___: Any) -> None:
        self.names.append(f"log {state.num_input_tokens_seen}")


def _events(rank: int, size: int, spec: Spec) -> list[str]:
    with launched(rank, size):
        trainer = spec.build()
        trainer.train()
        return next(one for one in trainer.callback_handler.callbacks if isinstance(one, Events)).names


class Averages(transformers.TrainerCallback):
    """Copies and saves the model after each step, as averages of weights do."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        torch.save(model, io.BytesIO())
        self.copies.append(copy.deepcopy(model))


def test_callbacks_may_copy_the_model(tmp_path: Path) -> None:
    averages = Averages()
    trainer = Spec(tmp_path, steps=2, trainer={"callbacks": [averages]}).build()
    trainer.train()
    for name, value in averages.copies[1].state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name])


def test_a_model_without_memory_is_read_from_its_folder(ranks2: Ranks, tmp_path: Path) -> None:
    tiny.build("mixtral", num_hidden_layers=2).save_pretrained(tmp_path / "start")
    spec = Spec(tmp_path, "mixtral", steps=2)
    expected = history(plain(spec))
    layout = OverlapArguments(pp=2, pretrained=str(tmp_path / "start"))
    for found in ranks2.run(train, replace(spec, layout=layout, on_meta=True)):
        close(shown(found), expected)
    with pytest.raises(ValueError, match="a model on the meta device; allowed: with pretrained= a folder"):
        replace(spec, on_meta=True).build()


def test_a_new_model_for_every_training(tmp_path: Path) -> None:
    spec = Spec(tmp_path, steps=2)
    built = spec.build()
    trainer = type(built)(
        None,
        built.args,
        data_collator=pad,
        train_dataset=built.train_dataset,
        model_init=lambda: tiny.build(spec.model, num_hidden_layers=2),
    )
    trainer.train()
    first, engine = history(trainer), trainer.engine
    trainer.train()
    assert history(trainer) == first
    assert trainer.engine is not engine


class OwnOptimizer(transformers.Trainer):
    """Makes its optimizer of the parameters of its model."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate)
        return self.optimizer


class OverlappedOwnOptimizer(OwnOptimizer, OverlapTrainer):
    pass


def new_model() -> Any:
    return tiny.build("qwen3_moe", tie_word_embeddings=True, num_hidden_layers=2)


def test_a_new_model_is_split_before_its_optimizer_is_made(ranks4: Ranks, tmp_path: Path) -> None:
    """Experts and heads of the whole model were in the optimizer, in place of this rank's."""
    spec = Spec(tmp_path, None, rows=40, trainer={"model_init": new_model}, kind=OverlappedOwnOptimizer)
    alone_spec = replace(spec, folder=tmp_path / "plain", kind=OwnOptimizer, accumulation=8)
    expected = history(alone(alone_spec))
    for found in ranks4.run(train, replace(spec, layout=OverlapArguments(pp=2))):
        close(shown(found), expected)
    same_weights(tmp_path, tmp_path / "plain")


def _with_more_batches(rank: int, size: int, spec: Spec) -> list[dict[str, float]]:
    """Train with as many microbatches as given, with more of them, and with fewer again."""
    with launched(rank, size):
        trainer = spec.build()
        lines = []
        for accumulation in (4, 6, 5):
            trainer.args.gradient_accumulation_steps = accumulation
            trainer.train()
            lines += history(trainer)
        return lines


def test_a_training_with_more_batches_a_step(ranks2: Ranks, tmp_path: Path) -> None:
    _, sizes, _ = LAYOUTS["pp 2, dualpipev"]
    spec = Spec(tmp_path, steps=2, layout=sizes, layers=4)
    expected = _with_more_batches(0, 1, replace(spec, kind=transformers.Trainer, layout=None))
    for found in ranks2.run(_with_more_batches, spec):
        close(found, expected)


class WithModes(torch.optim.SGD):
    """An optimizer with a mode, as those without a schedule; keeps the mode of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.training, self.modes = False, list[bool]()

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.modes.append(self.training)
        return super().step(*args, **kwargs)


def _modes_of_steps(rank: int, size: int, spec: Spec) -> list[bool]:
    with launched(rank, size):
        trainer = spec.build()
        trainer.train()
        return list(trainer.optimizer.optimizer.modes)


def test_an_optimizer_with_a_mode(ranks2: Ranks, tmp_path: Path) -> None:
    """An evaluation lies between the steps; the first stage never runs Trainer's own step."""
    trainer = {"optimizer_cls_and_kwargs": (WithModes, {"lr": 1e-3})}
    spec = Spec(tmp_path, layout=OverlapArguments(pp=2), trainer=trainer, arguments=EVALUATES)
    assert ranks2.run(_modes_of_steps, spec) == [[True] * 4] * 2


class Grouped(transformers.Trainer):
    """Has learning rates of its own, by the usual override."""

    def create_optimizer(self) -> Any:  # type: ignore[override]
        if self.optimizer is None:
            assert self.model.config.model_type == "qwen3_moe"
            self.optimizer = torch.optim.AdamW(grouped(self.model))
        return super().create_optimizer()


class OverlappedGrouped(Overlapped, Grouped):
    pass


class GroupedAfter(Grouped, OverlapTrainer):
    """Its method is called before the mixin's."""


class GroupedBefore(OverlapTrainer):
    """Makes its groups of the whole model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups = grouped(self.model)

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.AdamW(self.groups)
        return self.optimizer


def grouped(model: Any) -> list[dict[str, Any]]:
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    rest = [p for name, p in model.named_parameters() if "experts" not in name]
    return [{"params": experts, "lr": 1e-4, "eps": 1e-5}, {"params": rest, "lr": 3e-3, "eps": 1e-5}]


@pytest.mark.parametrize("kind", [OverlappedGrouped, GroupedAfter])
def test_an_optimizer_of_groups(ranks4: Ranks, kind: Any, tmp_path: Path) -> None:
    """Stages and experts are divided, and checkpoints are saved."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    spec = Spec(tmp_path, rows=40, layout=OverlapArguments(pp=2, ep=2), kind=kind, arguments=saving)
    one = replace(spec, folder=tmp_path / "plain", kind=Grouped, layout=None, accumulation=8, arguments={})
    expected = history(alone(one))
    for found in ranks4.run(train, spec):
        close(shown(found), expected)
    same_weights(tmp_path, tmp_path / "plain")


def test_an_optimizer_of_the_whole_model_is_refused(ranks2: Ranks, tmp_path: Path) -> None:
    """Before the first step, not at the first checkpoint."""
    spec = Spec(tmp_path, kind=GroupedBefore, layout=OverlapArguments(pp=2))
    for found in ranks2.run(_of_a_part, spec):
        assert re.match(r"model\.layers\.[01]\S+ of the whole model, .* in an optimizer; allowed: parameters", found)
        assert "\n" not in found


def test_the_number_of_parts_is_measured(ranks2: Ranks, tmp_path: Path) -> None:
    """Two steps for each of three numbers, with the losses of one part."""
    spec = Spec(tmp_path, rows=48, steps=8, layout=OverlapArguments(ep=2, parts="auto"))
    expected = history(plain(spec, 2))
    for found, chosen in ranks2.run(_with_parts, spec):
        close(shown(found), expected)
        assert chosen == [1, 2, 4]


def _with_parts(rank: int, size: int, spec: Spec) -> tuple[list[dict[str, Any]], list[int]]:
    with launched(rank, size):
        trainer = spec.build()
        trainer.train()
        tuner = trainer.engine.tuner
        assert tuner.state is not State.MEASURING
        return list(trainer.state.log_history), list(tuner.predicted)


def test_arguments_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = transformers.HfArgumentParser((transformers.TrainingArguments, OverlapArguments))
    words = ["--output_dir", "x", "--use_cpu", "--pp", "2", "--overlap", "pairs", "--parts"]
    for text, value in (("3", 3), ("auto", "auto")):
        _, found = parser.parse_args_into_dataclasses([*words, text])
        assert found == OverlapArguments(pp=2, overlap="pairs", parts=value)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses([*words, "9"])
    assert "argument --parts: invalid choice: '9' (choose from 1, 2, 3, 4, 5, 6, 7, 8, auto)" in (
        capsys.readouterr().err.replace("'auto'", "auto")
    )
    (read,) = transformers.HfArgumentParser(OverlapArguments).parse_dict({"parts": "auto", "overlap": 2})
    assert read.parts == "auto"
    assert get_args(get_type_hints(OverlapArguments)["parts"]) == (*range(1, MOST_PARTS + 1), "auto")


REFUSED: dict[str, tuple[Any, str]] = {
    "fp16": (True, "bf16=True, or neither"),
    "fp16_full_eval": (True, "bf16=True, or neither"),
    "bf16_full_eval": (True, "bf16=True, or neither"),
    "torch_compile": (True, "compiled layers inside the model"),
    "auto_find_batch_size": (True, "a per_device_train_batch_size that fits"),
    "neftune_noise_alpha": (5.0, "None"),
    "use_liger_kernel": (True, "False"),
    "eval_use_gather_object": (True, "False"),
    "save_on_each_node": (True, "False, and an output_dir that all ranks see"),
    "ddp_find_unused_parameters": (False, "None, the engine sums gradients"),
    "ddp_bucket_cap_mb": (25, "None, the engine sums gradients"),
    "ddp_broadcast_buffers": (False, "None, the engine sums gradients"),
    "ddp_static_graph": (False, "None, the engine sums gradients"),
    "debug": ("underflow_overflow", "none"),
}
REFUSED_WHEN_SET = {
    "fsdp": "full_shard",
    "deepspeed": {"zero_optimization": {"stage": 3}},
    "parallelism_config": "tp_size=2",
}
"""Trainer's own arguments would start them when they are made."""
REFUSED_BY_VALUE: dict[str, tuple[dict[str, Any], str]] = {
    "dispatch": ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True; allowed"),
    "lomo": ({"optim": "lomo"}, "optim='lomo' steps inside the backward; allowed"),
    "checkpointing": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
        "_checkpointing_kwargs with every_n_layers; allowed: use_reentrant, or recompute of OverlapArguments",
    ),
    "layerwise": ({"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise' steps inside the backward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_be_honoured(name: str, tmp_path: Path) -> None:
    if name not in transformers.TrainingArguments.__dataclass_fields__:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    value, allowed = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{name}=.* under an overlapped trainer; allowed: ") as caught:
        Spec(tmp_path, arguments={name: value}).build()
    assert str(caught.value).endswith(f"allowed: {allowed}")
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("case", REFUSED_BY_VALUE)
def test_values_that_cannot_be_honoured(case: str, tmp_path: Path) -> None:
    arguments, message = REFUSED_BY_VALUE[case]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Spec(tmp_path, arguments=arguments).build()
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(("recompute", "taken"), [("none", "block"), ("experts", "experts")])
def test_gradient_checkpointing_is_recomputation(
    recompute: Any, taken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of whole layers, if nothing else is asked for; what was given is as before."""
    spec = Spec(tmp_path, arguments={"gradient_checkpointing": True}, layout=OverlapArguments(recompute=recompute))
    trainer = alone(spec)
    said = "gradient_checkpointing=True is taken as recompute='block' of OverlapArguments: "
    assert caplog.text.count(said) == (taken == "block")
    assert trainer.overlap_args == OverlapArguments(recompute=taken)  # type: ignore[arg-type]
    assert spec.layout == OverlapArguments(recompute=recompute)
    assert not trainer.model.is_activation_checkpointing
    close(history(trainer), history(plain(spec)))


def test_arguments_that_are_set_later(tmp_path: Path) -> None:
    args = Spec(tmp_path).build().args
    for name, value in REFUSED_WHEN_SET.items():
        setattr(args, name, value)
        with pytest.raises(ValueError, match=f"{name}=.* under an overlapped trainer; allowed: pp, dp and ep"):
            check_arguments(args, OverlapArguments())
        setattr(args, name, None)
    check_arguments(args, OverlapArguments())


def test_strategies_that_differ_along_a_pipeline(tmp_path: Path) -> None:
    args = Spec(tmp_path, arguments={"train_sampling_strategy": "batch_rebalance"}).build().args
    check_arguments(args, OverlapArguments())
    with pytest.raises(ValueError, match=r"='batch_rebalance' with pp > 1; allowed: another strategy, or pp=1$"):
        check_arguments(args, OverlapArguments(pp=2))


def test_every_refused_argument_has_a_case() -> None:
    """Those of TRL are in test_sft."""
    assert {*REFUSED, *REFUSED_WHEN_SET, "activation_offloading", "padding_free"} == _REFUSED.keys()


@pytest.mark.parametrize(
    ("layout", "accumulation", "message"),
    [
        ({"schedule": "gpipe"}, 4, "schedule='gpipe' with pp=1 and gradient_accumulation_steps=4: "),
        ({"schedule": "dualpipe"}, 1, "schedule='dualpipe' with pp=1 and gradient_accumulation_steps=1: "),
        ({"pp": 2}, 4, "pp=2, dp=1, ep=0 on 1 ranks; allowed: sizes from 1 whose product is 1"),
        ({"ep": -1}, 4, "pp=1, dp=1, ep=-1 on 1 ranks; allowed: "),
        ({"overlap": "much"}, 4, "overlap='much'; allowed: serial, pairs"),
        ({"parts": 0}, 4, "parts=0; allowed: 1 to 8, or auto"),
        ({"parts": "2"}, 4, "parts='2'; allowed: 1 to 8, or auto"),
        ({"recompute": "all"}, 4, "recompute='all'; allowed: none, experts, attention, block"),
    ],
)
def test_layouts_that_cannot_be_played(layout: Any, accumulation: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Spec(tmp_path, accumulation=accumulation, layout=OverlapArguments(**layout)).build()
    assert "allowed: " in str(caught.value)
    assert "\n" not in str(caught.value)


def untokenized(**special: str) -> Any:
    """Return a tokenizer of words, without a token for padding if none is given."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, "a"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="c", **special)


def test_a_tokenizer_without_a_token_for_padding(tmp_path: Path) -> None:
    spec, tokenizer = Spec(tmp_path), untokenized()
    for collator in (
        transformers.DataCollatorWithPadding(tokenizer),
        transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        transformers.DataCollatorForSeq2Seq(tokenizer),
    ):
        with pytest.raises(
            ValueError, match=f"pad_token=None of .* of a {type(collator).__name__}; allowed: "
        ) as caught:
            replace(spec, trainer={"data_collator": collator}).build()
        assert "\n" not in str(caught.value)
        with pytest.raises(ValueError, match="have a padding token"):  # as the first batch would be
            collator([{"input_ids": [1, 2]}, {"input_ids": [1]}])
    allowed = [
        {"processing_class": tokenizer},  # with a collator that does not ask it
        {"data_collator": transformers.DataCollatorWithPadding(tokenizer, padding=False)},
        {"data_collator": transformers.DataCollatorWithPadding(untokenized(pad_token="b"))},
    ]
    for trainer in allowed:
        replace(spec, trainer=trainer).build()


def test_what_a_trainer_is_given_too_much(tmp_path: Path) -> None:
    spec = Spec(tmp_path)
    optimizer = torch.optim.SGD(tiny.build("qwen3_moe").parameters(), lr=1e-3)
    with pytest.raises(ValueError, match="optimizers with a SGD of the whole model; allowed: optimizer_cls_and_kwargs"):
        replace(spec, trainer={"optimizers": (optimizer, None)}).build()
    trainer = replace(spec, arguments={"remove_unused_columns": False}).build()
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: {**collate(rows), "weights": torch.ones(len(rows))}
    with pytest.raises(
        ValueError, match="a batch with weights, given to the model; allowed: input_ids, attention_mask, position_ids"
    ):
        trainer.train()


class Twice(OverlapTrainer):
    """Calls the model with other inputs than the batch's."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, {**inputs, "input_ids": inputs["input_ids"] + 1}, *args, **kwargs)


class Corrupting(OverlapTrainer):
    """Changes the inputs of the batch itself."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["input_ids"][:, 1] = 3
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("kind", [Twice, Corrupting])
def test_a_loss_of_other_inputs_is_refused(kind: Any, tmp_path: Path) -> None:
    """The layers have run with what the batch had before."""
    trainer = replace(Spec(tmp_path), kind=kind).build()
    with pytest.raises(
        ValueError, match=f"{kind.__name__} calls the model with another input_ids than the batch has; allowed: "
    ):
        trainer.train()


class Inside(OverlapTrainer):
    """Calls the body of the model for its hidden states."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model.model(input_ids=inputs["input_ids"]).last_hidden_state.square().mean()


def _of_a_part(rank: int, size: int, spec: Spec) -> str:
    with launched(rank, size), pytest.raises((ValueError, LostRankError)) as caught:
        spec.build().train()
    return str(caught.value)


@pytest.mark.parametrize("layout", ["ep 2", "pp 2"])
def test_a_loss_that_calls_a_part_of_the_model_is_refused(ranks2: Ranks, layout: str, tmp_path: Path) -> None:
    sizes = OverlapArguments(pp=2 if layout == "pp 2" else 1, timeout=20.0)
    for found in ranks2.run(_of_a_part, Spec(tmp_path, kind=Inside, layout=sizes)):
        assert "Inside calls its own model in a loss, of which a rank has a part; allowed: " in found
        assert "\n" not in found


@pytest.mark.parametrize("layout", ["one rank", "pp 2 × ep 2"])
def test_recompute(ranks4: Ranks, layout: str, tmp_path: Path) -> None:
    """With parts; a step is one play of the engine, and its log is of what that measured on all ranks."""
    sizes = OverlapArguments(pp=1 if layout == "one rank" else 2, recompute="block", overlap="pairs", parts=2)
    spec = Spec(tmp_path, layout=sizes, rows=40)
    expected = history(plain(spec, 1 if sizes.pp == 1 else 2))
    every = ranks4.run(_played, spec) if sizes.pp > 1 else [_played(0, 1, spec)]
    for lines, plays, nodes in every:
        close(shown(lines), expected)
        assert len(plays) == spec.steps
        assert any(node.op in RECOMPUTES for node in nodes)
        parts = {node.part for node in nodes if node.op is Op.EXPERTS}
        assert parts == ({0, 1} if sizes.pp > 1 else set())  # one rank runs layers whole
        for step, line in enumerate([line for line in lines if "exchange_hidden" in line]):
            measured = [others[step] for _, others, _ in every]
            assert line["exchange_exposed_s"] == max(exposed for exposed, _ in measured) > 0
            assert line["exchange_hidden"] == min(1 - exposed / exchange for exposed, exchange in measured)
        assert sum("exchange_hidden" in line for line in lines) == (spec.steps if sizes.pp > 1 else 0)


def _played(rank: int, size: int, spec: Spec) -> tuple[list[dict[str, Any]], list[tuple[float, float]], list[Node]]:
    """Train; return the log, the exposed and the whole time of exchanges in each play, and the last plan's nodes."""
    with launched(rank, size):
        trainer = spec.build()
        engine, plays = trainer.engine, []
        play = engine.play

        def recorded(*args: Any, **kwargs: Any) -> Any:
            found = play(*args, **kwargs)
            plays.append((found.result.overlap.exposed, found.result.overlap.exchange))
            return found

        engine.play = recorded
        trainer.train()
        return list(trainer.state.log_history), plays, list(engine.plan.ranks[engine.rank])
