#!/usr/bin/env bash
# torchao 0.18 and transformers 5.24: a model whose experts are converted to MXFP8 training cannot be saved.
#
# The values are plain bfloat16 inside the converted weights, and optimizers, clipping, copies and state_dict work. But
# save_pretrained looks at the memory of each weight, and the converted ones have none: it ends in an error of torch.
. "$(dirname "$0")/environment" torch==2.13.0 torchao==0.18.0 transformers==5.24.0 numpy==2.4.6
check <<'PY'
from importlib.metadata import version

import torch
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2)).bfloat16()
model.save_pretrained("plain")
config = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED, pad_token_groups_for_grouped_mm=True)
quantize_(model, config, filter_fn=lambda _, name: name.endswith("experts"))
tokens = torch.arange(64).view(2, 32)
model(input_ids=tokens, labels=tokens).loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
torch.optim.AdamW(model.parameters()).step()
print(f"torchao {version('torchao')}, transformers {version('transformers')}, torch {torch.__version__}")
try:
    model.save_pretrained("converted")
except RuntimeError as error:
    print(f"save_pretrained: RuntimeError: {error}")
else:
    raise SystemExit("the model is saved now")
PY
