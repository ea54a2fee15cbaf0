"""Steps by Megatron-Core's own forward-backward functions, and by those of this project in their place."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.engine import EngineOptions
from overlap1f1b.integrations.megatron import get_forward_backward_func
from overlap1f1b.integrations.megatron.forward_backward import COMBINED_INTERLEAVED, COMBINED_NO_PIPELINING
from overlap1f1b.integrations.megatron.step import logged
from overlap1f1b.plan import Overlap
from tests.engines import COSTS
from tests.integrations.megatron.core import models, shim
from tests.integrations.megatron.core.cases import Case

LEARNING_RATE = 0.1


class Step(NamedTuple):
    """What a step has given."""

    losses: list[float]
    grads: dict[str, Tensor | None]
    tracked: dict[str, float]


def serial_step(case: Case) -> list[Step]:
    """Train for some steps by Megatron-Core's own function for this case."""
    from megatron.core.pipeline_parallel import get_forward_backward_func as own_func

    return _train(case, own_func(), delayed=False)


def our_step(case: Case, overlap: Overlap, *, verify: bool = True, rows: bool = False, **options: Any) -> list[Step]:
    """Train for the same steps by our function, with several forwards open; with ``rows`` by our exchange."""
    schedule = (
        case.program or None
        if case.chosen or case.program
        else COMBINED_NO_PIPELINING
        if case.pp == 1
        else COMBINED_INTERLEAVED
    )
    costs = None if case.measures else COSTS
    function = get_forward_backward_func(
        schedule=schedule,
        options=EngineOptions(overlap=overlap, costs=costs, verify=verify, timeout=30, **options),
        dispatcher="rows" if rows else "own",
    )
    assert function.program == case.program
    if case.chosen:
        from megatron.core.pipeline_parallel import get_forward_backward_func as own_func

        assert function.__name__ == own_func().__name__
    return _train(case, function, delayed=case.linears != "own", in_v=case.in_v)


def unlike(expected: list[Step], found: list[Step]) -> list[str]:
    """Return one line on each loss or gradient that is not the same bit by bit."""
    lines = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        lines += [f"losses {one.losses}, {other.losses}"] if one.losses != other.losses else []
        lines += [f"step {number}: {line}" for line in models.compared(one.grads, other.grads)]
        lines += [f"logged {one.tracked}, {other.tracked}"] if one.tracked != pytest.approx(other.tracked) else []
    return lines


def of_pipeline(steps: list[Step]) -> list[Step]:
    """Return what steps have given on all ranks of this rank's pipeline, by the place of each weight in the model."""
    from megatron.core import parallel_state

    group, found = parallel_state.get_pipeline_model_parallel_group(), []
    for step in steps:
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, step, group=group)
        grads = {name.partition(".")[2]: grad for one in every for name, grad in one.grads.items()}
        found.append(Step([loss for one in every for loss in one.losses], grads, {}))
    return found


def one_step(function: Callable[..., Any], chunk: nn.Module, microbatches: int, *, fails: bool = False) -> None:
    """Play one step of a chunk by a function; with ``fails`` its forward raises."""

    def forward_step(data: Iterator[dict[str, Any]], model: nn.Module) -> Any:
        if fails:
            raise OSError("no disk")
        return _forward_step(data, model, _mean)

    function(
        forward_step_func=forward_step, data_iterator=iter(models.batches(microbatches, 1)), model=chunk,
        num_microbatches=microbatches, seq_length=models.SEQUENCE, micro_batch_size=models.BATCH,
    )  # fmt: skip


