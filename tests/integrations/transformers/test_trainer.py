"""OverlapTrainer against transformers' Trainer on one process with the same microbatches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from overlap1f1b.integrations.transformers import OverlapArguments, Overlapped, OverlapTrainer
from overlap1f1b.integrations.transformers.arguments import check_arguments
from tests.integrations.transformers import tiny
from tests.integrations.transformers.loops import SHOWN, Sentences, Spec, alone, history, launched, pad, train, weights
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


def counted(spec: Spec, microbatches: int) -> list[int]:
    """Return the tokens that count in each step, in the order in which Trainer reads the rows."""
    loader = replace(spec, kind=transformers.Trainer, layout=None, accumulation=1).build().get_train_dataloader()
    tokens: list[int] = []
    for epoch in range(spec.steps):
        loader.set_epoch(epoch)
        every = [int((batch["labels"][:, 1:] != -100).sum()) for batch in loader]
        tokens += [sum(every[start : start + microbatches]) for start in range(0, len(every), microbatches)]
    return tokens[: spec.steps]


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
    """All ranks log what one process logs; rows, their lengths and the tokens that count differ from rank to rank."""
    ranks, sizes, accumulation = LAYOUTS[layout]
    spec = Spec(tmp_path, model, MODELS[model], 40, accumulation, layout=sizes)
    if model == "qwen3_moe":  # the router's loss of an evaluation is that of each rank's batch: see below
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
    model = tiny.build("qwen3_moe")
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


def test_the_routers_loss_of_an_evaluation(ranks2: Ranks, tmp_path: Path) -> None:
    """It is that of Trainer over as many processes, which adds the losses of their batches."""
    spec = Spec(tmp_path, "mixtral", MODELS["mixtral"], 40, arguments=EVALUATES)
    expected = ranks2.run(train, replace(spec, folder=tmp_path / "plain", kind=transformers.Trainer))
    found = ranks2.run(train, replace(spec, layout=OverlapArguments()))
    close(shown(found[0]), shown(expected[0]))


# ------------------------------------------------------------------------------------------------------------- resume


RESUMED = {
    "on one rank": ("one rank", "one rank"),
    "on ep 2": ("ep 2", "ep 2"),
    "on pp 2 × ep 2": ("pp 2 × ep 2", "pp 2 × ep 2"),
    "from four ranks on one": ("pp 2 × ep 2", "one rank"),
    "from one rank on four": ("one rank", "pp 2 × ep 2"),
    "from stages on experts": ("pp 2, dualpipev", "ep 2"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_resume(ranks2: Ranks, ranks4: Ranks, case: str, tmp_path: Path) -> None:
    """A run that stopped after the third of six steps goes on in the middle of an epoch, as if it had not stopped."""

    def run(where: str, **changes: Any) -> list[dict[str, float]]:
        ranks, sizes, _ = LAYOUTS.get(where, (1, OverlapArguments(), 0))
        accumulation = 8 * sizes.pp // ranks
        spec = Spec(tmp_path, "mixtral", {"tie_word_embeddings": True}, 64, accumulation, 6, layout=sizes, **changes)
        if ranks == 1:
            return history(alone(spec))
        return shown({2: ranks2, 4: ranks4}[ranks].run(train, spec)[0])

    first, then = RESUMED[case]
    unbroken = run(first, arguments={"save_strategy": "steps", "save_steps": 3})
    final = weights(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink(missing_ok=True)
    again = run(then, seed=4, resume=str(tmp_path / "checkpoint-3"))
    assert len(again) == 6  # three of them from the checkpoint
    close(again, unbroken)
    found = weights(tmp_path)
    assert max(float((value - found[name]).abs().max()) for name, value in final.items()) <= 1e-6
    if case == "on one rank":
        assert again == unbroken


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
    (lines, _) = ranks2.run(train, Spec(tmp_path, arguments=arguments, layout=OverlapArguments(pp=2)))
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
    default = plain(replace(spec, folder=tmp_path / "default", trainer={}, arguments=EVALUATES))
    assert expected[0]["loss"] != history(default)[0]["loss"]
    for found in ranks2.run(train, spec):
        close(shown(found), expected)
    same_weights(tmp_path, tmp_path / "plain")


def test_each_rank_has_its_own_mean(ranks2: Ranks, tmp_path: Path) -> None:
    """As Trainer over two processes."""
    spec = Spec(tmp_path, rows=40, arguments={**EVALUATES, "average_tokens_across_devices": False})
    expected = ranks2.run(train, replace(spec, folder=tmp_path / "plain", kind=transformers.Trainer))
    found = ranks2.run(train, replace(spec, layout=OverlapArguments()))
    close(shown(found[0]), shown(expected[0]))
    assert [line["tokens"] for line in found[1] if "loss" in line] == counted(spec, 8)


def test_a_subclass_keeps_its_own_code(ranks4: Ranks, tmp_path: Path) -> None:
    spec = Spec(tmp_path, layout=OverlapArguments(pp=2), kind=OverlappedOwn, arguments=EVALUATES, rows=40)
    alone_spec = replace(spec, folder=tmp_path / "plain", layout=None, kind=Own, accumulation=8)
    alone_spec = replace(alone_spec, arguments={**EVALUATES, "per_device_eval_batch_size": 8})
    expected = alone(alone_spec)
    lines = ranks4.run(train, spec)
    for found in lines:
        close(shown(found), history(expected))
    own = [(line["right"], line["calls"]) for line in expected.state.log_history]
    for found in lines:  # the last stage's own code has run there alone
        seen = [(line["right"], line["calls"]) for line in found]
        assert [right for right, _ in seen] == [right for right, _ in own]
        assert [2 * calls for _, calls in seen] == [calls for _, calls in own]  # of two ranks with data
    assert own[-1][0] > 0
    same_weights(tmp_path, tmp_path / "plain")


def metrics(prediction: Any) -> dict[str, float]:
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"right": float(right[prediction.label_ids[:, 1:] != -100].mean()), "rows": len(prediction.label_ids)}


def test_metrics_of_logits_on_every_rank(ranks4: Ranks, tmp_path: Path) -> None:
    trainer = {"compute_metrics": metrics}
    spec = Spec(tmp_path, layout=OverlapArguments(pp=2), trainer=trainer, arguments=EVALUATES, rows=40)
    expected = [line for line in plain(spec, 2).state.log_history if "eval_right" in line]
    for lines in ranks4.run(train, spec):
        found = [line for line in lines if "eval_right" in line]
        assert [line["eval_right"] for line in found] == [line["eval_right"] for line in expected]
        assert {line["eval_rows"] for line in found} == {16}


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


# --------------------------------------------------------------------------------------------------------- the rest


def test_bf16(tmp_path: Path) -> None:
    """Autocast around the model alone: weights stay float32."""
    spec = Spec(tmp_path, "mixtral", arguments={**EVALUATES, "bf16": True})
    expected = history(plain(spec))
    trainer = alone(spec)
    close(history(trainer), expected, 1e-3)
    assert history(trainer) != history(plain(replace(spec, arguments=EVALUATES)))
    assert {parameter.dtype for parameter in trainer.stages.parameters()} == {torch.float32}


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
    assert any("tfevents" in path.name for path in tmp_path.rglob("*"))


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


def test_a_model_without_memory_is_read_from_its_folder(ranks2: Ranks, tmp_path: Path) -> None:
    tiny.build("mixtral").save_pretrained(tmp_path / "start")
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
        model_init=lambda: tiny.build(spec.model),
    )
    trainer.train()
    first, engine = history(trainer), trainer.engine
    trainer.train()
    assert history(trainer) == first
    assert trainer.engine is not engine


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": ({"fp16": True}, "fp16=True under an overlapped trainer; allowed: bf16=True, or neither"),
    "bf16_full_eval": ({"bf16_full_eval": True}, "bf16_full_eval=True under"),
    "torch_compile": ({"torch_compile": True}, "torch_compile=True under"),
    "activation_checkpointing": ({"activation_checkpointing": True}, "allowed: recompute of OverlapArguments"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "auto_find_batch_size=True under"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 under"),
    "liger": ({"use_liger_kernel": True}, "use_liger_kernel=True under"),
    "ddp": ({"ddp_bucket_cap_mb": 25}, "ddp_bucket_cap_mb=25 under"),
    "debug": ({"debug": "underflow_overflow"}, "under an overlapped trainer; allowed: none"),
    "dispatch": ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True; allowed"),
    "lomo": ({"optim": "lomo"}, "steps inside the backward; allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_cannot_be_honoured(case: str, tmp_path: Path) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Spec(tmp_path, arguments=arguments).build()
    assert "\n" not in str(caught.value)


def test_fsdp_and_deepspeed_are_refused(tmp_path: Path) -> None:
    """Trainer's own arguments would start both when they are made."""
    args = Spec(tmp_path).build().args
    for name, value in (("fsdp", "full_shard"), ("deepspeed", {"zero_optimization": {"stage": 3}})):
        setattr(args, name, value)
        with pytest.raises(ValueError, match=f"{name}=.* under an overlapped trainer; allowed: pp, dp and ep"):
            check_arguments(args, OverlapArguments())
        setattr(args, name, None)
    check_arguments(args, OverlapArguments())


