"""A schedule of torch.distributed.pipelining, whose compute the engine plays.

torch calls :class:`Registration` in place of its own compute actions. For each of them it

1. waits for the tensors that torch's runtime receives, as torch does before its own compute,
2. plays a forward, a backward, or both together on the :class:`AdoptedStage`,
3. puts outputs and gradients into torch's caches, from which torch's runtime sends them.

This file reads and writes private attributes of torch's stages and schedules; torch has no public ones for this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    _Action,
    _PipelineContext,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from overlap1f1b.engine import Microbatch, Stage, combined_forward_backward_step
from overlap1f1b.engine.run.microbatch import one
from overlap1f1b.engine.run.model import own_call
from overlap1f1b.moe import Experts
from overlap1f1b.moe.auxiliary import AuxiliaryCarrier
from overlap1f1b.plan import NodeCosts, Overlap, parse_overlap
from overlap1f1b.transport.exchange import Exchange, own_exchange
from overlap1f1b.transport.limits import DEFAULT_LIMIT_S

_KINDS = (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP_F_B)


def register(
    schedule: _PipelineScheduleRuntime,
    *,
    overlap: Overlap = "pairs",
    costs: NodeCosts | None = None,
    exchange: Exchange | None = None,
    timeout: float = DEFAULT_LIMIT_S,
) -> Registration:
    """Let the engine run the compute of a schedule of torch.distributed.pipelining, and hide exchanges in OVERLAP_F_B.

    >>> import torch, torch.distributed as dist, torch.nn.functional as F
    >>> from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV
    >>> from overlap1f1b.moe import MoEConfig, MoETransformer
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = MoETransformer(MoEConfig(layers=2, hidden=32, heads=2, experts=4, intermediate=16, sequence=16))
    >>> parts = model[:2], model[2:]
    >>> stages = [PipelineStage(part, index, 2, torch.device("cpu")) for index, part in enumerate(parts)]
    >>> def loss_fn(logits, target):
    ...     return F.cross_entropy(logits.flatten(0, 1), target.flatten())
    >>> schedule = ScheduleDualPipeV(stages, n_microbatches=4, loss_fn=loss_fn)
    >>> registration = register(schedule)
    >>> tokens, losses = torch.randint(256, (4, 17)), []
    >>> logits = schedule.step(tokens[:, :-1], target=tokens[:, 1:], losses=losses)  # gradients are in .grad
    >>> logits.shape, len(losses)
    (torch.Size([4, 16, 256]), 4)
    >>> dist.destroy_process_group()

    Every rank calls this after it has made the schedule. Gradients, losses and outputs stay bit-equal, since sums keep
    their order. The engine keeps the state between a forward and its backward, so all five compute actions are
    registered, FORWARD and the backwards too. Transfers between stages, REDUCE_GRAD with ``scale_grads``, and metadata
    stay torch's. A schedule without OVERLAP_F_B hides no exchange behind another microbatch; with ``overlap=1`` it
    hides exchanges of a backward behind the backward's own weight gradients.

    A stage's module is an ``nn.Sequential`` or ``nn.ModuleList`` of blocks, or any other module, which is then one
    block and may take keyword arguments; so is an ``nn.Sequential`` with hooks of its own. One or several tensors cross
    a boundary.

    Args:
        schedule: ``ScheduleDualPipeV``, another schedule of several stages a rank, or one that was loaded from a table.
        overlap: Interleaving of the two members of an OVERLAP_F_B, see :func:`combined_forward_backward_step`.
        costs: Seconds of the nodes, if ``overlap`` is a number.
        exchange: Exchange between the ranks that share the experts; by default over new groups of the ranks of the
            blocks' own :class:`GroupedExperts`, so that its transfers queue behind no others.
        timeout: Limit in seconds of every wait for another rank's rows.

    Returns:
        A handle; its ``remove()`` restores the schedule.

    Raises:
        ValueError: The schedule has one stage a rank; a stage is not a plain ``PipelineStage`` (it is traced, has a
            ``dw_builder`` or DTensor parameters, or is under DDP or FSDP); or no stage of the rank has experts. During
            a step: an argument is not a tensor; a list of blocks gets keyword arguments, or one requires a gradient.
        RuntimeError: The schedule already has functions for these actions.
    """
    if not isinstance(schedule, _PipelineScheduleRuntime):
        raise ValueError(
            f"a schedule of type {type(schedule).__name__}; "
            "allowed: one of several stages a rank, such as ScheduleDualPipeV, or a _PipelineScheduleRuntime"
        )
    taken = [kind.name for kind in _KINDS if kind in schedule._comp_type_to_function_map]
    if taken:
        raise RuntimeError(f"the schedule has functions for {', '.join(taken)} already; allowed: one registration")
    stages = [checked(stage) for stage in schedule._stages]
    options: dict[str, Any] = {"overlap": parse_overlap(overlap), "timeout": timeout}
    if costs is not None:
        options["costs"] = costs
    return Registration(schedule, stages, exchange or _exchange(stages), options)


class Registration:
    """A schedule whose compute the engine plays until :meth:`remove`; made by :func:`register`."""

    def __init__(
        self,
        schedule: _PipelineScheduleRuntime,
        stages: Sequence[PipelineStage],
        exchange: Exchange,
        options: dict[str, Any],
    ) -> None:
        self.schedule, self.options = schedule, options
        self._stages: dict[int, AdoptedStage] = {}
        for stage in stages:
            self._stages[stage.stage_index] = AdoptedStage(stage, exchange, schedule, self._stages)
        self._return_outputs = True
        self._loss_options: dict[str, Any] = {}
        self._step_microbatches = schedule._step_microbatches
        schedule.__dict__["_step_microbatches"] = self._step
        for kind in _KINDS:
            schedule.register_custom_function(kind, self._act)

    def remove(self) -> None:
        """Restore the schedule. Call this between steps."""
        if self.schedule.__dict__.get("_step_microbatches") == self._step:
            del self.schedule.__dict__["_step_microbatches"]
            for kind in _KINDS:
                del self.schedule._comp_type_to_function_map[kind]

    def _step(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        **loss_options: Any,
    ) -> None:
        # This wraps torch's own method: a custom function gets neither return_outputs nor loss_kwargs.
        self._return_outputs, self._loss_options = return_outputs, loss_options
        try:
            self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, **loss_options)
        finally:
            for stage in self._stages.values():
                stage.runs.clear()

    def _act(self, action: _Action, ctx: _PipelineContext) -> None:
        """Run an action of any of the five kinds; torch calls this instead of its own compute."""
        members = action.sub_actions or (action,)
        if len(members) == 2 and _independent(*members):
            self._play(members[0], members[1], ctx)
            return
        for member in members:
            if member.computation_type is FORWARD:
                self._play(member, None, ctx)
            elif member.computation_type is BACKWARD_WEIGHT:
                self._stages[member.stage_index].finish_weights(_index(member))
            else:
                self._play(None, member, ctx)

    def _play(self, forward: _Action | None, backward: _Action | None, context: _PipelineContext) -> None:
        """Play a forward, a backward, or both together."""
        entering, leaving, grad = None, None, None
        if forward is not None:
            entering = self._stages[forward.stage_index].begin_forward(_index(forward), context)
        if backward is not None:
            leaving, grad = self._stages[backward.stage_index].begin_backward(_index(backward))
        if entering is not None or leaving is not None:
            split = backward is not None and backward.computation_type is BACKWARD_INPUT
            combined_forward_backward_step(entering, leaving, output_grad=grad, split=split, **self.options)
        if forward is not None:
            self._stages[forward.stage_index].end_forward(
                _index(forward), context, self._loss_options, save=self._return_outputs
            )
        if backward is not None:
            ends = backward.computation_type is FULL_BACKWARD
            self._stages[backward.stage_index].end_backward(_index(backward), ends=ends)


def _index(action: _Action) -> int:
    assert action.microbatch_index is not None
    return action.microbatch_index


def _independent(first: _Action, second: _Action) -> bool:
    """Return whether the actions are a forward and a backward of different microbatches."""
    return (
        first.computation_type is FORWARD
        and second.computation_type in (FULL_BACKWARD, BACKWARD_INPUT)
        and first.microbatch_index != second.microbatch_index
    )


def _exchange(stages: Sequence[PipelineStage]) -> Exchange:
    """Return an exchange over new groups of the ranks that share the experts."""
    groups = [m.group for stage in stages for m in stage.submod.modules() if isinstance(m, Experts)]
    if not groups:
        raise ValueError("no stage of this rank holds GroupedExperts; allowed: blocks that call them")
    first, *others = ([] if group is None else dist.get_process_group_ranks(group) for group in groups)
    for ranks in others:
        if ranks != first:
            raise ValueError(f"experts are shared by ranks {first} and by {ranks}; allowed: one group a rank")
    return own_exchange(groups[0])


def checked(stage: object) -> PipelineStage:
    """Return a stage that the engine can run; raise ``ValueError`` for another, with the reason."""
    name = f"stage {getattr(stage, 'stage_index', '?')}"
    if not isinstance(stage, PipelineStage):
        raise ValueError(f"{name} is a {type(stage).__name__}; allowed: torch.distributed.pipelining.PipelineStage")
    if stage.dw_builder is not None:
        raise ValueError(f"{name} has a dw_builder; allowed: none, since the engine itself defers weight gradients")
    wrapped = [m for m in stage.submod.modules() if isinstance(m, DistributedDataParallel | FSDPModule)]
    if wrapped:
        kind = "DistributedDataParallel" if isinstance(wrapped[0], DistributedDataParallel) else "FSDP"
        raise ValueError(f"{name} holds a module under {kind}; allowed: plain modules, reduced after the step")
    if any(isinstance(parameter, DTensor) for parameter in stage.submod.parameters()):
        raise ValueError(f"{name} has DTensor parameters; allowed: plain tensors")
    return stage


class _Run(NamedTuple):
    """A microbatch between its forward and its last weight gradient."""

    microbatch: Microbatch
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]  # leaves, from which the loss is computed; () before the forward has ended


class AdoptedStage:
    """One of torch's stages, with its blocks as a stage of the engine; ``held`` are all stages of this rank by number.

    Its methods also do the work of torch's runtime before and after a compute action.
    """

    def __init__(
        self,
        stage: PipelineStage,
        exchange: Exchange,
        schedule: _PipelineScheduleRuntime,
        held: Mapping[int, AdoptedStage],
    ) -> None:
        self.torch_stage, self.schedule, self.held = stage, schedule, held
        self.number = stage.stage_index
        module = stage.submod
        if isinstance(module, nn.ModuleList) and type(module).forward is nn.ModuleList.forward:
            listed = "forward" not in vars(module)  # its hooks never run, since it cannot be called
        else:
            listed = type(module).forward is nn.Sequential.forward and not own_call(module)
        self.whole = None if listed else _Whole(module)
        blocks = [self.whole] if self.whole else [block for block in module._modules.values() if block is not None]
        self.stage = Stage(blocks, exchange, number=self.number)
        kinds = [type(module).__name__] if self.whole else self.stage.names
        self.stage.names = [f"stage {self.number}: {kind}" for kind in kinds]
        self.carriers = [m for m in module.modules() if isinstance(m, AuxiliaryCarrier)]
        self.trains = any(p.requires_grad for p in module.parameters())
        self.runs: dict[int, _Run] = {}

    def begin_forward(self, index: int, context: _PipelineContext) -> Microbatch:
        """Return the microbatch whose forward is played next, with the arguments of the step or received tensors."""
        stage = self.torch_stage
        assert context.arg_mbs is not None
        assert context.kwarg_mbs is not None
        if not stage.is_first and self.number - 1 not in self.held:
            _wait_batch_p2p(self.schedule.fwd_recv_ops.pop((self.number, index)))
        inputs = tuple(context.arg_mbs[index] if stage.is_first else stage._retrieve_recv_activations(index))
        kwargs = context.kwarg_mbs[index] or {}
        self._validate("forward inputs", "inputs", inputs)
        if not inputs or not all(isinstance(value, Tensor) for value in inputs):
            what = ", ".join(type(value).__name__ for value in inputs) or "nothing"
            raise ValueError(f"stage {self.number} is given {what}; allowed: one tensor or several")
        if kwargs and not self.whole:
            raise ValueError(
                f"stage {self.number} is a list of blocks and is given {', '.join(kwargs)}; "
                "allowed: keyword arguments for a single module"
            )
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(kwargs)):
            raise ValueError(
                f"stage {self.number} is given keyword arguments that require a gradient; allowed: ones that do not"
            )
        if self.whole:
            self.whole.kwargs = kwargs
        grad = stage.has_backward and (self.trains or any(x.requires_grad for x in inputs))
        microbatch = self.stage.microbatch(inputs, index=index, loss_scale=self._loss_scale(), seed=None, grad=grad)
        self.runs[index] = _Run(microbatch, inputs, ())
        return microbatch

    def end_forward(
        self, index: int, context: _PipelineContext, loss_options: Mapping[str, Any], *, save: bool
    ) -> None:
        """Keep the outputs of a forward for SEND_F or for the next stage, and compute the loss on the last stage."""
        stage, microbatch = self.torch_stage, self.runs[index].microbatch
        assert microbatch.outputs is not None
        outputs, microbatch.outputs = microbatch.outputs, None
        if stage.is_last and save:
            stage.output_chunks.append(one(tuple(output.detach() for output in outputs)))
        if microbatch.grad:
            for output, requires in zip(outputs, microbatch.differentiable, strict=True):
                output.requires_grad_(requires)
            self.runs[index] = self.runs[index]._replace(outputs=outputs)
        else:
            del self.runs[index]
        _keep(stage, index, outputs)
        if not stage.is_last:
            self._validate("forward outputs", "outputs", outputs)
        self.schedule._maybe_compute_loss(stage, one(outputs), context.target_mbs, index, **loss_options)
        if self.number + 1 in self.held:
            self.held[self.number + 1].torch_stage.set_local_fwd_input(one(outputs), index)

    def begin_backward(self, index: int) -> tuple[Microbatch | None, tuple[Tensor | None, ...] | None]:
        """Return the microbatch whose backward is played next, and the gradients of its outputs; None without one."""
        stage = self.torch_stage
        if not stage.is_last and self.number + 1 not in self.held:
            _wait_batch_p2p(self.schedule.bwd_recv_ops.pop((self.number, index)))
        if not stage.has_backward:
            return None, None
        loss = self.schedule._maybe_get_loss(stage, index)
        _forget(stage, index)
        if index not in self.runs:  # the microbatch has no backward
            return None, None
        microbatch, _, outputs = self.runs[index]
        if stage.is_last:
            assert loss is not None
            loss.backward()
            grads = tuple(output.grad for output in outputs)
        else:
            grads = stage._retrieve_recv_grads(index)
            self._validate("backward input (output_grads)", "output_grads", grads)
        self.runs[index] = self.runs[index]._replace(outputs=())
        return microbatch, tuple(
            (torch.zeros_like(output) if grad is None else grad) if output.requires_grad else None
            for output, grad in zip(outputs, grads, strict=True)
        )

    def end_backward(self, index: int, *, ends: bool) -> None:
        """Keep the inputs' gradients for SEND_B or for the previous stage.

        Args:
            index: Number of the microbatch.
            ends: Whether the backward has also computed all weight gradients.
        """
        stage = self.torch_stage
        if not stage.has_backward:
            return
        grads: tuple[Tensor | None, ...] = (None,) * len(stage.args_recv_info[index])
        if index in self.runs:
            microbatch, inputs, _ = self.runs[index]
            grads = tuple(map(_laid_out, microbatch.input_grads, inputs))
            microbatch.input_grads = ()
            if ends:
                del self.runs[index]
        stage.bwd_cache[index] = grads
        if not stage.is_first:
            self._validate("backward output (input_grads)", "input_grads", grads)
        if self.number - 1 in self.held:
            self.held[self.number - 1].torch_stage.set_local_bwd_input(stage.get_local_bwd_output(index), index)

    def finish_weights(self, index: int) -> None:
        """Compute the weight gradients that the backward has deferred, and add them to ``.grad``."""
        if index in self.runs:
            self.runs.pop(index).microbatch.accumulate_weights()

    def _loss_scale(self) -> float:
        """Return the scale of the stage's auxiliary losses that the user has set."""
        scales = {carrier.loss_scale for carrier in self.carriers} or {1.0}
        if len(scales) > 1:
            raise ValueError(f"stage {self.number} has auxiliary losses of scales {sorted(scales)}; allowed: one scale")
        return scales.pop()

    def _validate(self, what: str, attribute: str, tensors: Sequence[Tensor | None]) -> None:
        """Run torch's own check of tensors, which torch runs if TORCH_DISTRIBUTED_DEBUG is DETAIL."""
        stage = self.torch_stage
        if getattr(stage, "_runtime_validate", False):
            expected = getattr(stage._stage_meta, attribute)
            stage._validate_stage_tensors(f"Stage {self.number} {what}", expected, tuple(tensors))


class _Whole(nn.Module):
    """A stage's module as one block, called with the keyword arguments of the microbatch that runs forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.kwargs: dict[str, Any] = {}

    def __call__(self, *inputs: Tensor) -> Any:  # without torch's global hooks, which run for the module itself
        return self.module(*inputs, **self.kwargs)


def _keep(stage: Any, index: int, outputs: tuple[Tensor, ...]) -> None:
    """Keep the outputs of a forward where torch's SEND_F looks for them."""
    if hasattr(stage, "fwd_cache"):
        stage.fwd_cache[index] = (outputs, [])
    else:  # torch 2.15
        stage._forward_chunk_states[index] = stage._make_forward_chunk_state(outputs, [])


def _forget(stage: Any, index: int) -> None:
    """Drop the outputs of a forward, as the backward of torch does."""
    del (stage.fwd_cache if hasattr(stage, "fwd_cache") else stage._forward_chunk_states)[index]


def _laid_out(grad: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a gradient in the layout of its leaf, as autograd does: a view or expanded tensor cannot be sent."""
    if grad is None or grad.stride() == like.stride():
        return grad
    return torch.empty_like(like).copy_(grad)
