"""What the drop-in reads of a Megatron-Core config, and of its process groups."""

from __future__ import annotations

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
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.plan import NodeCosts
from overlap1f1b.transport.groups import gathered

PARALLEL_STATE = "megatron.core.parallel_state"
NoSync = Callable[[], AbstractContextManager[Any]]
Sync = Callable[[Any], object]


@dataclass(frozen=True)
class ProcessGroups:
    """The groups of this rank; Megatron-Core's ``ProcessGroupCollection`` serves as well.

    >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "ep"))
    >>> groups = ProcessGroups(pp=mesh.get_group("pp"), ep=mesh.get_group("ep"))

    Args:
        pp: Ranks that hold the stages, in their order.
        ep: Ranks that share the experts; the same that the model's ``GroupedExperts`` were given.
        cp: Ranks that share a sequence; the loss is multiplied by their number.
        tp: Ranks that share every layer.
        dp: Ranks that hold the same with other data.

    Those of ``tp``, ``cp`` and ``dp`` play one plan, so that collectives inside their layers and between their
    gradients meet. None stands for one rank. Whatever else a collection has is for ``finalize_model_grads_func``, which
    is handed it.
    """

    pp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None

    @classmethod
    def default(cls) -> object:
        """Megatron-Core's own, where its ``parallel_state`` has been initialised in this process; else one rank."""
        state: Any = sys.modules.get(PARALLEL_STATE)
        if state is None or not state.model_parallel_is_initialized():
            return cls()
        collections: Any = importlib.import_module("megatron.core.process_groups_config")
        return collections.ProcessGroupCollection.use_mpu_process_groups()


@dataclass(frozen=True)
class Config:
    """The fields of Megatron-Core's ``ModelParallelConfig`` that have an effect here; what a model lacks is unset."""

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
    timers: Callable[..., Any] | None = None
    barrier_with_L1_time: bool = True  # noqa: N815 - Megatron-Core's name

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """The config of a model or of what it wraps."""
        config = found(model, "config")
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls) if hasattr(config, field.name)})


def found(model: nn.Module, name: str) -> Any:
    """An attribute of a model or, through ``.module``, of what it wraps; None where none has it."""
    while not hasattr(model, name):
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return getattr(model, name)


def each(value: Any, count: int) -> list[Any]:
    """A value for every chunk; a list has one of each already."""
    return list(value) if isinstance(value, list | tuple) else [value] * count


def group_of(groups: object, name: str) -> dist.ProcessGroup | None:
    """A group of several ranks; None for one rank."""
    group = getattr(groups, name, None)
    return None if group is None or group.size() == 1 else group


def size_of(groups: object, name: str) -> int:
    """Ranks of a group."""
    group = group_of(groups, name)
    return 1 if group is None else group.size()


def agreed(costs: NodeCosts | None, groups: object, limit: timedelta) -> NodeCosts | None:
    """The costs of the first of all ranks along "tp", "cp" and "dp", all of which must call this."""
    for name in ("tp", "cp", "dp"):
        if (group := group_of(groups, name)) is not None:
            costs = gathered(dist.get_process_group_ranks(group), costs, limit)[0]
    return costs


def mesh_of(groups: object, device: torch.device, limit: timedelta) -> DeviceMesh | None:
    """The mesh of "pp" and "ep" that this rank is in; None for one rank. All ranks along "ep" must call it.

    Raises:
        ValueError: Groups that form no grid.
    """
    pp, ep = group_of(groups, "pp"), group_of(groups, "ep")
    line = dist.get_process_group_ranks(pp) if pp is not None else [dist.get_rank()] if ep is not None else []
    lines: list[Any] = [line]
    if ep is not None:
        own, column = 0 if pp is None else pp.rank(), dist.get_process_group_ranks(ep)
        lines = gathered(column, line, limit)
        if [every[own : own + 1] for every in lines] != [[rank] for rank in column]:
            raise ValueError(f"pp groups {lines} of the ep group {column}; allowed: a grid, one rank of ep in each")
    ranks = torch.tensor(lines).T  # [pp, ep]
    named = [(name, group) for name, group in (("pp", pp), ("ep", ep)) if group is not None]
    if not named:
        return None
    return DeviceMesh.from_group(
        [group for _, group in named],
        device.type,
        mesh=ranks if len(named) == 2 else ranks.flatten(),
        mesh_dim_names=tuple(name for name, _ in named),
    )
