"""torchtitan's pipeline schedule, played by the engine: torchtitan cuts the model and calls the schedule."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from overlap1f1b.cut.replacement import replaced
from overlap1f1b.engine import Engine, EngineOptions, Microbatch, MicrobatchBlock
from overlap1f1b.integrations import torch_pipelining
from overlap1f1b.integrations.rows import Dispatcher, exchange_by_rows
from overlap1f1b.schedule import Program, build_schedule
from overlap1f1b.schedule.values import check_kind

__all__ = ["SCHEDULES", "Overlapped", "Schedule", "pipelining_fn"]

SCHEDULES = {
    "1F1B": "combined_1f1b",
    "Interleaved1F1B": "combined_1f1b",
    "GPipe": "afab",
    "LoopedBFS": "afab",
    "InterleavedZeroBubble": "zb_h1",
    "ZBVZeroBubble": "zb_v",
    "DualPipeV": "dualpipev",
}
"""The program in place of each of torchtitan's schedules, with the same stages on each rank."""


def pipelining_fn(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    loss_fn: Callable[..., Any],
    split: Callable[..., Any] | None = None,
    schedule: str | None = None,
    extra_warmup: int | None = None,
    options: EngineOptions | None = None,
    dispatcher: Dispatcher = "own",
    **others: Any,
) -> tuple[Schedule, list[nn.Module], bool, bool]:
    """Cut a model into the parts of this rank; return a schedule that the engine plays, the parts, and what they hold.

    >>> spec = dataclasses.replace(spec, pipelining_fn=o1.integrations.torchtitan.pipelining_fn)  # of a Trainer.Config

    torchtitan's trainer calls it with its own keyword arguments, the model on the device "meta". The options are given
    beforehand, by ``functools.partial(pipelining_fn, options=EngineOptions(overlap=2))``.

    Args:
        split: The model's own ``pipelining_fn``, which cuts it; by default torchtitan's ``pipeline_llm``.
        schedule: Name of a program, see :func:`build_schedule`, in place of the one in ``SCHEDULES``. It must put the
            same stages on each rank.
        extra_warmup: See :func:`build_schedule`.
        options: How the engine plays; ``experts_over`` follows from torchtitan's mesh. ``recompute`` is in place of
            ``ac_config``. With ``"none"`` it is ``"block"`` if there is an ``ac_config`` and ranks share experts, since
            torchtitan halves the counts of tokens under its own, and here they count once; else its own is applied.
        dispatcher: What exchanges the rows: ``"own"``, torchtitan's; or ``"rows"``, in place of its all-to-all
            dispatcher ours, which sends a token once to each rank, and has ``parts`` and ``capacity``.
        others: Further arguments of torchtitan's, for ``split``.

    Returns:
        The schedule; the parts of the model on this rank, in torchtitan's order; whether they hold the first stage, and
        the last.

    Raises:
        ValueError: A setting of torchtitan's that the engine cannot carry out, an unknown schedule, a batch that does
            not divide into microbatches, or a number of these that does not fit the schedule.
    """
    _check(parallel_dims, training, parallelism, compile_config)
    check_kind("dispatcher", dispatcher, Dispatcher)
    options = replace(
        EngineOptions() if options is None else options, experts_over=("ep", "tp") if parallel_dims.ep > 1 else ("ep",)
    )
    if options.recompute == "none" and ac_config is not None and parallel_dims.ep > 1:
        options = replace(options, recompute="block")
    if options.recompute != "none":
        ac_config = None
    program_of = partial(_program_of, training, parallelism, schedule, extra_warmup)
    single = parallel_dims.pp == 1 or parallelism.pipeline_parallel_schedule.lower() in ("1f1b", "gpipe")
    program_of(1 if single else 2)  # stages a rank, of torchtitan's: tell what does not fit before anything is cut
    arguments = {
        "parallel_dims": parallel_dims, "training": training, "parallelism": parallelism,
        "compile_config": compile_config, "ac_config": ac_config, **others,
    }  # fmt: skip
    if parallel_dims.pp > 1:
        cut = split or importlib.import_module("torchtitan.distributed.pipeline_parallel").pipeline_llm
        made, parts, first, last = cut(model, loss_fn=loss_fn, **arguments)
        numbers = [stage.stage_index for stage in getattr(made, "_stages", None) or [made._stage]]
    else:
        arguments = {name: value for name, value in arguments.items() if name in _OF_PARALLELIZE}
        parts, first, last, numbers = [others["parallelize_fn"](model, **arguments)], True, True, [0]
    for part in parts if dispatcher == "rows" else ():
        exchange_by_rows(part)
    program = program_of(len(parts))
    rank = parallel_dims.get_mesh("pp").get_local_rank() if parallel_dims.pp > 1 else 0
    held = [stage for _, stage in program.placement.places(rank)]
    if sorted(held) != sorted(numbers):
        raise ValueError(
            f"schedule={program.name!r} puts stages {sorted(held)} on pipeline rank {rank}, "
            f"pipeline_parallel_schedule={parallelism.pipeline_parallel_schedule!r} {sorted(numbers)}; "
            "allowed: schedules that agree"
        )

    def make_engine(stages: Mapping[int, list[nn.Module]]) -> Engine:  # which makes the mesh's groups
        return Engine(stages, program, mesh=_mesh(parallel_dims), options=options)

    return Schedule(dict(zip(numbers, parts, strict=True)), program, loss_fn, make_engine), parts, first, last


