"""Fine-tune a mixture of experts by TRL's SFTTrainer, on a GPU for each rank or on the CPU; needs `pip install trl`.

python examples/train_sft.py                              # a small Qwen3-MoE on sums in words
torchrun --nproc-per-node 4 examples/train_sft.py --pp 2  # two stages, each on two ranks that share its experts

All of TRL's SFTConfig are options, and those of OverlapArguments: --pp, --ep, --dp, --schedule, …
"""

import torch

try:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import HfArgumentParser, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from trl import SFTConfig, SFTTrainer
except ModuleNotFoundError:
    raise SystemExit("train_sft.py needs TRL; pip install trl") from None

from overlap1f1b.integrations.transformers import OverlapArguments, Overlapped

LARGEST = 20


class OverlapSFTTrainer(Overlapped, SFTTrainer):
    """SFTTrainer whose optimizer step is one step of the engine."""


parser = HfArgumentParser((SFTConfig, OverlapArguments))
parser.set_defaults(
    output_dir="runs/sft",
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
    gradient_checkpointing=False,  # True is --recompute block
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,  # the microbatches of a step
    max_steps=20,
    learning_rate=2e-3,
    logging_steps=5,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
args, overlap_args = parser.parse_args_into_dataclasses()

# A tokenizer of words, and prompts with their completions; or AutoTokenizer.from_pretrained and any data set.
words = ["<pad>", "<s>", "</s>", "plus", "is", *map(str, range(2 * LARGEST))]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<pad>")),
    pad_token="<pad>",
    bos_token="<s>",
    eos_token="</s>",
)
tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
sums = [(one, other) for one in range(LARGEST) for other in range(LARGEST)]
data = Dataset.from_dict(
    {
        "prompt": [f"{one} plus {other} is" for one, other in sums],
        "completion": [f" {one + other}" for one, other in sums],
    }
)

torch.manual_seed(0)  # the same weights on all ranks; or from_pretrained
model = Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
        vocab_size=len(words),
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
)
trainer = OverlapSFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, overlap_args=overlap_args)
trainer.train()
trainer.save_model()  # a folder that from_pretrained opens
trainer.accelerator.end_training()