def _train(case: Case, function: Callable[..., Any], *, delayed: bool, in_v: bool = False) -> list[Step]:
    chunks = prepared(case, delayed=delayed, in_v=in_v)
    found = []
    for step in range(case.steps):
        for chunk in chunks:
            if case.ddp is not None:
                chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.grad = None
                if case.ddp is None and case.fused:
                    parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
        models.seed_random(step)
        data = models.batches(case.microbatches, 1 + step, dropout=case.dropout)
        several = case.vp is not None
        reports = function(
            forward_step_func=partial(_forward_step, loss_func=_by_tokens if case.by_tokens else _mean),
            data_iterator=[iter(data) for _ in chunks] if several else iter(data),
            model=chunks if several else chunks[0],
            num_microbatches=case.microbatches,
            seq_length=models.SEQUENCE,
            micro_batch_size=models.BATCH,
            forward_only=False,
        )
        found.append(Step(models.losses(reports), models.grads(chunks), _tracked()))
        with torch.no_grad():  # so that every step has other weights
            for number, chunk in enumerate(chunks):
                if (case.ddp or {}).get("use_distributed_optimizer"):  # a rank has a shard; forwards gather the others
                    _update_shards(chunk)
                    continue
                for parameter in chunk.parameters():
                    grad = found[-1].grads[f"{number}.{parameter.place}"]
                    if grad is not None:
                        parameter.sub_(LEARNING_RATE * grad)
    for chunk in chunks if case.ddp is not None else ():
        vars(chunk).clear()  # hooks of its own keep it after Megatron-Core's schedule, and would keep its groups
    return found


def _update_shards(chunk: Any) -> None:
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        ranks, rank = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
        for bucket in group.buckets:
            weights, grads = (data.chunk(ranks)[rank] for data in (bucket.param_data, bucket.grad_data))
            weights.sub_(LEARNING_RATE * grads)


def prepared(case: Case, *, delayed: bool, in_v: bool) -> list[Any]:
    """Return the case's chunks, with the config's functions as Megatron-LM's training loop sets them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    _forget()
    if case.fused:
        shim.fuse_weight_gradients()
    config = models.config_of(
        layers=case.layers, pp=case.pp, ep=case.ep, tp=case.tp, etp=case.etp, vp=case.vp,
        calculate_per_token_loss=case.by_tokens, gradient_accumulation_fusion=case.fused, **case.fields,
    )  # fmt: skip
    config.delay_wgrad_compute = delayed  # its constructor allows this with bf16 alone
    chunks: list[Any] = models.build(config, tied=case.tied, linears=case.linears, in_v=in_v)
    for chunk in chunks:
        if case.forked:
            models.fork(chunk)
        for parameter in chunk.parameters():
            parameter.requires_grad_(not parameter.place.startswith(case.frozen))
    if case.ddp is not None:
        options = DistributedDataParallelConfig(
            **{"use_distributed_optimizer": False, "delay_wgrad_compute": delayed, **case.ddp}
        )
        chunks = [
            DistributedDataParallel(config, options, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        if options.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in chunks]
            config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
            if case.aligned:
                starts = [chunk.start_grad_sync for chunk in chunks]
                config.grad_sync_func = starts if len(chunks) > 1 else starts[0]
            if options.align_param_gather:
                config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
        config.finalize_model_grads_func = finalize_model_grads
    return chunks


def _tracked() -> dict[str, float]:
    """Return the sums of what Megatron-Core's trackers have logged so far, by the place of each."""

    def sums(value: Any, place: str) -> Iterator[tuple[str, float]]:
        if isinstance(value, Tensor) and value.is_floating_point():
            yield place, float(value.sum())
        held = vars(value) if is_dataclass(value) else value
        for key, inner in held.items() if isinstance(held, dict) else ():
            yield from sums(inner, f"{place}.{key}")

    return dict(found for table in logged() for key, value in table.items() for found in sums(value, str(key)))


def _forget() -> None:
    """Empty Megatron-Core's trackers of logged losses, which are attributes of modules and classes."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    get_moe_layer_wise_logging_tracker().clear()
    if (later := sys.modules.get("megatron.core.transformer.moe.moe_logging")) is not None:  # after 0.16
        later.destroy_moe_metrics_tracker()
    for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
        scaler.main_loss_backward_scale = torch.ones(1)


def _forward_step(data: Iterator[dict[str, Any]], model: nn.Module, loss_func: Callable[..., Any]) -> Any:
    batch = dict(next(data))
    seed = batch.pop("seed")
    if seed is not None:  # one stream a microbatch, in whatever order they run
        models.seed_random(seed)
    return model(**batch), loss_func


def _mean(output: Tensor) -> Any:
    return output.mean(), {"loss": output.detach().mean()}


def _by_tokens(output: Tensor) -> Any:
    return output.sum(), torch.tensor(output.numel(), dtype=torch.int), {"loss": output.detach().sum()}
