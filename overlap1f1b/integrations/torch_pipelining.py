"""Schedules of torch.distributed.pipelining, played by the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.utils._pytree import tree_leaves

from overlap1f1b.cut.replacement import replaced
from overlap1f1b.engine import Engine, EngineOptions, Feed, Microbatch, MicrobatchBlock, StepResult
from overlap1f1b.schedule import Placement, Program, actions_of, build_schedule, parse_slot
from overlap1f1b.schedule.program import program_of
from overlap1f1b.schedule.values import check_kind, checked
from overlap1f1b.transport.exchange import Exchange

__all__ = ["Schedule", "overlapped"]

_FOLLOWED = (
    "_loss_fn", "_args_chunk_spec", "_kwargs_chunk_spec", "_output_merge_spec", "_has_backward", "_n_microbatches",
    "scale_grads",
)  # fmt: skip
"""What a loop may read and set of torch's schedule, between two steps."""
_READ = ("_stage", "_stages", "_num_stages", "pp_group_size", "rank", "stage_index_to_group_rank", "pipeline_order")
"""What it may read."""
_SIZES = [f"_{stage}_{way}_initialized" for stage in ("stage", "stages") for way in ("forward", "backward")]
"""What says that tensors between stages have a size. False lets them have another one from the next step on."""
_PLAYS = ("step", "eval", "_step_microbatches", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses")
"""Methods of torch's that the engine plays in place of."""


@checked
def overlapped(
    schedule: Any,
    *,
    mesh: DeviceMesh | None = None,
    options: EngineOptions | None = None,
    exchange: Exchange | None = None,
) -> Schedule:
    """Return a schedule with the ``step`` and ``eval`` of one of torch's, whose table of actions the engine plays.

    >>> import torch, torch.distributed as dist, torch.nn.functional as F
    >>> from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV
    >>> from overlap1f1b.moe import MoE, RouterConfig
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layers = [MoE(32, 16, RouterConfig(experts=4, top_k=2)) for _ in range(2)]
    >>> model = torch.nn.Sequential(torch.nn.Embedding(256, 32), *layers, torch.nn.Linear(32, 256))
    >>> parts = model[:2], model[2:]
    >>> stages = [PipelineStage(part, index, 2, torch.device("cpu")) for index, part in enumerate(parts)]
    >>> def loss_fn(logits, target):
    ...     return F.cross_entropy(logits.flatten(0, 1), target.flatten())
    >>> schedule = overlapped(ScheduleDualPipeV(stages, n_microbatches=4, loss_fn=loss_fn))
    >>> tokens, losses = torch.randint(256, (4, 17)), []
    >>> logits = schedule.step(tokens[:, :-1], target=tokens[:, 1:], losses=losses)  # gradients are in .grad
    >>> logits.shape, len(losses)
    (torch.Size([4, 16, 256]), 4)
    >>> dist.destroy_process_group()

    Every rank calls this. The engine is made at the first step. Gradients are torch's: divided by the number of
    microbatches under ``scale_grads``, and not summed over ranks.

    Args:
        schedule: Any schedule of torch that trains, with ``PipelineStage`` stages.
        mesh: Mesh of the ranks, with "pp" for the pipeline and "ep" for ranks that share experts; None for one rank.
        options: How the engine plays; gradients are never summed over ranks.
        exchange: See :class:`~overlap1f1b.engine.Engine`.

    Raises:
        ValueError: A stage is no plain ``PipelineStage`` or has a ``dw_builder``; no table of actions; a schedule that
            plays in a way of its own. The first step refuses a table that breaks a rule of programs, and what the
            Engine refuses.
    """
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    for stage in stages:
        if not isinstance(stage, PipelineStage) or stage.dw_builder is not None:
            what = "a dw_builder" if isinstance(stage, PipelineStage) else f"a stage of type {type(stage).__name__}"
            raise ValueError(f"a {type(schedule).__name__} with {what}; allowed: a PipelineStage without a dw_builder")
    program = _program_of(schedule, stages)
    own = [name for name in _PLAYS if getattr(schedule, name).__module__ != torch_schedules.__name__]
    own += ["register_custom_function"] if getattr(schedule, "_comp_type_to_function_map", None) else []
    if own:
        raise ValueError(
            f"a {type(schedule).__name__} with {own[0]} of its own; allowed: torch's, which the engine plays"
        )
    engine_options = replace(options or EngineOptions(), reduce=False)
    make_engine = partial(Engine, program=program, mesh=mesh, options=engine_options, exchange=exchange)
    parts = {stage.stage_index: stage.submod for stage in stages}
    return Schedule(parts, program, schedule._loss_fn, make_engine, schedule)


def _program_of(schedule: Any, stages: Sequence[PipelineStage]) -> Program:
    """Return the program of the table of a schedule with these stages on a rank."""
    name, count, chunks = type(schedule).__name__, schedule._n_microbatches, len(stages)
    # torch's table of 1F1B, which it does not play, has wrong numbers. That of LoopedBFS takes the last microbatch's
    # backwards first, but the engine adds gradients in the order of microbatches.
    played = {"Schedule1F1B": "1f1b", "ScheduleLoopedBFS": "afab"}
    if (ours := next((played[k.__name__] for k in type(schedule).__mro__ if k.__name__ in played), None)) is not None:
        return build_schedule(ours, ranks=schedule._num_stages // chunks, microbatches=count, chunks=chunks)
    table = getattr(schedule, "pipeline_order", None) or getattr(schedule, "pipeline_order_with_comms", None)
    if not table:
        raise ValueError(f"a {name} without a table of actions; allowed: a schedule of torch that trains")
    rows = [[parse_slot(str(act)) for act in row if act and act.is_compute_op] for _, row in sorted(table.items())]
    ranks = {action.stage: rank for rank, row in enumerate(rows) for slot in row for action in actions_of(slot)}
    program = program_of(name, count, Placement((tuple(ranks[stage] for stage in sorted(ranks)),)), rows)
    if type(schedule) is torch_schedules._PipelineScheduleRuntime:  # its table is of a file
        return program
    return replace(program, build=partial(_rebuilt, type(schedule), schedule._num_stages, chunks))


def _rebuilt(kind: type[Any], count: int, chunks: int, microbatches: int) -> Program:
    stage = SimpleNamespace(num_stages=count, group_size=count // chunks, group_rank=0, submod=None)
    stages: list[Any] = [stage] * chunks
    return _program_of(kind(stages, microbatches), stages)


class Schedule:
    """A pipeline schedule that is called as torch's, played by an engine; made by :func:`overlapped`.

    ``make_engine`` is called at the first call, when the ``parts``, the modules of this rank's stages, have weights.

    A loop may read and set, between steps: the loss ``_loss_fn``, ``_args_chunk_spec``, ``_kwargs_chunk_spec``,
    ``_output_merge_spec``, ``_n_microbatches``, ``_has_backward`` and ``scale_grads``, here or at torch's schedule. On
    all ranks alike, ``_stages_forward_initialized = False`` lets tensors between stages have another size from then on.
    Anything else of torch's raises AttributeError, except what says where the stages are.

    Args:
        loss_fn: ``(output, target, **loss_kwargs) → scalar`` of one microbatch; None plays forwards alone.
        like: torch's schedule, which splits batches, calls its loss and joins outputs; None for its defaults, without a
            scale.

    Attributes:
        result: Result of the last call; ``result.overlap.hidden_fraction`` says how much of the exchange was hidden.
    """

    result: StepResult | None

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        program: Program,
        loss_fn: Callable[..., Any] | None,
        make_engine: Callable[[Mapping[int, list[nn.Module]]], Engine],
        like: Any = None,
    ) -> None:
        like = _Settings(program.microbatches, loss_fn, scale_grads=False) if like is None else like
        own = vars(self)  # nothing else can be set
        own["_like"], own["_program"], own["_make_engine"], own["result"] = like, program, make_engine, None
        own["_parts"] = {number: StageBlock(module) for number, module in parts.items()}
        own["_last"] = program.placement.stages - 1

    def __getattr__(self, name: str) -> Any:
        like = vars(self).get("_like")
        if name in _SIZES and hasattr(like, name):
            return True  # no step asks for sizes by a forward of its own
        if hasattr(like, name) and name not in (*_FOLLOWED, *_READ):
            raise AttributeError(f"{name} of a {type(like).__name__} that the engine plays; allowed: {_allowed()}")
        return getattr(like, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FOLLOWED:
            setattr(self._like, name, value)
        elif name in _SIZES and not value:
            if "engine" in vars(self):
                self.engine.forget_sizes()
        elif name in vars(self):
            super().__setattr__(name, value)
        else:
            kind = type(self._like).__name__
            raise AttributeError(f"{name} is set on a {kind} that the engine plays; allowed: {_allowed()}")

    @property
    def program(self) -> Program:
        """The program of the present number of microbatches."""
        return self._program.of(self._n_microbatches)

    @cached_property
    def engine(self) -> Engine:
        """The engine. All ranks must come to its first use, when the weights are there."""
        return self._make_engine(self._blocks())

    def _blocks(self) -> dict[int, list[nn.Module]]:
        return {number: [part] for number, part in self._parts.items()}

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forwards and backwards of all microbatches; add the gradients of the sum of their losses to ``.grad``.

        A batch is given whole, to be split, or as lists with an entry a microbatch.

        Args:
            args: Tensors ``[B, …]`` for the first stage, on the rank that holds it.
            target: Labels ``[B, …]``, on the rank with the last stage.
            losses: Is filled with the loss of each microbatch there, without a graph.
            return_outputs: Whether to return the outputs of the last stage, ``[B, …]``, on the rank that holds it.
            loss_kwargs: Keyword arguments of the loss.
            arg_mbs: ``args`` of each microbatch.
            kwarg_mbs: ``kwargs`` of each microbatch.
            target_mbs: Labels of each microbatch.
            kwargs: Keyword arguments of every stage.

        Raises:
            ValueError: Another number of microbatches than the program has, or something that a stage needs is missing.
            RuntimeError: Another rank failed, or did not answer within the limit.
        """
        check_kind("losses", losses, list, None)
        count, like = self._n_microbatches, self._like

        def feed() -> Feed:
            """Return the feed of the call's arguments, as torch's schedule splits or takes them."""
            # 1. An entry for each microbatch.
            inputs, named, targets = arg_mbs, kwarg_mbs, target_mbs
            lists = any(entries is not None for entries in (inputs, named, targets))
            if lists and (args or kwargs or target is not None):
                raise ValueError("a whole batch, and lists of microbatches; allowed: one of them")
            for number, one in enumerate(args):
                check_kind(f"args[{number}]", one, Tensor)
            if args or kwargs:
                inputs, named = like._split_inputs(args, kwargs)
            if target is not None:
                targets, _ = split_args_kwargs_into_chunks((target,), {}, count)
            # 2. All that the stages of this rank need.
            needed: dict[str, Sequence[Any] | None] = {} if named is None else {"kwarg_mbs": named}
            needed |= {"arg_mbs": inputs} if 0 in self._parts else {}
            needed |= {"target_mbs": targets} if self._last in self._parts and like._loss_fn else {}
            for name, entries in needed.items():
                if entries is None:
                    raise ValueError(f"no {name} on a rank that needs them; allowed: a list of {count}")
                if len(entries) != count:
                    raise ValueError(f"{name} of {len(entries)} microbatches; allowed: {count}")
            if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(named)):
                raise ValueError("keyword arguments that require a gradient; allowed: ones that do not")
            named = named or [{}] * count
            for part in self._parts.values():
                part.arguments = named

            def arguments_of(stage: int, index: int) -> dict[str, Any]:
                """Return what a stage is given of a microbatch: inputs on the first, target and loss on the last."""
                arguments: dict[str, Any] = {"inputs": inputs[index]} if stage == 0 and inputs is not None else {}
                if stage == self._last:
                    arguments |= {
                        "target": targets[index] if targets is not None else (),
                        "loss_fn": partial(self._loss, loss_kwargs or {}, named[index]),
                        "return_outputs": return_outputs,
                    }
                return arguments

            return Feed(arguments_of, dict.fromkeys(range(count), 1.0), aux_scale=None)

        try:
            self.result = self.engine.play(feed, grad=like._has_backward, microbatches=count).result
        finally:
            for part in self._parts.values():
                part.arguments = ()
        if like.scale_grads and like._has_backward:
            for parameter in self.engine.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(count)
        if losses is not None:
            losses[:] = self.result.losses
        if not self.result.outputs:
            return None
        return like._merge_outputs(list(self.result.outputs))

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forwards alone, without gradients; with the arguments of :meth:`step`."""
        with replaced([(vars(self._like), "_has_backward", False)]):
            return self.step(*args, **kwargs)

    def _loss(self, loss_kwargs: Mapping[str, Any], kwargs: Mapping[str, Any], *tensors: Tensor) -> Tensor:
        """Return the loss of a microbatch, whose stage was called with ``kwargs``."""
        if self._loss_fn is None:
            return tensors[0].new_zeros(())
        *outputs, target = tensors
        options = (loss_kwargs,) if loss_kwargs else ()
        loss: Tensor = self._like._compute_loss(outputs[0] if len(outputs) == 1 else outputs, target, *options)
        return loss


class _Settings(torch_schedules._PipelineSchedule):
    """What a loop reads and sets of a schedule, where torch has none."""

    step: Any = None
    _step_microbatches: Any = None


def _allowed() -> str:
    return f"to read and set {', '.join(_FOLLOWED)}, to read {', '.join(_READ)}"


class StageBlock(MicrobatchBlock):
    """The module of a stage as one block, called with the keyword arguments of its microbatch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.whole = module, ()
        self.arguments: Sequence[Mapping[str, Any]] = ()

    def forward(self, *inputs: Tensor, microbatch: Microbatch | None = None) -> Any:
        """Call the module for a microbatch; several outputs in a list become a tuple."""
        assert microbatch is not None
        returned = self.module(*inputs, **self.arguments[microbatch.index])
        return tuple(returned) if isinstance(returned, list) else returned
