"""Train a mixture of experts in transformers' own training loop, on a GPU for each rank or on the CPU.

python examples/train_trainer.py                              # a small Qwen3-MoE on the bytes of the README
torchrun --nproc-per-node 4 examples/train_trainer.py --pp 2  # two stages, each on two ranks that share its experts

All of transformers' TrainingArguments are options, and those of OverlapArguments: --pp, --ep, --dp, --schedule, …
"""

from pathlib import Path
from typing import Any

import torch

try:
    from transformers import HfArgumentParser, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainingArguments
except ModuleNotFoundError:
    raise SystemExit("train_trainer.py needs transformers; pip install 'overlap1f1b[hf]'") from None

from overlap1f1b.integrations.transformers import OverlapArguments, OverlapTrainer

SEQUENCE = 64


class Pieces(torch.utils.data.Dataset[Any]):
    """Pieces of a text, one token a byte."""

    def __init__(self, text: bytes) -> None:
        self.rows = torch.tensor(list(text)).unfold(0, SEQUENCE, SEQUENCE // 2)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}  # the model shifts its labels


parser = HfArgumentParser((TrainingArguments, OverlapArguments))
parser.set_defaults(
    output_dir="runs/trainer",
    use_cpu=not torch.cuda.is_available(),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,  # the microbatches of a step
    max_steps=20,
    learning_rate=2e-3,
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=10,
    save_steps=10,
    report_to="none",
    disable_tqdm=True,
)
args, overlap_args = parser.parse_args_into_dataclasses()
text = (Path(__file__).parents[1] / "README.md").read_bytes()
torch.manual_seed(0)  # the same weights on all ranks; or from_pretrained
model = Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        tie_word_embeddings=True,
    )
)
cut = len(text) * 9 // 10
trainer = OverlapTrainer(
    model,
    args,
    train_dataset=Pieces(text[:cut]),
    eval_dataset=Pieces(text[cut:]),
    overlap_args=overlap_args,
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()  # a folder that from_pretrained opens
trainer.accelerator.end_training()
