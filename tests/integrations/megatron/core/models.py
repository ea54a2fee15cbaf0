"""Megatron-Core's GPT models with MoE layers: groups, weights, batches, comparisons. Call ``shim.apply`` first."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integrations.megatron.core import transformer_engine

HIDDEN, VOCABULARY, SEQUENCE, BATCH = 32, 48, 12, 2


@contextmanager
def init_parallel(*, pp: int = 1, ep: int = 1, tp: int = 1, etp: int = 1, vp: int | None = None) -> Iterator[None]:
    """Make Megatron-Core's groups inside the context, and destroy them after it."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=etp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        expert_model_parallel_size=ep,
    )
    random.get_cuda_rng_tracker().reset()
    seed_random(0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None  # which it forgets
        RotaryEmbedding.forward.cache_clear()  # it holds embeddings, and their groups


def seed_random(seed: int) -> None:
    """Begin all streams of random numbers anew: torch's, and those of Megatron-Core's tracker."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    tracker = random.get_cuda_rng_tracker()
    states = dict(tracker.states_)
    tp, ep = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    for place, (name, rank) in enumerate(
        ((random._MODEL_PARALLEL_RNG_TRACKER_NAME, tp), (random.get_expert_parallel_rng_tracker_name(), ep))
    ):
        states[name] = torch.Generator().manual_seed(1000 * seed + 100 * (place + 1) + rank).get_state()
    tracker.set_states(states)
    torch.manual_seed(1000 * seed)


def config_of(
    *, layers: int, pp: int = 1, ep: int = 1, tp: int = 1, etp: int = 1, vp: int | None = None, **fields: Any
) -> Any:
    """Return the config of a small model with four experts in every layer, changed by these fields."""
    from megatron.core.transformer import TransformerConfig

    given: dict[str, Any] = {
        "num_layers": layers, "hidden_size": HIDDEN, "num_attention_heads": 4, "ffn_hidden_size": 40,
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none",
        "add_bias_linear": False, "gated_linear_unit": True, "activation_func": F.silu,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False, "bias_dropout_fusion": False, "masked_softmax_fusion": False,
        "persist_layer_norm": False, "use_cpu_initialization": True, "pipeline_dtype": torch.float32,
        "deallocate_pipeline_outputs": True, "expert_model_parallel_size": ep,
        # Two ranks with two chunks each: batched transfers of both directions would meet the wrong ones. Not
        # "overlap_p2p_comm": an output may then be freed before gloo has sent it.
        "batch_p2p_comm": vp is None,
        "tensor_model_parallel_size": tp, "expert_tensor_parallel_size": etp, "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": vp,
    }  # fmt: skip
    return TransformerConfig(**(given | fields))


def fork(model: nn.Module) -> None:
    """Let MoE layers and their dispatchers keep something of their own, as forks of Megatron-Core do."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    def scaled(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale.reshape(*x.shape[:-1], 1)

    for layer in [module for module in model.modules() if type(module) is MoELayer]:

        class Layer(MoELayer):  # type: ignore[misc]
            def forward(self, hidden_states: Tensor, *args: Any, **more: Any) -> Any:
                self.scale = hidden_states.detach()[..., :1].sigmoid() + 0.5
                output, bias = super().forward(hidden_states, *args, **more)
                return scaled(output, self.scale), bias

        class Dispatcher(type(layer.token_dispatcher)):  # type: ignore[misc]
            def dispatch_preprocess(self, hidden_states: Tensor, *args: Any) -> Any:
                self.scale = hidden_states.detach()[..., 1:2].sigmoid() + 0.5
                return super().dispatch_preprocess(hidden_states, *args)

            def combine_postprocess(self, rows: Tensor) -> Tensor:
                return scaled(super().combine_postprocess(rows), self.scale)

        layer.__class__, layer.token_dispatcher.__class__ = Layer, Dispatcher


class Mirrored(NamedTuple):
    """The pipeline's group as the second chunk of a V sees it: the ranks in the other order."""

    group: Any

    def rank(self) -> int:
        return self.size() - 1 - self.group.rank()

    def size(self) -> int:
        return self.group.size()


def build(config: Any, *, tied: bool = False, linears: str = "own", in_v: bool = False) -> list[nn.Module]:
    """Return the chunks of this rank. A weight depends on its place in the whole model, and not on the ranks.

    ``linears`` are as in :class:`~tests.integrations.megatron.core.cases.Case`; ``in_v``, each rank's second chunk has
    the layers that a loop has on the rank opposite.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    if config.sequence_parallel:
        from tests.integrations.megatron.core.shim import allow_sequence_parallel_norm

        allow_sequence_parallel_norm()
    chunks: list[nn.Module] = []
    pp, count = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    rank = parallel_state.get_pipeline_model_parallel_rank()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for number in range(count or 1):
        if in_v and number == 1:
            groups, rank = copy(groups), pp - 1 - rank
            groups.pp = Mirrored(groups.pp)
        last = rank == pp - 1 and number == (count or 1) - 1
        stage = None if count is None else number
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage, pp_rank=rank)
        if linears != "own":
            spec = transformer_engine.put_into(spec, grouped=linears == "te grouped")
        mtp = None
        if config.mtp_num_layers and last:
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage)
        chunk = GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
            pre_process=rank == 0 and number == 0, post_process=last, share_embeddings_and_output_weights=tied,
            position_embedding_type="rope", mtp_block_spec=mtp, vp_stage=stage,
            pg_collection=groups,
        )  # fmt: skip
        fill(chunk)
        chunks.append(chunk)
    return chunks


def fill(chunk: Any) -> None:
    """Give each parameter its name in the whole model, as attribute ``place``, and values drawn by this name."""
    from megatron.core import parallel_state

    layers = {
        f"decoder.layers.{i}.": f"decoder.layers.{x.layer_number - 1}." for i, x in enumerate(chunk.decoder.layers)
    }
    experts = (chunk.config.num_moe_experts or 0) // chunk.config.expert_model_parallel_size
    first = parallel_state.get_expert_model_parallel_rank() * experts
    for name, parameter in chunk.named_parameters():
        begin = next((part for part in layers if name.startswith(part)), None)
        parts = (name if begin is None else layers[begin] + name[len(begin) :]).split(".")
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(int(parts[at]) + first)
        parameter.place = place = ".".join(parts)
        drawn = "embedding.word_embeddings.weight" if place == "output_layer.weight" else place  # they may be tied
        generator = torch.Generator().manual_seed(zlib.crc32(drawn.encode()))
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3 if "router" in place else 0.1, generator=generator)


def batches(count: int, seed: int, *, dropout: bool = False) -> list[dict[str, Any]]:
    """Return the inputs of each microbatch. Ranks along "dp" have other data; those along "pp" and "tp" the same."""
    from megatron.core import parallel_state

    place = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(100 * seed + place)
    mask = torch.ones(SEQUENCE, SEQUENCE).tril().logical_not()[None, None]
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE).contiguous()
    made = []
    for number in range(count):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        made.append(
            {
                "input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(),
                "position_ids": positions, "attention_mask": mask,
                "seed": 10 * seed + number + 1 if dropout else None,
            }
        )  # fmt: skip
    return made


def losses(reports: list[dict[str, Tensor]]) -> list[float]:
    """Return the reported losses; on all but the last stage there are none."""
    return [float(report["loss"]) for report in reports]


def grads(chunks: list[nn.Module]) -> dict[str, Tensor | None]:
    """Return the gradients for an optimizer: ``main_grad``, and ``.grad`` unless it was added to it; also buffers."""
    found: dict[str, Tensor | None] = {}
    for number, chunk in enumerate(chunks):
        for parameter in chunk.parameters():
            grad, main = parameter.grad, getattr(parameter, "main_grad", None)
            if grad is not None and getattr(parameter, "grad_added_to_main_grad", False):
                grad = None
            total = grad if main is None else main if grad is None else main + grad
            found[f"{number}.{parameter.place}"] = None if total is None else total.detach().clone()
        for name, buffer in chunk.named_buffers():  # such as the bias of experts and their counts of tokens
            found[f"{number}.{name}"] = buffer.detach().clone()
    return found


def compared(expected: dict[str, Tensor | None], own: dict[str, Tensor | None]) -> list[str]:
    """Return one line on each difference: names that are missing, and gradients that are not equal bit by bit."""
    lines = [f"{name} is on one side only" for name in sorted(expected.keys() ^ own.keys())]
    for name in expected.keys() & own.keys():
        a, b = expected[name], own[name]
        if a is None or b is None:
            lines += [] if a is b else [f"{name}: gradient is None {'in the reference' if a is None else 'here'}"]
        elif not torch.equal(a, b):
            gap = (a - b).abs().max() / a.abs().max().clamp(min=1e-30)
            lines.append(f"{name}: relative difference {float(gap):.1e}")
    return sorted(lines)
