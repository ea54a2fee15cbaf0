"""TRL's trainers under the mixin, against themselves on one process; skipped without TRL."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import torch
import transformers
from datasets import Dataset
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from overlap1f1b.integrations.transformers import OverlapArguments
from tests.integrations.transformers import loops, tiny
from tests.integrations.transformers.loops import EVALUATES, SHOWN, Spec, train
from tests.ranks import Ranks
from tests.tiers import wide

METRICS = ("mean_token_accuracy", "entropy", "num_tokens", "aux_loss", "eval_mean_token_accuracy", "eval_entropy")


def words() -> Any:
    """Return a tokenizer of numbers."""
    model = models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **{str(n): n for n in range(3, tiny.V)}}, "3")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def spec_of(folder: Path, kind: Any, configures: Any, data: dict[str, Any], **changes: Any) -> Spec:
    """Return a run of one of TRL's trainers on its own collator."""
    given = {"data_collator": None, "eval_dataset": None, "processing_class": words(), **data}
    arguments = {"bf16": False, **changes.pop("arguments", {})}
    return Spec(folder, kind=kind, configures=configures, trainer=given, arguments=arguments, **changes)


def tuning(folder: Path, *, even: bool = False, lora: bool = False, options: Any = None, **changes: Any) -> Spec:
    """Return a run of SFTTrainer on rows whose first part is a prompt.

    If rows are ``even``, all have equally many tokens, and the router has no loss: only then several ranks give what
    one process gives, since SFTTrainer's accuracies are means over microbatches. Otherwise they give what SFTTrainer
    gives over as many ranks with data.
    """
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 9, (40,), generator=generator).tolist()
    ids = [torch.randint(3, tiny.V, (7 if even else length,), generator=generator).tolist() for length in lengths]
    columns = {"input_ids": ids, "labels": [[-100, -100, *row[2:]] for row in ids]}
    data: dict[str, Any] = {
        "train_dataset": Dataset(InMemoryTable.from_pydict(columns), fingerprint="rows"),
        "eval_dataset": Dataset(
            InMemoryTable.from_pydict({name: rows[:16] for name, rows in columns.items()}), fingerprint="e"
        ),
    }
    if lora:
        import peft

        targets = ["experts.gate_up_proj", "experts.down_proj"]
        data["peft_config"] = peft.LoraConfig(r=3, target_modules="all-linear", target_parameters=targets)
    arguments = {
        **EVALUATES, "gradient_checkpointing": False, "router_aux_loss_coef": 0.0 if even else 0.01,
        "dataset_kwargs": {"skip_prepare_dataset": True}, **(options or {}),
    }  # fmt: skip
    return spec_of(folder, SFTTrainer, SFTConfig, data, arguments=arguments, **changes)


LAYOUTS = {
    "one rank": OverlapArguments(ep=1),
    "ep 2": OverlapArguments(ep=2),
    "pp 2": OverlapArguments(pp=2, ep=1),
    "pp 2 × ep 2": OverlapArguments(pp=2, ep=2),
}


@pytest.mark.parametrize("layout", ["one rank", *wide("pp 2 × ep 2")])
def test_another_loss(kept: dict[int, Ranks], layout: str, tmp_path: Path) -> None:
    """SFTTrainer on one process has all microbatches; the tests below have its default loss."""
    even = layout != "one rank"
    compare(kept, tuning(tmp_path, even=even, options={"loss_type": "dft"}, layout=LAYOUTS[layout]), even=even)


@pytest.mark.parametrize(("model", "layout"), [("qwen3_moe", "ep 2"), *wide(("mixtral", "pp 2 × ep 2"))])
def test_rows_of_uneven_lengths(kept: dict[int, Ranks], layout: str, model: str, tmp_path: Path) -> None:
    """With padding, other counts of tokens on each rank and the router's loss, beside SFTTrainer over the same data."""
    options = {"gradient_checkpointing": layout == "ep 2"}
    compare(kept, tuning(tmp_path, model=model, options=options, layout=LAYOUTS[layout]))


