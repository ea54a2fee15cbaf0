#!/usr/bin/env bash
# transformers 5.24: dequantize=True reads FP8 experts of 192 rows with blocks of 96 instead of 128; the weights are wrong.
#
# The checkpoint says 128, and its last block is smaller, as in DeepSeek's files. transformers takes rows / number of
# scales for the size of a block. Where that has no remainder, 32 rows get the scale of their neighbours, and nothing is
# said; where it has one, loading ends in an error. torch's reader of the same file is right to the bit.
. "$(dirname "$0")/environment" torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 safetensors==0.8.0 numpy==2.4.6
check <<'PY'
import json
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

BLOCK = 128
SIZES = {"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
FORMAT = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def quantized(weight):
    """Return a weight in FP8, its scales, one for each block, and what the two of them mean."""
    rows, columns = weight.shape
    scales = torch.stack([torch.stack([b.abs().max() / 448 for b in a.split(BLOCK, 1)]) for a in weight.split(BLOCK)])
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    small = (weight / spread).to(torch.float8_e4m3fn)
    return small, scales, small.float() * spread


def written(rows):
    """Write a model whose experts have so many rows; return its folder and the weights of the experts' gates."""
    folder, wanted = Path(f"model-{rows}"), []
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(moe_intermediate_size=rows, **SIZES | HEADS)).save_pretrained(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("proj.weight"):
            steps = torch.linspace(1, 4, len(tensor))[:, None]
            tensors[name], tensors[f"{name}_scale_inv"], meant = quantized(tensor * steps)
            wanted += [meant] if "gate_proj" in name else []
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FORMAT}))
    return folder, torch.stack(wanted)


print(f"transformers {version('transformers')}, torch {torch.__version__}; four experts in FP8, blocks of {BLOCK} x {BLOCK}")
for rows in (128, 192, 256):
    folder, wanted = written(rows)
    gates = {f"model.layers.0.mlp.experts.{i}.gate_proj.weight": torch.zeros(rows, 256) for i in range(4)}
    dcp.load(gates, storage_reader=QuantizedHuggingFaceStorageReader(str(folder)), no_dist=True)
    config = FineGrainedFP8Config(dequantize=True)
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    found = {"torch": torch.stack(list(gates.values())), "transformers": model.model.layers[0].mlp.experts.gate_up_proj[:, :rows]}
    for reader, gate in found.items():
        wrong = [row for row in range(rows) if not torch.equal(gate[:, row], wanted[:, row])]
        error = ((gate - wanted).norm() / wanted.norm()).item()
        where = f"rows {wrong[0]} to {wrong[-1]} are wrong, by {error:.0%} of the norm" if wrong else "all right to the bit"
        print(f"{rows} rows, read by {reader:12}: {where}")
        expected = list(range(96, 128)) if (reader, rows) == ("transformers", 192) else []
        assert wrong == expected, "it is another behaviour now"
PY
