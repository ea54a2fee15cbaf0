"""Losses, logs and batches of subclasses of Trainer under the mixin: as on one process, or refused."""

import multiprocessing
import time
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from overlap1f1b.engine import LostRankError
from overlap1f1b.integrations.transformers import OverlapArguments, OverlapTrainer
from overlap1f1b.plan import RECOMPUTES
from tests.integrations.transformers import loops, tiny
from tests.integrations.transformers.loops import EVALUATES, LAYOUTS, Sentences, Spec, pad, train
from tests.integrations.transformers.test_adapters import adapted
from tests.ranks import Ranks, over
from tests.tiers import first, wide


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


def smoothed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.2, reduction="sum") / num_items_in_batch


LOSSES: dict[str, dict[str, Any]] = {
    "label smoothing": {"arguments": {**EVALUATES, "label_smoothing_factor": 0.1}},
    "compute_loss_func": {"arguments": EVALUATES, "trainer": {"compute_loss_func": smoothed}},
}


@pytest.mark.parametrize("case", first(LOSSES, "label smoothing"))
def test_other_losses_are_trainers_own(ranks2: Ranks, case: str, tmp_path: Path) -> None:
    spec = Spec(tmp_path, layout=OverlapArguments(pp=2), **LOSSES[case])
    expected = loops.history(loops.as_plain(spec, ranks2))
    default = loops.plain(replace(spec, folder=tmp_path / "default", trainer={}, arguments={}, steps=1))
    assert expected[0]["loss"] != loops.history(default)[0]["loss"]
    loops.same_weights(tmp_path, tmp_path / "plain")


def test_label_smoothing_of_a_model_with_adapters(tmp_path: Path) -> None:
    """Trainer shifts the labels of a causal LM inside PEFT's model, too."""
    pytest.importorskip("peft")
    model = {"model_init": partial(adapted, "qwen3_moe", "everything", 2)}
    loops.as_plain(Spec(tmp_path, None, steps=2, trainer=model, arguments={"label_smoothing_factor": 0.1}))


def test_each_rank_has_its_own_mean(ranks2: Ranks, tmp_path: Path) -> None:
    """As Trainer over two processes."""
    spec = Spec(tmp_path, rows=40, steps=2, arguments={**EVALUATES, "average_tokens_across_devices": False})
    expected = ranks2.run(train, replace(spec, folder=tmp_path / "plain", kind=transformers.Trainer))
    found = ranks2.run(train, replace(spec, layout=OverlapArguments()))
    loops.close(loops.shown(found[0]), loops.shown(expected[0]))
    assert [line["tokens"] for line in found[1] if "loss" in line] == loops.counted(spec, 8)


@pytest.mark.parametrize(("ranks", "recompute"), [(2, "none"), *wide((4, "block"))])
def test_a_subclass_keeps_its_own_code(kept: dict[int, Ranks], ranks: int, recompute: Any, tmp_path: Path) -> None:
    """It runs once for each microbatch, also where layers are computed again."""
    shards = ranks // 2
    spec = Spec(tmp_path, kind=Own, arguments=EVALUATES, rows=40, layers=2 * shards)
    spec = replace(spec, layout=OverlapArguments(pp=2, recompute=recompute))
    expected = loops.plain(spec, shards)
    every = kept[ranks].run(loops.played, spec)
    own = [(line["right"], line["calls"]) for line in expected.state.log_history]
    for found, _, nodes in every:
        loops.close(loops.shown(found), loops.history(expected))
        assert any(node.op in RECOMPUTES for node in nodes) == (recompute != "none")
        # The last stage's own code has run there alone.
        assert [(line["right"], shards * line["calls"]) for line in found] == own
    assert own[-1][0] > 0


def test_a_prediction_without_labels(tmp_path: Path) -> None:
    spec = Spec(tmp_path, arguments={"per_device_eval_batch_size": 3})
    trainer, expected = spec.build(), replace(spec, kind=transformers.Trainer).build()
    rows = [{"input_ids": row["input_ids"]} for row in trainer.eval_dataset]
    for one in (trainer, expected):
        one.data_collator = lambda rows: {"input_ids": torch.stack([row["input_ids"][:3] for row in rows])}
    found, wanted = trainer.predict(rows), expected.predict(rows)
    assert found.predictions == pytest.approx(wanted.predictions, abs=1e-5)
    assert "test_loss" not in found.metrics
    assert trainer.model.training is False


