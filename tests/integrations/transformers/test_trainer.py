"""OverlapTrainer against transformers' Trainer on one process with the same microbatches."""

import copy
import io
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from overlap1f1b.integrations.transformers import OverlapArguments, OverlapTrainer
from overlap1f1b.plan import RECOMPUTES, Op
from overlap1f1b.transport.groups import Groups
from tests.integrations.transformers import loops, tiny
from tests.integrations.transformers.loops import EVALUATES, LAYOUTS, Sentences, Spec, pad, train
from tests.ranks import Ranks
from tests.tiers import first, wide

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"tie_word_embeddings": True},
    "mixtral": {"output_router_logits": True},
}


@pytest.mark.parametrize("model", first(MODELS, "qwen3_moe"))
def test_on_one_rank(model: str, tmp_path: Path) -> None:
    """The last step of an epoch has two microbatches of four."""
    spec = Spec(tmp_path, model, MODELS[model], rows=12, arguments=EVALUATES)
    expected = loops.plain(spec)
    trainer = loops.alone(spec)
    loops.close(loops.history(trainer), loops.history(expected))
    loops.same_weights(tmp_path, tmp_path / "plain")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in trainer.stages.state_dict().items())
    torch.save(trainer.model, io.BytesIO())  # as callbacks do, which average weights
    copied = copy.deepcopy(trainer.model).state_dict()
    assert all(torch.equal(value, copied[name]) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("layout", "model", "config"),
    [
        ("ep 2", "mixtral", {}),
        *wide(
            ("pp 2 × ep 2", "qwen3_moe", MODELS["qwen3_moe"]),
            ("pp 2, dualpipev", "mixtral", MODELS["mixtral"]),
            ("dp 2 × ep 2", "qwen3_moe", MODELS["qwen3_moe"]),
        ),
    ],
)
def test_over_ranks(kept: dict[int, Ranks], layout: str, model: str, config: dict[str, Any], tmp_path: Path) -> None:
    """All ranks log what one process logs; rows, their lengths and the tokens that count differ from rank to rank."""
    ranks, sizes, accumulation = LAYOUTS[layout]
    given = {"accumulation": accumulation, "layout": sizes, "layers": loops.layers_of(layout)}
    spec = Spec(tmp_path, model, config, rows=40, **given)
    if "output_router_logits" not in config:  # the router's loss of an evaluation is that of each rank's batch: below
        spec = replace(spec, arguments=EVALUATES)
    expected = loops.history(loops.plain(spec, ranks // sizes.pp))
    tokens = loops.counted(spec, spec.accumulation * ranks // sizes.pp)
    for found in kept[ranks].run(train, spec):
        loops.close(loops.shown(found), expected)
        logged = [line for line in found if "loss" in line]
        if layout == "pp 2, dualpipev":  # no ranks share experts
            assert not any(name.startswith("exchange") for line in logged for name in line)
        else:
            assert all(0 <= line["exchange_hidden"] <= 1 and line["exchange_exposed_s"] > 0 for line in logged)
        assert [line["tokens"] for line in logged] == tokens
    loops.same_weights(tmp_path, tmp_path / "plain")


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
    loops.as_plain(spec, ranks2, 2)
    loops.same_weights(tmp_path, tmp_path / "plain")


@pytest.mark.parametrize("layout", ["ep 2", *wide("pp 2 × ep 2")])
def test_the_routers_loss_of_an_evaluation(kept: dict[int, Ranks], layout: str, tmp_path: Path) -> None:
    """It is that of Trainer over as many processes with data, which adds the losses of their batches."""
    ranks, sizes, accumulation = LAYOUTS[layout]
    spec = Spec(tmp_path, "mixtral", MODELS["mixtral"], rows=40, accumulation=accumulation, arguments=EVALUATES)
    expected = loops.shown(kept[2].run(train, replace(spec, folder=tmp_path / "plain", kind=transformers.Trainer))[0])
    assert any("eval_loss" in line for line in expected)
    loops.same_logs(kept[ranks].run(train, replace(spec, layout=sizes)), expected)


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
    spec = Spec(tmp_path, None, steps=2, arguments=EVALUATES, trainer=trainer, layout=OverlapArguments(ep=2))
    alone = loops.history(loops.plain(spec, 2))
    twice = [{name: v * (1 + (name == "eval_loss")) for name, v in line.items()} for line in alone]
    expected = loops.shown(ranks2.run(train, replace(spec, kind=transformers.Trainer, layout=None))[0])
    for found in ranks2.run(train, spec):
        loops.close(loops.shown(found), expected)
        loops.close(loops.shown(found), twice, 5e-5)


# ------------------------------------------------------------------------------------------------------------- resume


RESUMED = {
    "from stages on experts": ("pp 2, dualpipev", "ep 2"),
    "on four ranks, and from them on one": ("pp 2 × ep 2", "pp 2 × ep 2", "one rank"),
    "on one rank, and from it on four": ("one rank", "one rank", "pp 2 × ep 2"),
}


@pytest.mark.parametrize("case", first(RESUMED, "from stages on experts"))
def test_resume(kept: dict[int, Ranks], case: str, tmp_path: Path) -> None:
    """A run that stopped after the second of three steps goes on in the middle of an epoch, as if it had not."""

    def run(where: str, **changes: Any) -> list[dict[str, float]]:
        ranks, sizes, _ = LAYOUTS.get(where, (1, OverlapArguments(), 0))
        config, layers = {"tie_word_embeddings": True}, max(map(loops.layers_of, RESUMED[case]))
        given = {"rows": 48, "accumulation": 8 * sizes.pp // ranks, "layout": sizes, "layers": layers}
        spec = Spec(tmp_path, "mixtral", config, **given, **changes)
        if ranks == 1:
            return loops.history(loops.alone(spec))
        return loops.shown(kept[ranks].run(train, spec)[0])

    first, *places = RESUMED[case]
    unbroken = run(first, arguments={"save_strategy": "steps", "save_steps": 2})
    final = loops.weights(tmp_path)
    if first != "one rank":
        weights_are_written_once(tmp_path / "checkpoint-2")
    for then in places:
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()
        again = run(then, seed=4, resume=str(tmp_path / "checkpoint-2"))
        assert len(again) == 3, then  # two of them from the checkpoint
        loops.close(again, unbroken)
        loops.same_weights(tmp_path, final)
        if first == then == "one rank":
            assert again == unbroken


@pytest.mark.parametrize("where", ["one rank", *wide("pp 2 × ep 2")])
def test_random_numbers_go_on(ranks4: Ranks, where: str, tmp_path: Path) -> None:
    """With dropout, in the middle of an epoch; the batches that are read again draw none of the model's numbers."""
    sizes = OverlapArguments(pp=2) if where != "one rank" else OverlapArguments()
    config = {"attention_dropout": 0.3, "tie_word_embeddings": True}

    def run(**changes: Any) -> list[dict[str, float]]:
        spec = Spec(tmp_path, "mixtral", config, rows=64, accumulation=2, layout=sizes, **changes)
        return loops.history(loops.alone(spec)) if where == "one rank" else loops.shown(ranks4.run(train, spec)[0])

    unbroken = run(arguments={"save_strategy": "steps", "save_steps": 2})
    assert run(seed=4, resume=str(tmp_path / "checkpoint-2")) == unbroken
    for file in (tmp_path / "checkpoint-2").glob("rng_state*"):
        file.unlink()
    assert run(seed=4, resume=str(tmp_path / "checkpoint-2")) != unbroken


def weights_are_written_once(folder: Path) -> None:
    """The engine's checkpoint has what the folder around it has not."""
    assert not {"optimizer.pt", "scheduler.pt"} & {path.name for path in folder.iterdir()}
    (step,) = (folder / "overlap1f1b").iterdir()
    stored = FileSystemReader(step).read_metadata().state_dict_metadata
    assert {name for name in stored if not name.startswith("optimizer.")} == {"run", "state.scheduler"}
    assert len(stored) > 2


def test_callbacks_that_stop_and_checkpoints_that_stay(ranks2: Ranks, tmp_path: Path) -> None:
    """Patience goes on over stages in place of one rank; best and last checkpoint stay; the best is loaded."""
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    arguments |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "load_best_model_at_end": True}
    arguments |= {"metric_for_best_model": "loss", "greater_is_better": False}
    arguments |= {"lr_scheduler_type": "constant", "restore_callback_states_from_checkpoint": True}
    stopping = {"callbacks": [transformers.EarlyStoppingCallback(2)]}
    spec = Spec(tmp_path, layers=4, rows=48, steps=8, arguments=arguments, trainer=stopping, accumulation=2)
    expected = loops.plain(spec)
    assert expected.state.global_step == 3  # the best evaluation was the first
    loops.alone(replace(spec, steps=2, arguments={**arguments, "load_best_model_at_end": False}))
    spec = replace(spec, layout=OverlapArguments(pp=2), seed=4, resume=str(tmp_path / "checkpoint-2"))
    for steps, lines in ranks2.run(train, spec, attrgetter("state.global_step", "state.log_history")):
        assert steps == 3
        loops.close(loops.shown(lines), loops.history(expected))
    for folder in (tmp_path, tmp_path / "plain"):
        assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-3"}
    loops.same_weights(tmp_path, tmp_path / "checkpoint-1", 0.0)
    # Not with what Trainer has at its end: transformers 5.23 reads no experts of the best checkpoint.
    # Without warm-up Adam's first step is large.
    loops.same_weights(tmp_path, tmp_path / "plain" / "checkpoint-1", 5e-6)


def test_weights_of_trainer_go_on_without_its_optimizer(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    loops.plain(Spec(tmp_path, steps=2, arguments=saves))
    folder = tmp_path / "plain" / "checkpoint-2"
    trainer = Spec(tmp_path, seed=4).build()
    trainer._load_from_checkpoint(str(folder))
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in trainer.stages.state_dict().items())
    loops.plain(Spec(tmp_path, steps=2, arguments={**saves, "save_only_model": False}))
    with pytest.raises(ValueError, match="the optimizer of a plain Trainer; allowed: "):
        trainer.train(resume_from_checkpoint=str(folder))


# --------------------------------------------------------------------------------------------------------- the rest


def one_expert_after_another() -> Any:
    """Return a model whose experts round as those of the engine: transformers' other ways round otherwise."""
    model = tiny.build("mixtral")
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("layout", ["one rank", *wide("pp 2 × ep 2")])
def test_bf16(ranks4: Ranks, layout: str, tmp_path: Path) -> None:
    """Autocast around the model alone: weights stay float32. After two steps, rounding changes a token's experts."""
    ranks, sizes, _ = LAYOUTS.get(layout, (1, OverlapArguments(), 4))
    arguments, model = {**EVALUATES, "bf16": True}, {"model_init": one_expert_after_another}
    spec = Spec(tmp_path, None, trainer=model, arguments=arguments, layout=sizes, rows=40)
    expected = loops.history(loops.plain(spec, ranks // sizes.pp))
    exact = loops.history(loops.plain(replace(spec, arguments=EVALUATES, steps=1), ranks // sizes.pp))
    assert expected[0]["grad_norm"] != pytest.approx(exact[0]["grad_norm"], rel=5e-4)
    for lines in [loops.alone(spec).state.log_history] if ranks == 1 else ranks4.run(train, spec):
        loops.close(loops.shown(lines)[:3], expected[:3], 1e-3)  # two steps, and the evaluation after them
        loops.close(loops.shown(lines), expected, 5e-2)
    assert {value.dtype for value in loops.weights(tmp_path).values()} == {torch.float32}


def pad_with_masks(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch with a mask [B, 1, S, S] of its own."""
    batch = pad(rows)
    seen = batch["attention_mask"].bool()
    causal = torch.ones(seen.shape[1], seen.shape[1]).tril().bool()
    mask = causal & (seen[:, None, None, :] | torch.eye(seen.shape[1]).bool())
    return {**batch, "attention_mask": mask}


def test_masks_of_the_collator(tmp_path: Path) -> None:
    """The third step has two microbatches of four: the others get a token with a mask of its own."""
    loops.as_plain(Spec(tmp_path, rows=20, trainer={"data_collator": pad_with_masks}))


@pytest.mark.parametrize("layout", ["ep 2", *wide("pp 2 × ep 2")])
def test_rows_without_a_length(kept: dict[int, Ranks], layout: str, tmp_path: Path) -> None:
    (ranks, sizes, _), rows = LAYOUTS[layout], {"train_dataset": loops.Stream(Sentences(48))}
    loops.as_plain(Spec(tmp_path, layout=sizes, steps=2, trainer=rows), kept[ranks], 2)


def test_callbacks_and_reports(ranks2: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    arguments = {"report_to": ["tensorboard"], "include_num_input_tokens_seen": "all", "logging_steps": 2}
    spec = Spec(tmp_path, layout=OverlapArguments(pp=2), steps=4, arguments=arguments, trainer={"callbacks": [Events]})
    expected = loops.plain(spec)
    own = _events(expected)
    assert ranks2.run(train, spec, _events) == [own, own]
    assert own.count("substep_end") == 12
    for name, folder in (("ours", tmp_path), ("plain", tmp_path / "plain")):
        lines = [line for line in expected.state.log_history if "loss" in line]
        assert [step for step, _ in reported(folder, "loss")] == [line["step"] for line in lines], name
        assert [value for _, value in reported(folder, "loss")] == pytest.approx([line["loss"] for line in lines])
    tokens = loops.counted(spec, 4)
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
        for name in ("step_begin", "substep_end", "pre_optimizer_step"):
            setattr(self, f"on_{name}", lambda *_, name=name, **__: self.names.append(name))

    def on_log(self, _: Any, state: Any, *__: Any, logs: dict[str, float], **___: Any) -> None:
        self.names.append(f"log {state.num_input_tokens_seen}")


def _events(trainer: Any) -> list[str]:
    (events,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, Events)]
    return events.names


def test_a_model_without_memory_is_read_from_its_folder(ranks2: Ranks, tmp_path: Path) -> None:
    tiny.build("mixtral", num_hidden_layers=2).save_pretrained(tmp_path / "start")
    spec = Spec(tmp_path, "mixtral", steps=2)
    expected = loops.history(loops.plain(spec))
    layout = OverlapArguments(pp=2, pretrained=str(tmp_path / "start"))
    loops.same_logs(ranks2.run(train, replace(spec, layout=layout, on_meta=True)), expected)
    with pytest.raises(ValueError, match="a model on the meta device; allowed: with pretrained= a folder"):
        replace(spec, on_meta=True).build()


def test_a_new_model_for_every_training(tmp_path: Path) -> None:
    trainer = Spec(tmp_path, None, steps=2, trainer={"model_init": new_model}).build()
    trainer.train()
    first, engine = loops.history(trainer), trainer.engine
    trainer.train()
    assert loops.history(trainer) == first
    assert trainer.engine is not engine


class WithModes(torch.optim.SGD):
    """An optimizer with a mode, as those without a schedule; keeps the mode of each step."""

    training = False

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.modes = [*getattr(self, "modes", []), self.training]
        return super().step(*args, **kwargs)


def test_an_optimizer_with_a_mode(ranks2: Ranks, tmp_path: Path) -> None:
    """An evaluation lies between the steps; the first stage never runs Trainer's own step."""
    trainer = {"optimizer_cls_and_kwargs": (WithModes, {"lr": 1e-3})}
    spec = Spec(tmp_path, layout=OverlapArguments(pp=2), trainer=trainer, arguments=EVALUATES)
    assert ranks2.run(train, spec, attrgetter("optimizer.optimizer.modes")) == [[True] * 3] * 2


class Grouped(transformers.Trainer):
    """Has learning rates of its own, by the usual override."""

    def create_optimizer(self) -> Any:  # type: ignore[override]
        if self.optimizer is None:
            assert self.model.config.model_type == "qwen3_moe"
            self.optimizer = torch.optim.AdamW(grouped(self.model))
        return super().create_optimizer()


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


def new_model() -> Any:
    return tiny.build("qwen3_moe", tie_word_embeddings=True, num_hidden_layers=2)


def test_an_optimizer_of_groups(ranks2: Ranks, tmp_path: Path) -> None:
    """Stages or experts are divided, checkpoints are saved, and a new model is split before its optimizer is made."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    spec = Spec(tmp_path, rows=40, kind=Grouped, layout=OverlapArguments(pp=2), arguments=saving)
    anew = replace(spec, kind=GroupedAfter, model=None, arguments={}, trainer={"model_init": new_model})
    for one, shards in ((spec, 1), (replace(anew, layout=OverlapArguments(ep=2)), 2)):
        loops.as_plain(one, ranks2, shards, kind=Grouped, arguments={})
        loops.same_weights(tmp_path, tmp_path / "plain")


def test_an_optimizer_of_the_whole_model_is_refused(ranks2: Ranks, tmp_path: Path) -> None:
    """Before the first step, not at the first checkpoint."""
    spec = Spec(tmp_path, kind=GroupedBefore, layout=OverlapArguments(pp=2))
    for found in ranks2.run(loops.refused, spec):
        assert re.match(r"model\.layers\.[01]\S+ of the whole model, .* in an optimizer; allowed: parameters", found)
        assert "\n" not in found


def _numbers(rank: int, size: int, spec: Spec) -> list[Any]:
    """Train and evaluate with other accumulations each time; return the log."""
    lines = list[Any]()
    with loops.launched(rank, size):
        trainer = spec.build()
        with patch.object(Groups, "new", side_effect=AssertionError("a new communicator")):
            for number, accumulation in enumerate([4, 5, 4]):
                trainer.args.gradient_accumulation_steps = accumulation
                trainer.train()
                trainer.evaluate(Sentences(3 + 5 * (number % 2), seed=9))
                lines += loops.history(trainer)
    return lines


@pytest.mark.parametrize("pp", [1, *wide(2)])
def test_one_engine_plays_any_number_of_microbatches(kept: dict[int, Ranks], pp: int, tmp_path: Path) -> None:
    """Accumulations that change between runs, shorter last steps of epochs, and evaluations of any size."""
    layout = OverlapArguments(pp=pp, ep=2)
    spec = Spec(tmp_path, rows=32, steps=2, arguments={"per_device_eval_batch_size": 2}, layout=layout)
    own = replace(spec, folder=tmp_path / "plain", kind=transformers.Trainer, layout=None)
    expected = kept[2].run(_numbers, own, timeout=120)[0]
    for lines in kept[2 * pp].run(_numbers, spec, timeout=280):
        loops.close(lines, expected)


@pytest.mark.parametrize("layout", ["one rank", *wide("pp 2 × ep 2")])
def test_recompute(ranks4: Ranks, layout: str, tmp_path: Path) -> None:
    """With parts; a step is one play of the engine, and its log is of what that measured on all ranks."""
    sizes = OverlapArguments(pp=1 if layout == "one rank" else 2, recompute="block", overlap="pairs", parts=2)
    spec = Spec(tmp_path, layout=sizes, rows=40)
    expected = loops.history(loops.plain(spec, 1 if sizes.pp == 1 else 2))
    every = ranks4.run(loops.played, spec) if sizes.pp > 1 else [loops.played(0, 1, spec)]
    for lines, plays, nodes in every:
        loops.close(loops.shown(lines), expected)
        assert len(plays) == spec.steps
        assert any(node.op in RECOMPUTES for node in nodes)
        parts = {node.part for node in nodes if node.op is Op.EXPERTS}
        assert parts == ({0, 1} if sizes.pp > 1 else set())  # one rank runs layers whole
        for step, line in enumerate([line for line in lines if "exchange_hidden" in line]):
            measured = [others[step] for _, others, _ in every]
            assert line["exchange_exposed_s"] == max(exposed for exposed, _ in measured) > 0
            assert line["exchange_hidden"] == min(1 - exposed / exchange for exposed, exchange in measured)
        assert sum("exchange_hidden" in line for line in lines) == (spec.steps if sizes.pp > 1 else 0)
