"""TRL's SFTTrainer under the mixin, against itself on one process; skipped without TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig, SFTTrainer

from overlap1f1b.integrations.transformers import OverlapArguments, Overlapped
from tests.integrations.transformers import tiny
from tests.integrations.transformers.loops import launched, weights
from tests.ranks import Ranks

SHOWN = ("loss", "grad_norm", "learning_rate", "eval_loss")
METRICS = ("mean_token_accuracy", "entropy", "num_tokens", "aux_loss", "eval_mean_token_accuracy", "eval_entropy")


class OverlapSFTTrainer(Overlapped, SFTTrainer):
    pass


def built(
    kind: Any, folder: Path, layout: OverlapArguments | None, accumulation: int, rows: int, loss: str, *, even: bool
) -> Any:
    """Return a trainer of rows, whose first part is a prompt.

    SFTTrainer's accuracies are means over microbatches and the router's loss is added up over ranks, so over several
    ranks only `even` rows, without the router's loss, give what one process gives.
    """
    from datasets import Dataset
    from datasets.table import InMemoryTable

    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 9, (40,), generator=generator).tolist()
    ids = [torch.randint(3, tiny.V, (7 if even else length,), generator=generator).tolist() for length in lengths]
    columns = {"input_ids": ids, "labels": [[-100, -100, *row[2:]] for row in ids]}
    data = Dataset(InMemoryTable.from_pydict(columns), fingerprint="rows")
    eval_data = Dataset(InMemoryTable.from_pydict({name: rows[:16] for name, rows in columns.items()}), fingerprint="e")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **{str(n): n for n in range(3, tiny.V)}}, "3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    args = SFTConfig(
        str(folder),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        max_steps=4,
        learning_rate=3e-3,
        adam_epsilon=1e-5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        loss_type=loss,
        dataset_kwargs={"skip_prepare_dataset": True},
        router_aux_loss_coef=0.0 if even else 0.01,
    )
    more = {} if layout is None else {"overlap_args": layout}
    model = tiny.build("qwen3_moe")
    return kind(model, args, processing_class=tokenizer, train_dataset=data, eval_dataset=eval_data, **more)


def trained(rank: int, size: int, *given: Any) -> list[dict[str, float]]:
    with launched(rank, size):
        *most, even = given
        trainer = built(*most, even=even)
        trainer.train()
        trainer.save_model()
        return list(trainer.state.log_history)


@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (2, 2)], ids=["one rank", "ep 2", "pp 2 × ep 2"])
@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_sft(ranks2: Ranks, ranks4: Ranks, layout: tuple[int, int], loss: str, tmp_path: Path) -> None:
    pp, ep = layout
    ranks = {2: ranks2, 4: ranks4}.get(pp * ep)
    expected = trained(0, 1, SFTTrainer, tmp_path / "plain", None, 4 * ep, 4 * ep, loss, ep > 1)
    given = (OverlapSFTTrainer, tmp_path / "ours", OverlapArguments(pp=pp, ep=ep), 4, 4, loss, ep > 1)
    every = [trained(0, 1, *given)] if ranks is None else ranks.run(trained, *given)
    for found in every:
        for one, other in zip(found, expected, strict=True):
            wanted = {name: other[name] for name in (*SHOWN, *METRICS) if name in other}
            assert {name: one[name] for name in wanted} == pytest.approx(wanted, rel=5e-6, abs=5e-6)
    assert any("mean_token_accuracy" in line and "entropy" in line for line in expected)
    found_weights = weights(tmp_path / "ours")
    for name, value in weights(tmp_path / "plain").items():
        assert float((found_weights[name] - value).abs().max()) <= 1e-6
