"""The choice among Megatron-Core's schedules."""

from __future__ import annotations

import sys

from overlap1f1b.engine import DEFAULT_OVERLAP
from overlap1f1b.integrations.megatron.config import PARALLEL_STATE, ProcessGroups, size_of
from overlap1f1b.integrations.megatron.forward_backward import ForwardBackward
from overlap1f1b.integrations.megatron.layers import Layers, default_layers
from overlap1f1b.integrations.megatron.names import (
    CHUNKED,
    NO_PIPELINING,
    SCHEDULES,
    UNPIPELINED,
    WITH_INTERLEAVING,
    WITHOUT_INTERLEAVING,
)
from overlap1f1b.plan import NodeCosts, Overlap
from overlap1f1b.transport.limits import DEFAULT_LIMIT_S


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    *,
    pg_collection: object = None,
    schedule: str | None = None,
    overlap: Overlap = DEFAULT_OVERLAP,
    costs: NodeCosts | None = None,
    layers: Layers = default_layers,
    split_rank: int | None = None,
    timeout: float = DEFAULT_LIMIT_S,
) -> ForwardBackward:
    """The function that runs the forwards and backwards of a step; keep it, it holds what is planned and measured.

    >>> groups = ProcessGroups(pp=pp_group, ep=ep_group)
    >>> forward_backward = get_forward_backward_func(pp_size=4, vp_size=2, pg_collection=groups)
    >>> reports = forward_backward(
    ...     forward_step_func=forward_step, data_iterator=iterators, model=chunks, num_microbatches=16,
    ...     seq_length=4096, micro_batch_size=1,
    ... )  # gradients are in .grad

    As in Megatron-Core (``megatron/core/pipeline_parallel``) ``pp_size`` and ``vp_size`` choose among
    ``forward_backward_no_pipelining``, ``…_pipelining_without_interleaving`` and ``…_pipelining_with_interleaving``.

    A chunk is cut before each of its ``layers`` and behind the last, so that each is a block. In one block of several
    MoE layers, the gradient of each one's experts would be looked for through all layers after it, once for each: a
    step of 8 layers in one block took 1.7 times as long as in 8. Whatever a layer needs a gradient for must come by its
    arguments, which the first forward is checked for.

    Args:
        pp_size: Pipeline ranks; None for those of the group ``pp``.
        vp_size: Chunks of a rank, if interleaved; without any of the three as Megatron-Core was initialised.
        pg_collection: Groups of this rank: :class:`ProcessGroups`, or any object with ``pp``, ``ep``, ``cp``, ``tp``
            and ``dp``. By default those of Megatron-Core's ``parallel_state``, as in Megatron-Core, where it has been
            initialised; else this rank alone.
        schedule: One of ``SCHEDULES``, in place of the choice.
        overlap, costs, timeout: See :class:`~overlap1f1b.engine.Engine`.
        layers: The layers of a chunk in order; none leaves it whole.
        split_rank: First pipeline rank of the decoder in an encoder-decoder model: from there on, the last input of a
            chunk (what the encoder made) is handed on behind its output.

    Raises:
        ValueError: Sizes that do not fit the groups, or an unknown schedule.
    """
    groups = ProcessGroups.default() if pg_collection is None else pg_collection
    held = size_of(groups, "pp")
    if pg_collection is None and pp_size is None and vp_size is None and not isinstance(groups, ProcessGroups):
        vp_size = sys.modules[PARALLEL_STATE].get_virtual_pipeline_model_parallel_world_size()
    if pp_size not in (None, held):
        raise ValueError(f"pp_size={pp_size} with a group pp of {held} ranks; allowed: {held}")
    if vp_size is not None and vp_size < 1:
        raise ValueError(f"vp_size={vp_size}; allowed: None or 1 or more")
    if schedule is None:
        piped = WITHOUT_INTERLEAVING if vp_size is None else WITH_INTERLEAVING
        schedule = piped if held > 1 else NO_PIPELINING
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}; allowed: {', '.join(SCHEDULES)}")
    if schedule in UNPIPELINED and held > 1:
        raise ValueError(f"{schedule} over {held} pipeline ranks; allowed: 1")
    if split_rank is not None and (schedule in CHUNKED or not 0 < split_rank < held):
        raise ValueError(
            f"split_rank={split_rank} with {schedule} over {held} ranks; allowed: 1 to {held - 1} without interleaving"
        )
    return ForwardBackward(
        schedule,
        groups,
        vp_size=vp_size,
        overlap=overlap,
        costs=costs,
        layers=layers,
        split_rank=split_rank,
        timeout=timeout,
    )