@pytest.mark.parametrize(("first", "then"), [("pp 2", "one rank"), *wide(("pp 2 × ep 2", "ep 2"))])
def test_sft_goes_on(kept: dict[int, Ranks], first: str, then: str, tmp_path: Path) -> None:
    """From stages on ranks without; TRL counts the tokens of a run since its start."""
    saves = {"save_strategy": "steps", "save_steps": 2}
    unbroken = run(kept, tuning(tmp_path, model="mixtral", options=saves, layout=LAYOUTS[first]))[0]
    final = loops.weights(tmp_path)
    for file in tmp_path.glob("model*.safetensors"):
        file.unlink()
    again = tuning(tmp_path, model="mixtral", layout=LAYOUTS[then], seed=4, resume=str(tmp_path / "checkpoint-2"))
    for found in run(kept, again):
        same(found, unbroken, [name for name in (*SHOWN, *METRICS) if name != "num_tokens"])
    loops.same_weights(tmp_path, final)


@pytest.mark.parametrize("layout", ["one rank", *wide("pp 2 × ep 2")])
def test_sft_of_adapters(kept: dict[int, Ranks], layout: str, tmp_path: Path) -> None:
    """SFTTrainer puts the adapters around the model; the adapters alone are saved."""
    pytest.importorskip("peft")
    even = layout != "one rank"
    options = {"gradient_checkpointing": even}
    compare(kept, tuning(tmp_path, even=even, lora=True, options=options, layout=LAYOUTS[layout]), even=even)
    assert (tmp_path / "adapter_model.safetensors").exists()


def run(kept: dict[int, Ranks], spec: Spec, shards: int = 1) -> list[list[dict[str, Any]]]:
    """Train on the ranks of its layout, without one on ``shards``; return the logs."""
    ranks = shards if spec.layout is None else spec.layout.pp * max(1, spec.layout.ep)
    return kept[ranks].run(train, spec) if ranks > 1 else [loops.alone(spec).state.log_history]


def compare(kept: dict[int, Ranks], spec: Spec, *, even: bool = False) -> None:
    """Compare logs and weights; one process has the microbatches of all ranks if rows are ``even``."""
    folder, own = spec.folder / "plain", {**spec.arguments, "gradient_checkpointing": False}
    if even:
        expected = loops.plain(spec, spec.layout.ep, arguments=own).state.log_history
    else:
        expected = run(kept, replace(spec, folder=folder, layout=None, arguments=own), spec.layout.ep)[0]
    for found in run(kept, spec):
        same(found, expected, (*SHOWN, *METRICS))
    assert any("mean_token_accuracy" in line and "entropy" in line for line in expected)
    assert even or any(line.get("aux_loss", 0) > 0 for line in expected)
    # The first gradients of lora_A are zero, and Adam divides by them.
    loops.same_weights(spec.folder, folder, 5e-6 if "peft_config" in spec.trainer else 1e-6)


def same(found: list[dict[str, float]], expected: list[dict[str, float]], names: Sequence[str]) -> None:
    for one, other in zip(found, expected, strict=True):
        wanted = {name: other[name] for name in names if name in other}
        assert {name: one[name] for name in wanted} == pytest.approx(wanted, rel=5e-6, abs=5e-6)


def test_what_is_refused_of_sft(tmp_path: Path) -> None:
    """Offloading around a step would cover the rest of the model alone."""
    spec = tuning(tmp_path, layout=OverlapArguments(), options={"activation_offloading": True})
    with pytest.raises(
        ValueError, match=r"^activation_offloading=True under an .*; allowed: recompute of Ov"
    ) as caught:
        spec.build()
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
    compare(kept, tuning(tmp_path, layout=LAYOUTS[layout], options=options))


