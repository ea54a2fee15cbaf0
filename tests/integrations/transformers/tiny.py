"""Tiny causal LMs of the transformers library, and their own losses and gradients."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from overlap1f1b.engine import Engine
from overlap1f1b.schedule import Program
from tests.engines import COSTS, make

V, S = 37, 8

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "intermediate_size": 24, "num_hidden_layers": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 20, "head_dim": 8, "num_hidden_layers": 4, "mlp_only_layers": [2]},
    ),
    "deepseek_v3": (  # a dense first layer and a shared expert
        "DeepseekV3Config",
        {
            "n_routed_experts": 4, "moe_intermediate_size": 20, "intermediate_size": 40, "num_hidden_layers": 4,
            "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 12, "kv_lora_rank": 12,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
        },
    ),
    "gpt_oss": (  # biases, transposed weights, sliding windows in every other layer
        "GptOssConfig",
        {"num_local_experts": 4, "intermediate_size": 24, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 3},
    ),
}  # fmt: skip
COMMON = {
    "vocab_size": V, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip


def configuration(name: str, **options: Any) -> Any:
    """Return the configuration of a tiny model."""
    kind, sizes = MODELS[name]
    return getattr(transformers, kind)(**{**COMMON, **sizes, **options})


def build(name: str, *, double: bool = False, seed: int = 3, **options: Any) -> Any:
    """Return a model with the same weights every time."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(configuration(name, **options))
    if double:
        model.double().set_experts_implementation("eager")  # torch's grouped product refuses float64
    return model


def engine(stages: Any, program: Program, mesh: Any = None, **given: Any) -> Engine:
    """Return an engine of a split model; ``given`` are its other arguments and options."""
    return make(stages, program, mesh=mesh, **{"loss_fn": stages.loss_fn, "costs": COSTS, "timeout": 30, **given})


def batch(rows: int, *, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Return tokens and labels; the first labels do not count."""
    tokens = torch.randint(3, V, (rows, S), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[:, :2] = -100
    return tokens, labels


def own_gradients(
    model: nn.Module, inputs: Mapping[str, Tensor], labels: Tensor, microbatches: int, scale: float = 1.0
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses of ``forward(labels=…)`` for each microbatch, and the gradients of their mean."""
    losses = []
    parts = {name: value.chunk(microbatches) for name, value in inputs.items()}
    for index, part in enumerate(labels.chunk(microbatches)):
        given = {name: value[index] for name, value in parts.items()}
        loss = model(**given, labels=part, use_cache=False).loss
        (loss * (scale / microbatches)).backward()
        losses.append(loss.detach())
    return losses, gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients by all names of a parameter; zeros for a missing gradient."""
    named = model.named_parameters(remove_duplicate=False)
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the relative difference in norm; the absolute one if zero is expected."""
    return float((found - expected).norm()) / (float(expected.norm()) or 1.0)
