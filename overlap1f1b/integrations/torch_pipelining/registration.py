"""A schedule of torch.distributed.pipelining on the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
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

from overlap1f1b.engine import Microbatch, combined_forward_backward_step
from overlap1f1b.integrations.torch_pipelining.place import Place, checked
from overlap1f1b.moe import Experts
from overlap1f1b.plan import NodeCosts, Overlap, parse_overlap
from overlap1f1b.transport.exchange import Exchange, build_exchange, lane_groups
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
    """Has a schedule of torch.distributed.pipelining run its OVERLAP_F_B actions with the exchanges hidden.

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

    Every rank calls it, after the schedule is made. Gradients, losses and outputs are those of the schedule without it:
    bit-equal, since sums keep their order. What a forward leaves for its backward is then the engine's, so all five
    compute actions are registered, FORWARD and the backwards too; transfers between stages, REDUCE_GRAD with
    ``scale_grads``, and metadata remain torch's. In a schedule without OVERLAP_F_B nothing is hidden behind another
    microbatch, but with ``overlap=1`` exchanges of a backward are, behind its own weight gradients.

    A stage's module is an ``nn.Sequential`` or ``nn.ModuleList`` of blocks, or any other module, which is then one
    block and may take keyword arguments; a list is faster, since each call of experts in a block costs another walk
    through what follows it there. One tensor or several cross a boundary.

    Args:
        schedule: ``ScheduleDualPipeV``, any other schedule of several stages, or one that was loaded from a table.
        overlap: Of the two members of an OVERLAP_F_B: see :func:`combined_forward_backward_step`.
        costs: Of the nodes, where ``overlap`` is a number.
        exchange: Between the ranks that share the experts; by default over new groups of the ranks of the blocks' own
            :class:`GroupedExperts`, so that its lanes queue behind nothing else.
        timeout: Limit in seconds of every wait for another rank's rows.

    Returns:
        A handle whose ``remove()`` undoes it.

    Raises:
        ValueError: A schedule of one stage, one that has a function of these kinds already, or a stage that is not a
            plain ``PipelineStage``: traced, with a ``dw_builder``, under DDP or FSDP, with DTensor parameters, or
            without experts on the whole rank. While a step runs: arguments that are no tensors, keyword arguments for
            a list of blocks, or ones that require a gradient.
    """
    if not isinstance(schedule, _PipelineScheduleRuntime):
        raise ValueError(
            f"a schedule of type {type(schedule).__name__}; "
            "allowed: one of several stages a rank, such as ScheduleDualPipeV, or a _PipelineScheduleRuntime"
        )
    taken = [kind.name for kind in _KINDS if kind in schedule._comp_type_to_function_map]
    if taken:
        raise ValueError(f"the schedule has functions for {', '.join(taken)} already; allowed: one registration")
    stages = [checked(stage) for stage in schedule._stages]
    options: dict[str, Any] = {"overlap": parse_overlap(overlap), "timeout": timeout}
    if costs is not None:
        options["costs"] = costs
    return Registration(schedule, stages, exchange or _exchange(stages), options)


class Registration:
    """A schedule whose compute the engine plays, until :meth:`remove`."""

    def __init__(
        self,
        schedule: _PipelineScheduleRuntime,
        stages: Sequence[PipelineStage],
        exchange: Exchange,
        options: dict[str, Any],
    ) -> None:
        self.schedule, self.options = schedule, options
        self._places = {stage.stage_index: Place(stage, exchange) for stage in stages}
        self._return_outputs = True
        self._loss_options: dict[str, Any] = {}
        self._step_microbatches = schedule._step_microbatches
        schedule.__dict__["_step_microbatches"] = self._step
        for kind in _KINDS:
            schedule.register_custom_function(kind, self._act)

    def remove(self) -> None:
        """Leaves the schedule as it was; between steps."""
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
        # Around torch's own method: a custom function is told neither return_outputs nor loss_kwargs.
        self._return_outputs, self._loss_options = return_outputs, loss_options
        try:
            self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, **loss_options)
        finally:
            for place in self._places.values():
                place.runs.clear()

    def _act(self, action: _Action, ctx: _PipelineContext) -> None:
        """Any of the five kinds; torch calls it in the place of its own."""
        members = action.sub_actions or (action,)
        if len(members) == 2 and _independent(*members):
            self._play(members[0], members[1], ctx)
            return
        for member in members:
            if member.computation_type is FORWARD:
                self._play(member, None, ctx)
            elif member.computation_type is BACKWARD_WEIGHT:
                self._places[member.stage_index].finish_weights(_index(member))
            else:
                self._play(None, member, ctx)

    def _play(self, forward: _Action | None, backward: _Action | None, context: _PipelineContext) -> None:
        entering, leaving, grad = None, None, None
        if forward is not None:
            entering = self._begin_forward(forward, context)
        if backward is not None:
            leaving, grad = self._begin_backward(backward)
        if entering is not None or leaving is not None:
            split = backward is not None and backward.computation_type is BACKWARD_INPUT
            combined_forward_backward_step(entering, leaving, output_grad=grad, split=split, **self.options)
        if forward is not None:
            self._end_forward(forward, context)
        if backward is not None:
            self._end_backward(backward)

    # What follows is around the compute what torch's runtime does around its own.

    def _begin_forward(self, action: _Action, context: _PipelineContext) -> Microbatch:
        stage, index = action.stage_index, _index(action)
        place = self._places[stage]
        if not place.stage.is_first and stage - 1 not in self._places:
            _wait_batch_p2p(self.schedule.fwd_recv_ops.pop((stage, index)))
        assert context.arg_mbs is not None
        assert context.kwarg_mbs is not None
        return place.begin_forward(index, context.arg_mbs[index], context.kwarg_mbs[index] or {})

    def _end_forward(self, action: _Action, context: _PipelineContext) -> None:
        stage, index = action.stage_index, _index(action)
        place = self._places[stage]
        output = place.end_forward(index, save=self._return_outputs)
        self.schedule._maybe_compute_loss(place.stage, output, context.target_mbs, index, **self._loss_options)
        if stage + 1 in self._places:
            self._places[stage + 1].stage.set_local_fwd_input(output, index)

    def _begin_backward(self, action: _Action) -> tuple[Microbatch | None, tuple[Tensor | None, ...] | None]:
        stage, index = action.stage_index, _index(action)
        place = self._places[stage]
        if not place.stage.is_last and stage + 1 not in self._places:
            _wait_batch_p2p(self.schedule.bwd_recv_ops.pop((stage, index)))
        if not place.stage.has_backward:
            return None, None
        return place.begin_backward(index, self.schedule._maybe_get_loss(place.stage, index))

    def _end_backward(self, action: _Action) -> None:
        stage, index = action.stage_index, _index(action)
        place = self._places[stage]
        if place.stage.has_backward:
            place.end_backward(index, ends=action.computation_type is FULL_BACKWARD)
            if stage - 1 in self._places:
                grads = place.stage.get_local_bwd_output(index)
                self._places[stage - 1].stage.set_local_bwd_input(grads, index)


def _index(action: _Action) -> int:
    assert action.microbatch_index is not None
    return action.microbatch_index


def _independent(first: _Action, second: _Action) -> bool:
    """Whether these are a forward and a backward, of different microbatches."""
    return (
        first.computation_type is FORWARD
        and second.computation_type in (FULL_BACKWARD, BACKWARD_INPUT)
        and first.microbatch_index != second.microbatch_index
    )


def _exchange(stages: Sequence[PipelineStage]) -> Exchange:
    """Over new groups of the ranks that share the experts."""
    groups = [m.group for stage in stages for m in stage.submod.modules() if isinstance(m, Experts)]
    if not groups:
        raise ValueError("no stage of this rank holds GroupedExperts; allowed: blocks that call them")
    group = groups[0]
    ranks = [[] if other is None else dist.get_process_group_ranks(other) for other in groups]
    different = next((other for other in ranks if other != ranks[0]), None)
    if different is not None:
        raise ValueError(f"experts are shared by ranks {ranks[0]} and by {different}; allowed: one group a rank")
    return build_exchange(group, *(lane_groups(group, 3) if group is not None else ()))