def aligning(folder: Path, kind: Any, layout: OverlapArguments | None, coefficient: float = 0.0, **sizes: Any) -> Spec:
    """Return a run beside a reference model, by pairs or on completions that are good or bad."""
    rows = torch.randint(3, tiny.V, (16, 9), generator=torch.Generator().manual_seed(5)).tolist()

    def texts(begin: int, ends: Sequence[int], before: str = "") -> list[str]:
        return [before + " ".join(map(str, row[begin:end])) for row, end in zip(rows, ends, strict=True)]

    columns: dict[str, Any] = {"prompt": texts(0, [3] * 16)}
    more: dict[str, Any] = {"steps": 3}
    arguments: dict[str, Any] = {"router_aux_loss_coef": coefficient}
    if kind is DPOTrainer:
        columns |= {"chosen": texts(3, [5] * 16), "rejected": texts(5, [9] * 16)}
    else:  # without the KL term
        columns["completion"] = texts(3, [5 + number % 4 for number in range(16)], " ")
        columns["label"] = [row[0] % 2 == 0 for row in rows]
        more, arguments["loss_type"] = {"steps": 2}, "apo_zero_unpaired"
    data = {"train_dataset": Dataset.from_dict(columns)}
    data["ref_model"] = tiny.build("qwen3_moe", seed=4, num_hidden_layers=2, **sizes)
    more |= {"accumulation": 1 if layout is not None and layout.ep == 2 else 2, "config": sizes, "layout": layout}
    config = DPOConfig if kind is DPOTrainer else KTOConfig
    return spec_of(folder, kind, config, data, arguments=arguments, **more)


@pytest.mark.parametrize("layout", [OverlapArguments(ep=2), *wide(OverlapArguments(pp=2))])
def test_preferences(kept: dict[int, Ranks], layout: OverlapArguments, tmp_path: Path) -> None:
    """A reference model of its own runs whole on each rank."""
    (expected,) = run(kept, aligning(tmp_path, DPOTrainer, None))
    for found in kept[2].run(train, aligning(tmp_path, DPOTrainer, layout)):
        same(found, expected, SHOWN)


def test_the_routers_loss_of_pairs(kept: dict[int, Ranks], tmp_path: Path) -> None:
    """TRL's DPOTrainer asks the model for router logits, and does not set its config as SFTTrainer does."""
    said = r"^DPOTrainer asks for router logits, by router_aux_loss_coef, .*; allowed: T"
    with pytest.raises(ValueError, match=said):
        aligning(tmp_path, DPOTrainer, OverlapArguments(), 0.01).build()
    (found,), (expected,) = (
        run(kept, aligning(tmp_path, DPOTrainer, layout, 0.01, output_router_logits=True))
        for layout in (OverlapArguments(), None)
    )
    same(found, expected, (*SHOWN, "aux_loss"))
    assert any(line.get("aux_loss", 0) > 0 for line in expected)


def test_judgements(kept: dict[int, Ranks], tmp_path: Path) -> None:
    """KTOTrainer moves a batch to the accelerator's device, which must not copy it."""
    (expected,) = run(kept, aligning(tmp_path, KTOTrainer, None))
    for found in kept[2].run(train, aligning(tmp_path, KTOTrainer, OverlapArguments(pp=2))):
        same(found, expected, (*SHOWN, "rewards/chosen", "logps/rejected"))


def test_completions_that_are_sampled(tmp_path: Path) -> None:
    """GRPOTrainer makes its own batches, which are lists."""
    data = {"train_dataset": Dataset.from_dict({"prompt": ["3 4"] * 8})}
    data["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
    options = {"num_generations": 2, "max_completion_length": 2}
    spec = spec_of(tmp_path, GRPOTrainer, GRPOConfig, data, steps=1, arguments=options, layout=OverlapArguments())
    with pytest.raises(ValueError, match=r"GRPOTrainer, a GRPOTrainer, has a batch of type list; allowed: trainers "):
        spec.build().train()
