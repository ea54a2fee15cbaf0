"""Every causal LM with experts that the installed transformers knows, at a tiny size."""

import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.integrations.transformers.tiny import V

EXPERTS = re.compile(r"^class \w*(Experts|MoE|Moe)\w*\(nn\.Module\)", re.MULTILINE)

SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 4, "num_layers": 4, "max_position_embeddings": 64,
    "intermediate_size": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "rotary_dim": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "moe_top_k": 2,
    "num_shared_experts": 1, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "num_expert_group": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 3,
    "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "block_size": 8, "swiglu_limit": 7.0,
    "expert_ffn_hidden_size": 24, "ffn_hidden_size": 48, "intermediate_size_mlp": 48, "dense_intermediate_size": 48,
    "shared_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "ssm_state_size": 8, "n_groups": 1, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": V, "d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "output_router_logits": True,
}  # fmt: skip
"""Sizes by the names that configurations use; each is set if a configuration has it."""

_FULL_HEADS = {"num_key_value_heads": 4}
_GEMMA4 = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_DOTS3 = {
    "shared_experts_intermediate_size": 24, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4,
    "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "per_layer_config": {
        layer: {
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "v_head_dim": 8,
        }
        for layer in range(4)
    },
}  # fmt: skip
_QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
    "indexer_compress_ratio": 2, "hc_lowrank": 8, "hc_count": 2,
}  # fmt: skip
_INKLING = {
    "swa_head_dim": 8, "unpadded_vocab_size": V, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
}  # fmt: skip

SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": _FULL_HEADS,
    "axk2": _FULL_HEADS,
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 24, "hidden_size": 32},
    },
    "deepseek_v2": _FULL_HEADS,
    "deepseek_v3": _FULL_HEADS,
    "deepseek_v32": _FULL_HEADS,
    "deepseek_v4": {"o_lora_rank": 8, "o_groups": 2},
    "doge": {"is_moe": True},
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm4_moe_lite": _FULL_HEADS,
    "glm_moe_dsa": {**_FULL_HEADS, "indexer_types": ["full", "shared", "shared", "full"]},  # shared over stages
    "granitemoehybrid": {"mamba_chunk_size": 8},
    "hy_v4": {"indexer_types": ["full", "shared", "shared", "full"]},
    "inkling2_loop_text": {
        **_INKLING,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "inkling2_text": _INKLING,
    "inkling_text": _INKLING,
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {**_FULL_HEADS, "zero_expert_num": 2},
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    "sarvam_mla": _FULL_HEADS,
    "zaya": {"num_experts_per_tok": 1},
}
"""Sizes for models that need others."""


def names() -> list[str]:
    """Return the model types whose modelling code defines experts."""
    found, models = [], Path(transformers.models.__path__[0])
    for name, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name in CONFIG_MAPPING:
            files = [*(models / model_type_to_module_name(name)).glob("modeling_*.py")]
            if not files:  # the class belongs to another model
                files = [Path(inspect.getfile(getattr(transformers, class_name)))]
            if any(EXPERTS.search(file.read_text()) for file in files):
                found.append(name)
    return found


def build(name: str, dtype: torch.dtype) -> Any:
    """Return a tiny model of a type, whose experts run one by one."""
    default: Any = CONFIG_MAPPING[name]()
    if not name.endswith("_text"):
        default = getattr(default, "text_config", default)
    sizes = {key: value for key, value in SIZES.items() if _has(default, key)} | SPECIAL.get(name, {})
    config = type(default)(**sizes)
    config._experts_implementation = "eager"  # torch's grouped product refuses float64
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def _has(config: Any, key: str) -> bool:
    try:
        return hasattr(config, key)
    except Exception:  # transformers raises for what differs between layers
        return False
