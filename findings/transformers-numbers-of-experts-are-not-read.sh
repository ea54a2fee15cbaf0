#!/usr/bin/env bash
# transformers 5.24: a checkpoint whose experts have other numbers loads without a word, as if they were 0, 1, 2, 3.
#
# Experts of a file are joined in the order of their numbers, and only their count is compared. So the second half of a
# model's experts, as a rank of expert parallelism holds them, fits into a model of half as many, and so does a file
# that lacks one expert in the middle and has another one behind the last. output_loading_info stays empty.
. "$(dirname "$0")/environment" torch==2.13.0 transformers==5.24.0 numpy==2.4.6
check <<'PY'
import re
from importlib.metadata import version

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 16}
heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
torch.manual_seed(0)
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2))
model.save_pretrained("saved")
tensors = load_file("saved/model.safetensors")
print(f"transformers {version('transformers')}, torch {torch.__version__}")
for numbers in ([0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 3, 9]):
    renamed = {re.sub(r"experts\.(\d)", lambda m: f"experts.{numbers[int(m[1])]}", k): v for k, v in tensors.items()}
    save_file(renamed, "saved/model.safetensors", {"format": "pt"})
    read, info = Qwen3MoeForCausalLM.from_pretrained("saved", output_loading_info=True)
    said = {key: value for key, value in info.items() if value}
    equal = all(torch.equal(value, model.state_dict()[name]) for name, value in read.state_dict().items())
    print(f"experts {numbers} of the file: loading_info {said}, weights those of experts 0 to 3: {equal}")
    assert equal and not said, "numbers of experts are compared now"
PY
