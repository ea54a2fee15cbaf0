"""Megatron-Core's config and process groups, in the form that the drop-in reads."""

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.transport.groups import limit

PARALLEL_STATE = "megatron.core.parallel_state"
NoSync = Callable[[], AbstractContextManager[Any]]
Sync = Callable[[Any], object]

# ------------------------------------------------------------------------------------------------------ process groups


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of this rank. Megatron-Core's ``ProcessGroupCollection`` can be used instead.

    >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "ep"))
    >>> groups = ProcessGroups(pp=mesh.get_group("pp"), ep=mesh.get_group("ep"))

    None means a group of one rank. Ranks of ``tp``, ``cp`` and ``dp`` play one plan, so that the collectives inside
    their layers and for their gradients come in one order. Other attributes of a collection are for
    ``finalize_model_grads_func``, which receives the collection.

    Args:
        pp: Ranks that hold the stages, in their order.
        ep: Ranks that share the experts; the group that the model's ``GroupedExperts`` were given.
        cp: Ranks that share a sequence; the loss is multiplied by their number.
        tp: Ranks that share every layer.
        dp: Ranks that hold the same parameters and other data.
    """

    pp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None

    @classmethod
    def default(cls) -> object:
        """Return Megatron-Core's own groups if its ``parallel_state`` is initialised in this process, else one rank."""
        state: Any = sys.modules.get(PARALLEL_STATE)
        if state is None or not state.model_parallel_is_initialized():
            return cls()
        collections: Any = importlib.import_module("megatron.core.process_groups_config")
        return collections.ProcessGroupCollection.use_mpu_process_groups()


def group_of(groups: object, name: str) -> dist.ProcessGroup | None:
    """Return the group of this name; None if it is one rank."""
    group = getattr(groups, name, None)
    return None if group is None or group.size() == 1 else group


def size_of(groups: object, name: str) -> int:
    """Return the number of ranks in the group of this name."""
    group = group_of(groups, name)
    return 1 if group is None else group.size()


def limit_inner(groups: object, timeout: timedelta) -> None:
    """Set the limit of waits in the groups in which layers communicate by themselves."""
    for name in ("tp", "cp", "ep", "expt_tp", "tp_ep", "tp_cp", "tp_dp_cp"):
        if (group := group_of(groups, name)) is not None:
            limit(group, timeout)


def playing_alike(groups: object) -> list[list[int]]:
    """Return the ranks along "tp", "cp" and "dp", which play the same plan."""
    found = (group_of(groups, name) for name in ("tp", "cp", "dp"))
    return [dist.get_process_group_ranks(group) for group in found if group is not None]


# -------------------------------------------------------------------------------------------------------------- config


