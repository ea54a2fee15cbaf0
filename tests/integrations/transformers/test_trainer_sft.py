"""TRL's trainers under the mixin, against themselves on one process; skipped without TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from overlap1f1b.integrations.transformers import OverlapArguments
from tests.integrations.transformers import tiny
from tests.integrations.transformers.loops import SHOWN, launched, mixed, same_weights, weights
from tests.ranks import Ranks
from tests.tiers import first, wide

METRICS = ("mean_token_accuracy", "entropy", "num_tokens", "aux_loss", "eval_mean_token_accuracy", "eval_entropy")


@dataclass(frozen=True)
class Case:
    """A run of a trainer of rows, whose first part is a prompt; without a layout of SFTTrainer itself.

    If rows are ``even``, all have equally many tokens, and the router has no loss: only then several ranks give what
    one process gives, since SFTTrainer's accuracies are means over microbatches. Otherwise they give what SFTTrainer
    gives over as many ranks with data. With ``checkpoints`` SFTConfig keeps its ``gradient_checkpointing=True``.
    """

    folder: Path
    model: str = "qwen3_moe"
    loss: str = "nll"
    accumulation: int = 4
    rows: int = 4
    even: bool = False
    lora: bool = False
    checkpoints: bool = False
    layout: OverlapArguments | None = None
    saves: bool = False
    resume: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 3e-3,
    "adam_epsilon": 1e-5,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "dataloader_pin_memory": False,
}
"""What all of TRL's configurations here have."""


def words() -> Any:
    """Return a tokenizer of numbers."""
    model = models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **{str(n): n for n in range(3, tiny.V)}}, "3")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def built(case: Case) -> Any:
    from datasets import Dataset
    from datasets.table import InMemoryTable

    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 9, (40,), generator=generator).tolist()
    ids = [torch.randint(3, tiny.V, (7 if case.even else length,), generator=generator).tolist() for length in lengths]
    columns = {"input_ids": ids, "labels": [[-100, -100, *row[2:]] for row in ids]}
    data = Dataset(InMemoryTable.from_pydict(columns), fingerprint="rows")
    eval_data = Dataset(InMemoryTable.from_pydict({name: rows[:16] for name, rows in columns.items()}), fingerprint="e")
    args = SFTConfig(
        str(case.folder),
        per_device_eval_batch_size=case.rows,
        gradient_accumulation_steps=case.accumulation,
        max_steps=3,
        warmup_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps" if case.saves else "no",
        save_steps=2,
        **COMMON,
        gradient_checkpointing=case.layout is not None and case.checkpoints,
        loss_type=case.loss,
        router_aux_loss_coef=0.0 if case.even else 0.01,
        **{"dataset_kwargs": {"skip_prepare_dataset": True}, **case.options},
    )
    more: dict[str, Any] = {} if case.layout is None else {"overlap_args": case.layout}
    if case.lora:
        import peft

        targets = ["experts.gate_up_proj", "experts.down_proj"]
        more["peft_config"] = peft.LoraConfig(r=3, target_modules="all-linear", target_parameters=targets)
    model = tiny.build(case.model, seed=3 if case.resume is None else 4, num_hidden_layers=2)
    kind = SFTTrainer if case.layout is None else mixed(SFTTrainer)
    return kind(model, args, processing_class=words(), train_dataset=data, eval_dataset=eval_data, **more)


def trained(rank: int, size: int, case: Case) -> list[dict[str, float]]:
    with launched(rank, size):
        trainer = built(case)
        trainer.train(resume_from_checkpoint=case.resume)
        trainer.save_model()
        return list(trainer.state.log_history)


LAYOUTS = {
    "one rank": OverlapArguments(ep=1),
    "ep 2": OverlapArguments(ep=2),
    "pp 2": OverlapArguments(pp=2, ep=1),
    "pp 2 × ep 2": OverlapArguments(pp=2, ep=2),
}


@pytest.mark.parametrize("layout", ["one rank", *wide("pp 2 × ep 2")])
def test_another_loss(kept: dict[int, Ranks], layout: str, tmp_path: Path) -> None:
    """SFTTrainer on one process has all microbatches; the tests below have its default loss."""
    compare(kept, Case(tmp_path, loss="dft", even=layout != "one rank", layout=LAYOUTS[layout]))