_OF_PARALLELIZE = ("parallel_dims", "training", "parallelism", "compile_config", "ac_config", "dump_folder")


def _check(parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any) -> None:
    """Raise ValueError for settings of torchtitan that an engine does not play."""
    cp, tp, ep, backend = parallel_dims.cp, parallel_dims.tp, parallel_dims.ep, parallelism.spmd_backend
    compiled = list(compile_config.components) if compile_config.enable else []
    batch, size = training.local_batch_size, parallelism.pipeline_parallel_microbatch_size
    refused = {
        f"parallelism.context_parallel_degree={cp}; allowed: 1": cp > 1,
        f"parallelism.expert_parallel_degree={ep} with tensor_parallel_degree={tp}; allowed: 1, or a multiple of it": (
            ep > 1 and ep % tp
        ),
        "parallelism.spmd_backend='full_dtensor'; allowed: 'partial_dtensor', 'spmd_types'": backend == "full_dtensor",
        f"parallelism.spmd_backend={backend!r} with expert_parallel_degree={ep}; allowed: 'partial_dtensor', whose "
        "exchanges the engine finds": backend != "partial_dtensor" and ep > 1,
        f"compile.components={compiled}; allowed: without 'model' (torchtitan compiles whole layers, which cannot be "
        "cut at their exchanges)": "model" in compiled,
        "training.enable_cpu_offload=True; allowed: False (parameters stay gathered during a step)": (
            training.enable_cpu_offload
        ),
        f"training.local_batch_size={batch} with parallelism.pipeline_parallel_microbatch_size={size}; allowed: a "
        f"multiple of {size}": batch % size,
    }
    if found := next((text for text, holds in refused.items() if holds), None):
        raise ValueError(found)


def _program_of(
    training: Any, parallelism: Any, schedule: str | None, extra_warmup: int | None, chunks: int
) -> Program:
    """Return the program of torchtitan's schedule, or of its table."""
    named = {name.lower(): name for name in SCHEDULES}
    asked = parallelism.pipeline_parallel_schedule
    if asked.lower() not in named:
        raise ValueError(f"parallelism.pipeline_parallel_schedule={asked!r}; allowed: {', '.join(SCHEDULES)}")
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    if parallelism.pipeline_parallel_schedule_csv:
        program = Program.from_csv(parallelism.pipeline_parallel_schedule_csv)
        if program.microbatches != microbatches:
            raise ValueError(
                f"pipeline_parallel_schedule_csv of {program.microbatches} microbatches, "
                f"local_batch_size / pipeline_parallel_microbatch_size is {microbatches}; allowed: as many"
            )
        return program
    return build_schedule(
        schedule or SCHEDULES[named[asked.lower()]],
        ranks=parallelism.pipeline_parallel_degree,
        microbatches=microbatches,
        chunks=chunks,
        extra_warmup=extra_warmup,
    )


