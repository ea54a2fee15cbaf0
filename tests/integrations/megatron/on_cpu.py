"""Megatron-Core's GPT models on a CPU. Only in a process of its own: CUDA is replaced there for good."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integrations.megatron.core import shim

HIDDEN, VOCABULARY, SEQUENCE, BATCH = 32, 48, 12, 2


@contextlib.contextmanager
def megatron(**sizes: int) -> Iterator[Any]:
    """Make Megatron-Core's groups inside the context, and destroy them after it."""
    shim.apply()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(**sizes)
    random.get_cuda_rng_tracker().reset()
    random.get_cuda_rng_tracker().add(random._MODEL_PARALLEL_RNG_TRACKER_NAME, 1)
    random.get_cuda_rng_tracker().add(random.get_expert_parallel_rng_tracker_name(), 2)
    try:
        yield parallel_state
    finally:
        parallel_state.destroy_model_parallel()


def build(*, mixed: Callable[[], nn.Module] | None = None, layers: int = 2, pp: int = 1, **fields: Any) -> nn.Module:
    """Return this pipeline rank's chunk; ``mixed`` makes a replacement for every layer's MLP."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer import TransformerConfig

    experts = {} if mixed is not None else {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none",
    }  # fmt: skip
    config = TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=40, add_bias_linear=False,
        gated_linear_unit=True, activation_func=F.silu, hidden_dropout=0.0, attention_dropout=0.0,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        use_cpu_initialization=True, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
        **(experts | {"gradient_accumulation_fusion": False} | fields),
    )  # fmt: skip
    last = parallel_state.is_pipeline_last_stage()
    spec = get_gpt_layer_local_spec() if mixed else get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers and last else None
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=last, position_embedding_type="rope",
        mtp_block_spec=mtp,
    )  # fmt: skip
    for layer in model.decoder.layers if mixed is not None else ():
        layer.mlp = mixed()
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1, generator=generator)
        if fields.get("gradient_accumulation_fusion"):
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    return model


def batches(count: int) -> list[dict[str, Tensor]]:
    """Return the inputs of each microbatch."""
    generator = torch.Generator().manual_seed(4)
    drawn = [torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator) for _ in range(count)]
    mask = torch.ones(SEQUENCE, SEQUENCE).tril().logical_not()[None, None]
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    return [
        {"input_ids": t[:, :-1], "position_ids": positions, "attention_mask": mask, "labels": t[:, 1:]} for t in drawn
    ]


def mean(output: Tensor) -> Any:
    """Return the mean loss and a report."""
    return output.mean(), {"loss": float(output.mean())}


def by_tokens(output: Tensor) -> Any:
    """Return the sum of losses, the tokens, and a report."""
    return output.sum(), torch.tensor(output.numel(), dtype=torch.int), {"loss": float(output.sum())}


def call(function: Any, model: nn.Module, microbatches: int, loss_func: Any = mean, **more: Any) -> list[float]:
    """Run a step; return the reported losses."""

    def forward_step(iterator: Any, chunk: nn.Module) -> Any:
        return chunk(**next(iterator)), partial(loss_func)

    reports = function(
        forward_step_func=forward_step, data_iterator=iter(batches(microbatches)), model=model,
        num_microbatches=microbatches, seq_length=SEQUENCE, micro_batch_size=BATCH, **more,
    )  # fmt: skip
    return [report["loss"] for report in reports]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients for an optimizer: the main gradient, and ``.grad`` unless it was added to it."""
    found = {}
    for name, parameter in model.named_parameters():
        total = torch.zeros_like(parameter)
        if parameter.grad is not None and not getattr(parameter, "grad_added_to_main_grad", False):
            total += parameter.grad
        found[name] = total + getattr(parameter, "main_grad", 0)
    return found
