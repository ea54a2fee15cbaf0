"""Models and settings in which this project's schedules must give what Megatron-Core's own give."""

from dataclasses import dataclass, field
from typing import Any

Fields = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model, how it is spread over ranks, and how it is trained."""

    fields: Fields = field(default_factory=dict)  # fields of the model's config
    layers: int = 2  # number of layers of the whole model
    ep: int = 2  # ranks that share the experts; ``tp``, ``pp`` the same for layers and stages
    tp: int = 1
    etp: int = 1  # ranks that share each expert
    pp: int = 1
    vp: int | None = None  # chunks of a rank; None without interleaving
    microbatches: int = 3  # number of microbatches in a step
    tied: bool = False  # whether the embedding and the output layer share a weight
    fused: bool = False  # whether backwards add weight gradients to ``main_grad`` (``gradient_accumulation_fusion``)
    by_tokens: bool = False  # whether ``calculate_per_token_loss``
    ddp: Fields | None = None  # options of Megatron-Core's ``DistributedDataParallel`` around chunks; None without it
    linears: str = "own"  # "own", Megatron-Core's; "te", stand-ins of TransformerEngine's, delayed here; "te grouped"
    aligned: bool = False  # whether ``grad_sync_func`` is set, as with ``align_grad_reduce``
    frozen: tuple[str, ...] = ()  # how names of parameters begin that are not trained
    measures: bool = False  # whether steps measure the costs of nodes, in place of costs that are given
    forked: bool = False  # whether MoE layers and dispatchers are of a fork, see ``models.fork``
    chosen: bool = False  # whether the function is the one that Megatron-Core would choose, not the combined one
    program: str | None = None  # name of a program to play in place of a function of Megatron-Core's
    in_v: bool = False

    @property
    def dropout(self) -> bool:
        """Whether the forward draws random numbers."""
        drawn = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
        return any(self.fields.get(name) for name in drawn)

    @property
    def steps(self) -> int:
        """How many steps are compared: with other weights behind the first, and by the plan of measured costs."""
        return 3 if self.measures else 2

    @property
    def ranks(self) -> int:
        """Number of processes, the smallest that has these groups."""
        return self.pp * max(self.tp, self.ep * self.etp)


def tripled(loss: Any) -> Any:
    return 3 * loss


def selective(*modules: str) -> Fields:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCKS = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}
BIAS = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
}  # fmt: skip
SHARED = {"moe_shared_expert_intermediate_size": 20}
OVERLAPPED = {**SHARED, "moe_shared_expert_overlap": True}
DEEPEP = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
HYBRIDEP = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
MTP = {"mtp_num_layers": 1}
DDP: Fields = {"overlap_grad_reduce": False}
OVERLAP_REDUCE: Fields = {"overlap_grad_reduce": True, "bucket_size": 4000}
SHARDED: Fields = {**OVERLAP_REDUCE, "use_distributed_optimizer": True, "overlap_param_gather": True}
EIGHT = {"num_moe_experts": 8, "moe_router_topk": 3}
ONE_A_RANK = {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
Z_LOSS = {"moe_z_loss_coeff": 0.1}
FIRST = ("embedding", "decoder.layers.0.")

CASES: dict[str, Case] = {
    # one stage
    "plain": Case(measures=True),
    "forked": Case(SHARED, forked=True),
    "one rank": Case({**SHARED, **AUX}, ep=1, chosen=True),
    "eight experts, dense between, sequence aux loss, by tokens, DDP": Case(
        {**AUX, **EIGHT, "moe_router_load_balancing_type": "seq_aux_loss", "moe_layer_freq": [1, 0, 1]},
        layers=3, by_tokens=True, ddp=DDP,
    ),
    "one expert a rank, sinkhorn, probabilities on the input, tied": Case(
        {**ONE_A_RANK, "moe_router_load_balancing_type": "sinkhorn", "moe_apply_probs_on_input": True}, tied=True
    ),
    "expert bias, groups of experts, scaled z loss, router in float64, shared expert with a gate, DDP": Case(
        {
            **BIAS, **Z_LOSS, **SHARED, "num_moe_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
            "moe_router_dtype": "fp64", "grad_scale_func": tripled, "moe_shared_expert_gate": True,
        }, ddp=DDP,
    ),
    "allgather, dropout, core attention recomputed, routing is replayed": Case(
        {
            "moe_token_dispatcher_type": "allgather", "moe_enable_routing_replay": True, "attention_dropout": 0.2,
            **selective("core_attn"),
        }
    ),
    "capacity, padded, MoE layers recomputed": Case({**PADDED, **selective("moe")}),
    "core attention, norm, MLP and shared experts recomputed": Case(
        {"moe_layer_freq": [0, 1], **SHARED, **selective("core_attn", "layernorm", "mlp", "shared_experts")}
    ),
    "first layer frozen, aux and z loss, dropout, jitter, DDP, reduce overlapped": Case(
        {**AUX, **Z_LOSS, "hidden_dropout": 0.2, "attention_dropout": 0.2, "moe_input_jitter_eps": 0.1},
        layers=3, frozen=FIRST, ddp=OVERLAP_REDUCE,
    ),
    "fused weight gradients, shared expert with a gate, overlapped, biases, global aux loss": Case(
        {
            **OVERLAPPED, **AUX, "moe_router_load_balancing_type": "global_aux_loss", "moe_shared_expert_gate": True,
            "add_qkv_bias": True,
        }, fused=True
    ),
    "MTP twice, tied, core attention recomputed": Case(
        {"mtp_num_layers": 2, **selective("core_attn")}, tied=True, ddp=DDP
    ),
    "MTP, by tokens, capacity, first layer recomputed": Case(
        {**MTP, **Z_LOSS, "moe_expert_capacity_factor": 1.0, **BLOCKS}, by_tokens=True, ddp=DDP
    ),
    "MTP, dropout, layers recomputed": Case(
        {**MTP, **Z_LOSS, **FULL, "hidden_dropout": 0.2, "attention_dropout": 0.2}
    ),
    # ranks that share layers
    "tp 2, ep 2, MTP, dropout, fused weight gradients, reduce overlapped": Case(
        {**MTP, "hidden_dropout": 0.2, "attention_dropout": 0.2}, tp=2, fused=True, ddp=OVERLAP_REDUCE,
        measures=True,
    ),
    "tp 2, ep 4, eight experts": Case(EIGHT, tp=2, ep=4, ddp=DDP),
    "tp 2, ep 2, etp 2, shared expert, overlapped, aux loss and capacity, padded": Case(
        {**OVERLAPPED, **AUX, **PADDED}, tp=2, etp=2, ddp=DDP
    ),
    # libraries that dispatch
    "DeepEP": Case(DEEPEP, measures=True),
    "DeepEP, capacity, first layer recomputed": Case({**DEEPEP, "moe_expert_capacity_factor": 1.0, **BLOCKS}),
    "DeepEP, first layer frozen, DDP, reduce overlapped": Case(
        DEEPEP, layers=3, frozen=FIRST, ddp=OVERLAP_REDUCE
    ),
    "DeepEP, tp 2, ep 4, norm recomputed, fused weight gradients": Case(
        {**DEEPEP, **selective("layernorm", "core_attn"), "num_moe_experts": 8}, tp=2, ep=4, fused=True, ddp=DDP
    ),
    "DeepEP, vp 2, aux loss, shared expert, dropout, first layer frozen": Case(
        {**DEEPEP, **AUX, **SHARED, "hidden_dropout": 0.2}, layers=4, pp=2, vp=2, microbatches=4, frozen=FIRST
    ),
    "HybridEP": Case(HYBRIDEP),
    "HybridEP, one expert a rank, padded, MTP": Case(
        {**HYBRIDEP, **ONE_A_RANK, **PADDED, **MTP, **Z_LOSS, "moe_expert_capacity_factor": 2.0}
    ),
    "HybridEP, tp 2, ep 2": Case({**HYBRIDEP, **AUX}, tp=2, ddp=DDP),
    "HybridEP, vp 2, tied, DDP, reduce overlapped": Case(
        {**HYBRIDEP, **SHARED}, layers=4, pp=2, vp=2, microbatches=4, tied=True, ddp=OVERLAP_REDUCE
    ),
    # weight gradients that wait for backward_dw
    "delayed, grouped": Case({**EIGHT, "add_qkv_bias": True}, linears="te grouped", microbatches=4),
    "delayed, fused, dense and MoE, tied": Case(
        {**SHARED, "moe_layer_freq": [0, 1]}, linears="te grouped", fused=True, tied=True
    ),
    "delayed, fused, DDP, reduce overlapped": Case(
        SHARED, linears="te grouped", fused=True, ddp=OVERLAP_REDUCE, microbatches=4, measures=True
    ),
    "delayed, MTP, DDP, reduce overlapped": Case(
        {**OVERLAPPED, **MTP, **Z_LOSS, "add_qkv_bias": True}, linears="te", ddp=OVERLAP_REDUCE
    ),
    "delayed, ep 4": Case({"num_moe_experts": 8}, ep=4, linears="te grouped", fused=True, ddp=OVERLAP_REDUCE),
    "delayed, DeepEP, aux loss, MoE layers recomputed": Case(
        {**AUX, **DEEPEP, **selective("moe")}, linears="te grouped", fused=True, ddp=OVERLAP_REDUCE
    ),
    "delayed, vp 2": Case(
        {"hidden_dropout": 0.2}, layers=4, pp=2, vp=2, microbatches=4, linears="te grouped", fused=True,
        ddp=OVERLAP_REDUCE,
    ),
    # several stages
    "pp 2, aux loss, tied, layers recomputed, reduce aligned": Case(
        {**AUX, **FULL}, pp=2, tied=True, ddp=OVERLAP_REDUCE, aligned=True, chosen=True
    ),
    "pp 2, MTP, forked": Case(MTP, pp=2, microbatches=4, measures=True, forked=True),
    "vp 2, aux loss, shared expert": Case(
        {**AUX, **SHARED}, layers=4, pp=2, vp=2, microbatches=4, ddp=DDP
    ),
    "parameters gathered beside the forward": Case(SHARED, ddp=SHARDED),
    "vp 2, parameters gathered beside the forward, aligned": Case(
        {}, layers=4, pp=2, vp=2, microbatches=4, ddp={**SHARDED, "align_param_gather": True}, aligned=True
    ),
    "layout: embedding and loss are stages": Case(
        {**AUX, "pipeline_model_parallel_layout": "E|tt|tt|L"}, layers=4, pp=2, vp=2, microbatches=4, ddp=DDP,
    ),
    "layout: uneven, MTP beside the loss": Case(
        {**MTP, "pipeline_model_parallel_layout": "Et|tt||tmL"}, layers=4, pp=2, vp=2, microbatches=4
    ),
}  # fmt: skip
"""By name. Sizes are small: what differs between two schedules differs at every size. Options
that do not meet in the code share a case, and those that do meet in pairs.
"""

PROGRAMS: dict[str, Case] = {
    "zb_h1, ep 1": Case({**SHARED, **AUX}, ep=1, pp=2, microbatches=4, program="zb_h1"),
    "zb_h1": Case({**SHARED, **AUX}, pp=2, microbatches=4, ddp=OVERLAP_REDUCE, program="zb_h1"),
    "zb_h1, vp 2, delayed": Case(
        {}, layers=4, pp=2, vp=2, microbatches=4, linears="te grouped", fused=True, ddp=OVERLAP_REDUCE, program="zb_h1"
    ),
    "zb_h2, MTP, tied": Case(MTP, pp=2, microbatches=4, tied=True, ddp=DDP, program="zb_h2"),
    "auto": Case(SHARED, pp=2, microbatches=4, measures=True, program="auto"),
    "auto, vp 2": Case(AUX, layers=4, pp=2, vp=2, microbatches=4, ddp=OVERLAP_REDUCE, measures=True, program="auto"),
    "afab, vp 2": Case({**SHARED, **AUX}, layers=4, pp=2, vp=2, microbatches=4, program="afab"),
    "zb_h1, layout": Case(
        {**SHARED, "pipeline_model_parallel_layout": "E|tt|t|tL"}, layers=4, pp=2, vp=2, microbatches=4, program="zb_h1"
    ),
    "dualpipev": Case(
        {**SHARED, **AUX}, layers=4, pp=2, vp=2, microbatches=4, program="dualpipev", in_v=True
    ),
    "dualpipev, delayed": Case(
        {}, layers=4, pp=2, vp=2, microbatches=6, linears="te grouped", fused=True, ddp=OVERLAP_REDUCE,
        program="dualpipev", in_v=True,
    ),
    "zb_v": Case(SHARED, layers=4, pp=2, vp=2, microbatches=4, fused=True, program="zb_v", in_v=True),
}  # fmt: skip
"""Programs that Megatron-Core has no function for, against its own functions over the same stages."""