@dataclass(frozen=True)
class Config:
    """The fields of Megatron-Core's ``ModelParallelConfig`` that have an effect here; missing fields have a default."""

    grad_scale_func: Callable[[Tensor], Tensor] | None = None
    finalize_model_grads_func: Callable[..., object] | None = None
    no_sync_func: NoSync | Sequence[NoSync] | None = None
    grad_sync_func: Sync | Sequence[Sync] | None = None
    param_sync_func: Sync | Sequence[Sync] | None = None
    calculate_per_token_loss: bool = False
    variable_seq_lengths: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None
    num_moe_experts: int | None = None
    moe_grad_scale_func: Callable[[], Tensor] | None = None
    mtp_num_layers: int | None = None
    mtp_grad_scale_func: Callable[[], Tensor] | None = None
    experimental_attention_variant: str | None = None
    experimental_attention_variant_loss_scale_func: Callable[[Tensor], object] | None = None
    timers: Callable[..., Any] | None = None
    barrier_with_L1_time: bool = True  # noqa: N815 - Megatron-Core's name

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Read the config of a model, or of the model that it wraps."""
        config = attribute_of(model, "config")
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls) if hasattr(config, field.name)})


def attribute_of(model: nn.Module, name: str) -> Any:
    """Return an attribute of a model or, through ``.module``, of the model that it wraps; None if none has it."""
    if hasattr(model, name):
        return getattr(model, name)
    inner = getattr(model, "module", None)
    return attribute_of(inner, name) if isinstance(inner, nn.Module) else None


def class_names(held: object) -> list[str]:
    """Return the names of an object's class and its bases: Megatron-Core's classes are known by their names."""
    return [kind.__name__ for kind in type(held).__mro__]


def each(value: Any, count: int) -> list[Any]:
    """Return one value for each chunk: the list itself, or the value repeated."""
    return list(value) if isinstance(value, list | tuple) else [value] * count


# ---------------------------------------------------------------------------------------------------- refused options

SUSPENDED = " in a chunk that exchanges rows or delays weight gradients"
OWN, ROWS = " with dispatcher='own'", " with dispatcher='rows'"
REFUSED: dict[str, dict[str, tuple[object, ...]]] = {
    "": {
        "num_microbatches_with_partial_activation_checkpoints": (None,),  # forward steps would need another argument
        "defer_embedding_wgrad_compute": (False,),  # the schedule would have to compute these gradients at its end
        "fine_grained_activation_offloading": (False,),  # the order of loads follows the schedule's order
        "cpu_offloading": (False,),  # the same
        "moe_paged_stash": (False,),  # the same, of pages
        "hybrid_context_parallel": (False,),  # the groups change from microbatch to microbatch
        "cuda_graph_impl": ("none",),  # graphs are captured in the schedule's order
        "enable_cuda_graph": (False,),
        "external_cuda_graph": (False,),
        "overlap_dispatch_backward_with_experts_wgrad": (False,),  # a backward calls backward_dw, not a weight node
    },
    SUSPENDED: {"fp8": (None,), "fp4": (None,)},  # a state of the forward or backward that runs
    OWN: {"moe_flex_dispatcher_backend": ("deepep", "hybridep")},  # buffers that microbatches share
    ROWS: {
        "moe_expert_capacity_factor": (None,),  # rows of an expert's room; ours is the engine's capacity
        "moe_expert_rank_capacity_factor": (None,),  # the same of a rank
        "moe_shared_expert_overlap": (False,),  # its dispatcher computes the shared experts in parts
        "moe_router_padding_for_fp8": (False,),
        "moe_router_padding_for_quantization": (False,),
        "moe_dispatch_fwd_dtype": ("bf16",),  # its rows are quantized
        "moe_combine_bwd_dtype": ("bf16",),
        "expert_tensor_parallel_size": (1,),
    },
}
"""Options of a config that would change results if they were ignored, each with the values that are allowed; by where
this holds: everywhere, in some chunks, or with a dispatcher.
"""

RANDOM, TRACKER = "megatron.core.tensor_parallel.random", "get_cuda_rng_tracker"
"""Module of random numbers, and its function that returns their streams."""
KERNELS = "fused_weight_gradient_mlp_cuda"
"""Module of the kernels that add to ``main_grad``."""

SIZES = {
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "cp": "context_parallel_size",
    "tp": "tensor_model_parallel_size",
}
"""For each group, the config's field with its number of ranks."""


def check_options(model: nn.Module, where: str = "") -> None:
    """Raise ValueError if a chunk's config has an option of :data:`REFUSED` ``where`` it is, by default everywhere."""
    config = attribute_of(model, "config")
    scales = [field.name for field in fields(Config) if field.name.endswith("_scale_func")]
    for field, value in getattr(config, "__dict__", {}).items():
        if field.endswith("_scale_func") and field not in scales and value is not None:
            raise ValueError(f"{field}={value!r}; allowed: None, or one of {', '.join(scales)}")
    for field, allowed in REFUSED[where].items():
        value = getattr(config, field, None)
        if value and value not in allowed:
            raise ValueError(f"{field}={value!r}{where}; allowed: {', '.join(map(str, allowed))}")


def check_sizes(model: nn.Module, groups: object) -> None:
    """Raise ValueError unless the groups have as many ranks as a chunk's config says.

    A config of one rank fits every group, since the chunk may still hold Experts over several ranks.
    """
    config = attribute_of(model, "config")
    for name, field in SIZES.items():
        held, wanted = size_of(groups, name), getattr(config, field, None) or 1
        if wanted not in (1, held):
            raise ValueError(
                f"{field}={wanted} with a group {name} of {held} ranks; "
                f"allowed: a pg_collection whose {name} has {wanted}"
            )