@pytest.mark.parametrize(("model", "layout"), [("qwen3_moe", "ep 2"), *wide(("mixtral", "pp 2 × ep 2"))])
def test_rows_of_uneven_lengths(kept: dict[int, Ranks], layout: str, model: str, tmp_path: Path) -> None:
    """With padding, other counts of tokens on each rank and the router's loss, beside SFTTrainer over the same data."""
    compare(kept, Case(tmp_path, model, layout=LAYOUTS[layout], checkpoints=layout == "ep 2"))


@pytest.mark.parametrize(("first", "then"), [("pp 2", "one rank"), *wide(("pp 2 × ep 2", "ep 2"))])
def test_sft_goes_on(kept: dict[int, Ranks], first: str, then: str, tmp_path: Path) -> None:
    """From stages on ranks without; TRL counts the tokens of a run since its start."""
    case = Case(tmp_path, "mixtral", layout=LAYOUTS[first], saves=True)
    unbroken = run(kept, case)[0]
    final = weights(tmp_path)
    resume = str(tmp_path / "checkpoint-2")
    for file in tmp_path.glob("model*.safetensors"):
        file.unlink()
    for found in run(kept, replace(case, layout=LAYOUTS[then], saves=False, resume=resume)):
        same(found, unbroken, [name for name in (*SHOWN, *METRICS) if name != "num_tokens"])
    same_weights(tmp_path, final)


@pytest.mark.parametrize("layout", ["one rank", *wide("pp 2 × ep 2")])
def test_sft_of_adapters(kept: dict[int, Ranks], layout: str, tmp_path: Path) -> None:
    """SFTTrainer puts the adapters around the model; the adapters alone are saved."""
    pytest.importorskip("peft")
    even = layout != "one rank"
    compare(kept, Case(tmp_path, even=even, lora=True, checkpoints=even, layout=LAYOUTS[layout]))
    assert (tmp_path / "adapter_model.safetensors").exists()


def run(kept: dict[int, Ranks], case: Case, shards: int = 1) -> list[list[dict[str, float]]]:
    """Train on the ranks of its layout, without one on ``shards``; return the logs."""
    ranks = shards if case.layout is None else case.layout.pp * case.layout.ep
    return kept[ranks].run(trained, case) if ranks > 1 else [trained(0, 1, case)]


def compare(kept: dict[int, Ranks], case: Case) -> None:
    assert case.layout is not None
    shards, plain = case.layout.ep, replace(case, folder=case.folder / "plain", layout=None)
    if case.even:  # one process has the microbatches of all ranks
        plain = replace(plain, accumulation=case.accumulation * shards, rows=case.rows * shards)
    expected = run(kept, plain, 1 if case.even else shards)[0]
    for found in run(kept, case):
        same(found, expected, (*SHOWN, *METRICS))
    assert any("mean_token_accuracy" in line and "entropy" in line for line in expected)
    assert case.even or any(line.get("aux_loss", 0) > 0 for line in expected)
    # The first gradients of lora_A are zero, and Adam divides by them.
    same_weights(case.folder, plain.folder, 5e-6 if case.lora else 1e-6)


def same(found: list[dict[str, float]], expected: list[dict[str, float]], names: Sequence[str]) -> None:
    for one, other in zip(found, expected, strict=True):
        wanted = {name: other[name] for name in names if name in other}
        assert {name: one[name] for name in wanted} == pytest.approx(wanted, rel=5e-6, abs=5e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "activation_offloading": ({"activation_offloading": True}, "=True under an .*; allowed: recompute of Overl"),
}


@pytest.mark.parametrize("name", first(REFUSED, "activation_offloading"))
def test_what_is_refused_of_sft(name: str, tmp_path: Path) -> None:
    """Offloading around a step would cover the rest of the model alone; packed documents come without padding."""
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{name}{message}") as caught:
        built(Case(tmp_path, layout=OverlapArguments(), options=options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("bfd", "ep 2"),
        *wide(("bfd", "pp 2 × ep 2"), ("bfd", "one rank"), ("wrapped", "pp 2"), ("padding_free", "pp 2")),
    ],
)
def test_packed_rows(kept: dict[int, Ranks], strategy: str, layout: str, tmp_path: Path) -> None:
    """By TRL's default a batch is one row without padding, whose position_ids say where a document begins."""
    options: dict[str, Any] = {"dataset_kwargs": None, "max_length": 16, "packing": True, "packing_strategy": strategy}
    if strategy == "padding_free":
        options = {"dataset_kwargs": None, "max_length": None, "padding_free": True}
    compare(kept, Case(tmp_path, layout=LAYOUTS[layout], options=options))