@pytest.mark.parametrize(
    ("layout", "accumulation", "message"),
    [
        ({"schedule": "gpipe"}, 4, "schedule='gpipe' with pp=1 and gradient_accumulation_steps=4: "),
        ({"schedule": "dualpipe"}, 1, "schedule='dualpipe' with pp=1 and gradient_accumulation_steps=1: "),
        ({"pp": 2}, 4, "pp=2, dp=1, ep=0 on 1 ranks; allowed: sizes from 1 whose product is 1"),
        ({"ep": -1}, 4, "pp=1, dp=1, ep=-1 on 1 ranks; allowed: "),
        ({"overlap": "much"}, 4, "overlap='much'; allowed: serial, pairs"),
        ({"parts": 0}, 4, "parts=0; allowed: 1 to 8"),
        ({"recompute": "all"}, 4, "recompute='all'; allowed: none, experts, attention, block"),
    ],
)
def test_layouts_that_cannot_be_played(layout: Any, accumulation: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Spec(tmp_path, accumulation=accumulation, layout=OverlapArguments(**layout)).build()
    assert "allowed: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_trainer_is_given_too_much(tmp_path: Path) -> None:
    spec = Spec(tmp_path)
    optimizer = torch.optim.SGD(tiny.build("qwen3_moe").parameters(), lr=1e-3)
    with pytest.raises(ValueError, match="optimizers with a SGD of the whole model; allowed: optimizer_cls_and_kwargs"):
        replace(spec, trainer={"optimizers": (optimizer, None)}).build()
    with pytest.raises(
        ValueError, match=r"recompute='block' would call Own.training_step twice; allowed: none, experts"
    ):
        replace(spec, kind=OverlappedOwn, layout=OverlapArguments(recompute="block")).build()
    trainer = replace(spec, arguments={"remove_unused_columns": False}).build()
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: {**collate(rows), "weights": torch.ones(len(rows))}
    with pytest.raises(
        ValueError, match="a batch with weights; allowed: input_ids, attention_mask, position_ids, labels"
    ):
        trainer.train()


class Twice(OverlapTrainer):
    """Calls the model with other inputs than the batch's."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, {**inputs, "input_ids": inputs["input_ids"] + 1}, *args, **kwargs)


def test_a_loss_of_other_inputs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Twice calls the model with another input_ids than the batch has; allowed: "):
        replace(Spec(tmp_path), kind=Twice).build().train()


def test_recompute(tmp_path: Path) -> None:
    spec = Spec(tmp_path, layout=OverlapArguments(recompute="block", overlap="pairs", parts=2))
    close(history(alone(spec)), history(plain(spec)))