def _mesh(parallel_dims: Any) -> DeviceMesh | None:
    """Return the engine's mesh of torchtitan's ranks: the last ones share the experts, as in its mesh of experts."""
    world, tp = parallel_dims.world_mesh, parallel_dims.tp
    ep = max(1, parallel_dims.ep // tp)  # beside the tensor group
    data = parallel_dims.dp_replicate * parallel_dims.dp_shard
    sizes = {"pp": parallel_dims.pp, "dp": data // ep, "ep": ep, "tp": tp}
    several = {name: size for name, size in sizes.items() if size > 1}
    if not several:
        return None
    ranks = torch.as_tensor(world.mesh).view(*several.values())
    return DeviceMesh(world.device_type, ranks, mesh_dim_names=tuple(several))


class Schedule(torch_pipelining.Schedule):
    """A pipeline schedule as torchtitan calls it, played by an engine; made by :func:`pipelining_fn`.

    Its ``loss_fn`` is torchtitan's, ``(prediction, labels, **loss_kwargs) → (loss, metrics)``.
    """

    def step(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Play the microbatches, as of torch; outputs are returned only where they are asked for."""
        # Keep the head's weights gathered, and the norm's: the loss of one open microbatch would free them for all.
        head = self._head  # what replaces it is no FSDPModule
        with replaced([(vars(self._loss_fn), "lm_head", head.__call__)] if isinstance(head, FSDPModule) else []):
            return super().step(*args, return_outputs=return_outputs, **kwargs)

    def _blocks(self) -> dict[int, list[nn.Module]]:
        stages, head = super()._blocks(), self._head
        if head is not None and self._last in self._parts:
            self._parts[self._last].whole = (head,)
            stages[self._last].append(LossWithHead())
        return stages

    def _loss(self, loss_kwargs: Mapping[str, Any], kwargs: Mapping[str, Any], *tensors: Tensor) -> Tensor:
        if "positions" in kwargs and self._has_backward and self._last == 0:
            # On one pipeline rank torchtitan's trainer gives them to the loss.
            loss_kwargs = {"positions": kwargs["positions"], **loss_kwargs}
        return super()._loss(loss_kwargs, kwargs, *tensors)[0]

    @cached_property
    def _head(self) -> nn.Module | None:
        """The head that the loss calls by itself, and whose backward it runs, as torchtitan's chunked loss."""
        head = getattr(self._loss_fn, "lm_head", None)
        return head if isinstance(head, nn.Module) else None


class LossWithHead(MicrobatchBlock):
    """The block of a loss that calls the model's head by itself: behind the part, it runs once."""

    keeps = True

    def forward(self, *outputs: Tensor, microbatch: Microbatch | None = None) -> tuple[Tensor, ...]:
        """Return what the loss is given."""
        return outputs


class Overlapped:
    """Let the engine play the steps of a torchtitan ``Trainer`` over any number of pipeline ranks, one included.

    >>> from torchtitan.trainer import Trainer
    >>> class OverlapTrainer(Overlapped, Trainer):
    ...     pass
    >>> trainer = OverlapTrainer(config)  # any Trainer.Config
    >>> trainer.train()

    torchtitan's own trainer asks for a schedule over several pipeline ranks alone, and on one runs its microbatches one
    after the other. A model whose ``pipelining_fn`` is torchtitan's gets ours, cut as its own cuts it; for options give
    the model ours.

    Raises:
        ValueError: As of :func:`pipelining_fn`.
    """

    def __init__(self, config: Any) -> None:
        spec, cut = config.model_spec, config.model_spec.pipelining_fn
        if getattr(cut, "func", cut) is not pipelining_fn:  # ours, perhaps with options by partial
            config = replace(config, model_spec=replace(spec, pipelining_fn=partial(pipelining_fn, split=cut)))
        made: Any = super().__init__
        made(config)

    def init_distributed(self) -> Any:
        """Return torchtitan's mesh, under which its trainer calls a schedule on one pipeline rank, too."""
        inherited: Any = super()
        dims = inherited.init_distributed()
        scheduled = type(type(dims).__name__, (type(dims),), {"pp_enabled": property(lambda self: True)})
        return scheduled(**{field.name: getattr(dims, field.name) for field in fields(dims)})