def aligned(
    rank: int,
    size: int,
    kind: Any,
    folder: Path,
    layout: OverlapArguments | None,
    coefficient: float = 0.0,
    **sizes: Any,
) -> list[dict[str, float]]:
    """Train beside a reference model, by pairs or on completions that are good or bad; return the log."""
    from datasets import Dataset

    rows = torch.randint(3, tiny.V, (16, 9), generator=torch.Generator().manual_seed(5)).tolist()

    def texts(begin: int, ends: Sequence[int], before: str = "") -> list[str]:
        return [before + " ".join(map(str, row[begin:end])) for row, end in zip(rows, ends, strict=True)]

    columns: dict[str, Any] = {"prompt": texts(0, [3] * 16)}
    accumulation = 1 if layout is not None and layout.ep == 2 else 2
    given = {
        "router_aux_loss_coef": coefficient,
        "gradient_accumulation_steps": accumulation,
        "save_strategy": "no",
        **COMMON,
    }
    more: dict[str, Any] = {} if layout is None else {"overlap_args": layout}
    with launched(rank, size):
        if issubclass(kind, DPOTrainer):
            columns |= {"chosen": texts(3, [5] * 16), "rejected": texts(5, [9] * 16)}
            args = DPOConfig(str(folder), max_steps=3, **given)
        else:  # without the KL term
            columns["completion"] = texts(3, [5 + number % 4 for number in range(16)], " ")
            columns["label"] = [row[0] % 2 == 0 for row in rows]
            args = KTOConfig(str(folder), max_steps=2, loss_type="apo_zero_unpaired", **given)
        more |= {"train_dataset": Dataset.from_dict(columns), "processing_class": words()}
        model, reference = (tiny.build("qwen3_moe", seed=seed, num_hidden_layers=2, **sizes) for seed in (3, 4))
        trainer = (kind if layout is None else mixed(kind))(model, ref_model=reference, args=args, **more)
        trainer.train()
        return list(trainer.state.log_history)


@pytest.mark.parametrize("layout", [OverlapArguments(ep=2), *wide(OverlapArguments(pp=2))])
def test_preferences(ranks2: Ranks, layout: OverlapArguments, tmp_path: Path) -> None:
    """A reference model of its own runs whole on each rank."""
    expected = aligned(0, 1, DPOTrainer, tmp_path, None)
    for found in ranks2.run(aligned, DPOTrainer, tmp_path, layout):
        same(found, expected, SHOWN)


def test_the_routers_loss_of_pairs(tmp_path: Path) -> None:
    """TRL's DPOTrainer asks the model for router logits, and does not set its config as SFTTrainer does."""
    more = OverlapArguments(), 0.01
    with pytest.raises(
        ValueError, match=r"^DPOTrainer asks for router logits, by router_aux_loss_coef, .*; allowed: T"
    ):
        aligned(0, 1, DPOTrainer, tmp_path, *more)
    found, expected = (
        aligned(0, 1, DPOTrainer, tmp_path, of, 0.01, output_router_logits=True) for of in (more[0], None)
    )
    same(found, expected, (*SHOWN, "aux_loss"))
    assert any(line.get("aux_loss", 0) > 0 for line in expected)


def test_completions_that_are_sampled(tmp_path: Path) -> None:
    """GRPOTrainer makes its own batches, which are lists."""
    from datasets import Dataset

    args = GRPOConfig(str(tmp_path), max_steps=1, num_generations=2, max_completion_length=2, **COMMON)
    trainer = mixed(GRPOTrainer)(
        tiny.build("qwen3_moe", seed=3, num_hidden_layers=2), lambda completions, **_: [0.0] * len(completions),
        args, train_dataset=Dataset.from_dict({"prompt": ["3 4"] * 8}), processing_class=words(),
        overlap_args=OverlapArguments(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"GRPOTrainer, a GRPOTrainer, has a batch of type list; allowed: trainers "):
        trainer.train()


def test_judgements(ranks2: Ranks, tmp_path: Path) -> None:
    """KTOTrainer moves a batch to the accelerator's device, which must not copy it."""
    expected = aligned(0, 1, KTOTrainer, tmp_path, None)
    for found in ranks2.run(aligned, KTOTrainer, tmp_path, OverlapArguments(pp=2)):
        same(found, expected, (*SHOWN, "rewards/chosen", "logps/rejected"))