class Telling(OverlapTrainer):
    """Logs while it computes a loss, also what a line of Trainer has."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.log({"rows": len(inputs["input_ids"]), "loss": -1.0})
        return super().compute_loss(model, inputs, *args, **kwargs)


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


@pytest.mark.parametrize("layout", ["pp 2, dualpipev", *wide("ep 2")])
def test_losses_that_log(ranks2: Ranks, layout: str, tmp_path: Path) -> None:
    """Their entries come with the next line, on all ranks: a line of its own would wait for ranks without a loss.

    No rank waits for one that logs alone, and an entry of its loss reaches the first rank, which may compute none.
    """
    _, sizes, accumulation = LAYOUTS[layout]
    sizes = replace(sizes, timeout=20.0)
    spec = Spec(tmp_path, kind=Telling, rows=40, accumulation=accumulation, layout=sizes, arguments=EVALUATES)
    spec = replace(spec, layers=loops.layers_of(layout))
    expected = loops.history(loops.plain(spec, 2 if layout == "ep 2" else 1))
    for found in ranks2.run(train, spec):
        own = [line for line in found if line.get("loss") == -1.0]  # where Trainer's line has none
        assert [line.pop("loss") for line in own if "eval_loss" in line] == [-1.0] * 2
        loops.close(loops.shown(found), expected)
        assert [line.get("rows") for line in found] == [2, 2, 4, 2, 4, None]
    every = ranks2.run(train, replace(spec, kind=TellingAlone, arguments={}, steps=2))
    for found in every:
        loops.close(loops.shown(found), [line for line in expected if "eval_loss" not in line][:2])
    assert [line.get("own_loss") for line in every[0]] == [1.0, None] * 2 + [None]
    assert [line.get("rows") for line in every[0]] == [None, 2] * 2 + [None]


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
    return list(train(rank, size, spec, attrgetter("read")))


def test_workers_that_draw(ranks2: Ranks, tmp_path: Path) -> None:
    """The workers of a pipeline's ranks draw the same random numbers."""
    data = {"train_dataset": DrawnRows(40)}
    arguments = {"dataloader_num_workers": 2}
    spec = Spec(tmp_path, kind=Noting, steps=2, layout=OverlapArguments(pp=2), arguments=arguments, trainer=data)
    first, second = ranks2.run(_read, spec)
    assert first == second
    assert len(first) == 8


@pytest.mark.parametrize(("strategy", "ep"), [("group_by_length", 1), *wide(("random", 2))])
def test_resuming_on_more_stages_reads_the_same_rows(
    kept: dict[int, Ranks], strategy: str, ep: int, tmp_path: Path
) -> None:
    """Ranks without random numbers of their own in the checkpoint get those of their pipeline's first rank."""
    arguments = {"train_sampling_strategy": strategy, "save_strategy": "steps", "save_steps": 3}
    spec = Spec(tmp_path, rows=16 * ep, kind=Noting, layout=OverlapArguments(ep=ep), arguments=arguments)
    spec = replace(spec, trainer={"train_dataset": DrawnRows(16 * ep)})  # two steps an epoch
    if ep == 1:
        loops.alone(spec)
    else:
        kept[ep].run(_read, spec)
    resume = str(tmp_path / "checkpoint-3")
    found = kept[2 * ep].run(_read, replace(spec, steps=6, layout=OverlapArguments(pp=2, ep=ep), resume=resume))
    assert found[:ep] == found[ep:]
    assert len({str(rows) for rows in found}) == ep
    assert len(found[0]) == 12


class RankRows(Sentences):
    """Rows of equal length, on the last rank in another order of tokens."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        self.rows = [row[:3].flip(0) if last else row[:3] for row in self.rows]


@pytest.mark.parametrize(("dp", "evaluates"), [(2, False), *wide((1, True))])
@over(4)
def test_other_rows_along_a_pipeline_are_refused(
    rank: int, size: int, dp: int, evaluates: bool, tmp_path: Path
) -> None:
    """The ranks of the other pipeline learn of it at once."""
    spec = Spec(tmp_path, steps=2, layout=OverlapArguments(pp=2, dp=dp, ep=2 // dp, timeout=30.0))
    with loops.launched(rank, size):
        trainer = replace(spec, trainer={"train_dataset": RankRows(40), "eval_dataset": RankRows(40)}).build()
        begin = time.monotonic()
        with pytest.raises((ValueError, LostRankError)) as caught:
            trainer.evaluate() if evaluates else trainer.train()
    found = str(caught.value)
    assert caught.type is (ValueError if rank % 2 else LostRankError)
    assert found.startswith("ranks of a pipeline have read different") == (rank % 2)
    assert "ranks of a pipeline have read different batches; allowed: the same rows" in found
    assert time.monotonic() - begin < 15.0


class Weighing(transformers.Trainer):
    """Weighs tokens on the model's device and rows by a column of its own, and calls the model by position."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        weight, labels = inputs.pop("weights").mean(), inputs.pop("labels")
        output = model(inputs["input_ids"], attention_mask=inputs["attention_mask"])
        by_token = torch.linspace(0.5, 1.5, tiny.V, device=model.device)
        logits, targets = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = weight * torch.nn.functional.cross_entropy(logits, targets, by_token)
        loss = loss / self.args.gradient_accumulation_steps
        return (loss, output) if return_outputs else loss


