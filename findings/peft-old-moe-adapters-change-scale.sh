#!/usr/bin/env bash
# peft 0.21.2, transformers 5.24: an rsLoRA adapter for the experts of Mixtral, of transformers 4, is read 1.41 times too large.
#
# transformers 5 keeps w1 and w3 of an expert as one weight; PEFT joins their two adapters to one of twice the rank and
# doubles alpha. That keeps alpha / rank, but rsLoRA divides by the root of the rank. An alpha of its own for one of the
# old names is ignored: it counts for nothing. Nothing is said of either; a plain adapter is read as it was.
. "$(dirname "$0")/environment" torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 numpy==2.4.6
check <<'PY'
import json
from importlib.metadata import version
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
RANK, ALPHA = 4, 8
SHAPES = {"w1": (48, 32), "w3": (48, 32), "w2": (32, 48)}


def base():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES | HEADS))


def stacks(model):
    experts = model.model.layers[0].mlp.experts
    gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
    return {"w1": gate, "w3": up, "w2": experts.down_proj.detach()}


print(f"peft {version('peft')}, transformers {version('transformers')}, torch {torch.__version__}; rank {RANK}, alpha {ALPHA}")
torch.manual_seed(1)
folder, tensors, products = Path("adapter"), {}, {name: [] for name in SHAPES}
folder.mkdir()
for expert in range(4):
    for name, (rows, columns) in SHAPES.items():
        a, b = torch.randn(RANK, columns), torch.randn(rows, RANK)
        key = f"base_model.model.model.layers.0.block_sparse_moe.experts.{expert}.{name}"
        tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
        products[name].append(b @ a)
save_file(tensors, folder / "adapter_model.safetensors")
for options, expected in (
    ({}, {"w1": 1, "w3": 1, "w2": 1}),
    ({"use_rslora": True}, {"w1": 2**0.5, "w3": 2**0.5, "w2": 1}),
    ({"alpha_pattern": {"w2": 2 * ALPHA}}, {"w1": 1, "w3": 1, "w2": 0.5}),
    ({"alpha_pattern": {"w1": 2 * ALPHA, "w3": 2 * ALPHA}}, {"w1": 0.5, "w3": 0.5, "w2": 1}),
):
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(SHAPES)}
    (folder / "adapter_config.json").write_text(json.dumps(config | options))
    merged = stacks(PeftModel.from_pretrained(base(), folder).merge_and_unload())
    for name, before in stacks(base()).items():
        alpha = options.get("alpha_pattern", {}).get(name, ALPHA)
        wanted = torch.stack(products[name]) * alpha / (RANK**0.5 if options.get("use_rslora") else RANK)
        factor = ((merged[name] - before) / wanted).median().item()
        print(f"{options or 'plain'}: what {name} gets is {factor:.3f} of alpha / {'root of ' * bool(options.get('use_rslora'))}rank * B A")
        assert torch.allclose(merged[name] - before, expected[name] * wanted, atol=1e-3), "it is another scale now"
PY