def pad_with_weights(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = pad(rows)
    return {**batch, "weights": 1.0 + batch["input_ids"][:, 0] / tiny.V}


def test_columns_of_the_loss_alone(ranks2: Ranks, tmp_path: Path) -> None:
    """The last stage has no embedding, whose device would be the model's."""
    arguments, more = {"remove_unused_columns": False, **EVALUATES}, {"data_collator": pad_with_weights}
    spec = Spec(tmp_path, kind=Weighing, arguments=arguments, trainer=more, layout=OverlapArguments(pp=2))
    loops.as_plain(spec, ranks2)


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


class Regularised(OverlapTrainer):
    """Adds a term of all parameters to the loss, after other requests of the same kind: the term would vanish."""

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, *args, **kwargs)
        for asked in (model.parameters, model.state_dict, model.modules, model.named_modules, model.children):
            with pytest.raises(ValueError, match="parameters or modules of the model in a loss"):
                asked()
        return loss + 1e-3 * sum(p.square().sum() for _, p in model.named_parameters())


class Corrupting(OverlapTrainer):
    """Changes the inputs of the batch itself."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["input_ids"][:, 1] = 3
        return super().compute_loss(model, inputs, *args, **kwargs)


class Sampling(OverlapTrainer):
    """Makes lists of rows of its own, as trainers by reinforcement do."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(model, [inputs], *args, **kwargs)


class Asking(OverlapTrainer):
    """Calls the model with one more argument, or with other inputs than the batch's."""

    def __init__(self, *args: Any, more: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.more = more

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        value = inputs["input_ids"] + 1 if self.more == "input_ids" else True
        return super().compute_loss(model, {**inputs, self.more: value}, *args, **kwargs)


class Calling(OverlapTrainer):
    """Calls the model in an evaluation by itself."""

    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).loss, None, None


def preferred(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As of losses that join columns of their own."""
    return {"chosen_input_ids": torch.ones(len(rows), 3, dtype=torch.int64)}


OTHER_INPUTS = "calls the model with another input_ids than the batch has; allowed: "
UNSUITABLE: dict[str, tuple[dict[str, Any], str]] = {
    "parameters": ({"kind": Regularised}, "parameters or modules of the model in a loss, .*; allowed: "),
    "other inputs": ({"kind": Asking, "trainer": {"more": "input_ids"}}, f"Asking {OTHER_INPUTS}"),
    "changed inputs": ({"kind": Corrupting}, f"Corrupting {OTHER_INPUTS}"),
    "lists": ({"kind": Sampling}, "^Sampling, a Trainer, has a batch of type list; allowed: trainers whose "),
    "hidden states": ({"kind": Asking, "trainer": {"more": "output_hidden_states"}}, "of a model in stages; allowed: "),
    "attentions": ({"kind": Asking, "trainer": {"more": "output_attentions"}}, "of a model in stages; allowed: False"),
    "router": ({"kind": Asking, "trainer": {"more": "output_router_logits"}}, "allowed: set it in the config before"),
    "no tokens": (
        {"trainer": {"data_collator": preferred}},
        "^OverlapTrainer, a Trainer, has a batch of chosen_input_ids; allowed: ",
    ),
    "columns": (
        {"trainer": {"data_collator": pad_with_weights}, "arguments": {"remove_unused_columns": False}},
        "a batch with weights, given to the model; allowed: input_ids, attention_mask, position_ids",
    ),
    "evaluation": ({"kind": Calling}, r"as a whole model; allowed: super\(\).prediction_step"),
}


@pytest.mark.parametrize("case", first(UNSUITABLE, "parameters"))
def test_what_trainers_do_that_cannot_be_honoured(case: str, tmp_path: Path) -> None:
    """The layers have run with what the batch had before, and a loss sees no layer."""
    changes, message = UNSUITABLE[case]
    trainer = Spec(tmp_path, steps=1, **changes).build()
    with pytest.raises((ValueError, RuntimeError), match=message) as caught:
        trainer.evaluate() if case == "evaluation" else trainer.train()
    assert "\n" not in str(caught.value)


class Inside(OverlapTrainer):
    """Calls the body of the model for its hidden states."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model.model(input_ids=inputs["input_ids"]).last_hidden_state.square().mean()


@pytest.mark.parametrize("layout", ["ep 2", *wide("pp 2")])
def test_a_loss_that_calls_a_part_of_the_model_is_refused(ranks2: Ranks, layout: str, tmp_path: Path) -> None:
    sizes = OverlapArguments(pp=2 if layout == "pp 2" else 1, timeout=20.0)
    for found in ranks2.run(loops.refused, Spec(tmp_path, kind=Inside, layout=sizes)):
        assert "Inside calls its own model in a loss, of which a rank has a part; allowed: " in found
        assert "\n" not in found
