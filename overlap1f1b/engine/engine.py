"""Trains a model by a Program, its exchanges hidden behind compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b import plan as planning
from overlap1f1b.engine.measure import BackToBack, agree, measured_costs
from overlap1f1b.engine.microbatch import LossFunction, Microbatch
from overlap1f1b.engine.player import Pace, Player
from overlap1f1b.engine.reducer import Reducer
from overlap1f1b.engine.stage import Stage
from overlap1f1b.moe.exchange import Exchange, build_exchange, lane_groups
from overlap1f1b.plan import NodeCosts, Overlap, Plan
from overlap1f1b.schedule import Kind, Program, forward_only
from overlap1f1b.simulation import Timeline

DEFAULT_OVERLAP = 3


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Args:
        loss: Mean over this rank's microbatches.
        losses: Loss of each microbatch.
        overlap: The measured Timeline, in seconds: ``overlap.exposed``, ``overlap.hidden_fraction``.
        peak_activations: Most microbatches that were alive at once.
        peak_held: The same with those that waited for weight gradients alone.
    """

    loss: Tensor
    losses: tuple[Tensor, ...]
    overlap: Timeline
    peak_activations: int
    peak_held: int


class Engine:
    """Plays a Program over a model.

    >>> program = build_schedule("combined_1f1b", microbatches=8, extra_warmup=1)
    >>> engine = Engine(model, program, mesh=mesh, loss_fn=loss_fn)
    >>> result = engine.step(inputs, target=labels)  # gradients are in .grad
    >>> optimizer.step(); optimizer.zero_grad()

    The first two steps run serially and measure every node; then the plan is compiled, the same on all ranks.

    Args:
        model: An ``nn.Sequential``, or a list of blocks, each of which maps one tensor to one tensor. A block may hold
            any number of :class:`GroupedExperts`.
        program: What to play, on one pipeline rank.
        mesh: Its dimension "ep" holds the ranks that share the experts; None for one rank.
        loss_fn: ``(output, target) → scalar`` of one microbatch.
        overlap: ``"serial"``, ``"pairs"``, or k: the fastest of both and of up to k open actions.
        costs: Seconds of every node, instead of measuring them.
        plan: What to play, instead of compiling one.
        reduce: Whether gradients outside the experts are summed over the ranks at the end of each step.
        timeout: Limit in seconds of every wait for another rank.
        exchange: To share one between engines, or to measure with another; by default the engine makes its own groups,
            so that its lanes queue behind nothing else.
        pace: Seconds that each compute node lasts at least, for measurements.

    Raises:
        ValueError: Program, overlap or mesh do not fit.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        program: Program,
        *,
        mesh: DeviceMesh | None = None,
        loss_fn: LossFunction,
        overlap: Overlap = DEFAULT_OVERLAP,
        costs: NodeCosts | None = None,
        plan: Plan | None = None,
        reduce: bool = True,
        timeout: float = 600.0,
        exchange: Exchange | None = None,
        pace: Pace | None = None,
    ) -> None:
        program.check()
        if program.placement.stages > 1 or len(program.placement.pipes) > 1:
            raise ValueError(
                f"program {program.name!r} has {program.placement.stages} stages on {program.placement.ranks} ranks; "
                "allowed in an engine: one stage on one pipeline rank"
            )
        if program.forward_only:
            raise ValueError(
                f"program {program.name!r} has no backward; allowed: one that trains; evaluate() needs none"
            )
        self.overlap = planning.parse_overlap(overlap)
        self.program, self.loss_fn = program, loss_fn
        self.group = _ep_group(mesh)
        lanes = lane_groups(self.group, 4) if exchange is None and self.group is not None else []
        self.exchange = exchange or build_exchange(self.group, *lanes[:3])
        self.stage = Stage(model, self.exchange, reduced=reduce and self.group is not None)
        if not any(p.requires_grad for block in self.stage.blocks for p in block.parameters()):
            raise ValueError("no parameter of the model requires a gradient; allowed: at least one that does")
        self.player = Player(timedelta(seconds=timeout), pace, background=self.exchange.background)
        self.reducer: Reducer | None = None
        if reduce and self.group is not None:
            group = lanes[3] if lanes else self.group
            self.reducer = Reducer(self.stage, group, self.player.lanes[planning.Op.REDUCE, Kind.W])
        self.costs = costs
        if plan is not None:
            if plan.program != program or plan.shapes != (self.stage.shape,):
                raise ValueError(
                    f"a plan of {plan.program.name!r} for other blocks, reductions or microbatches; "
                    f"allowed: one of {program.name!r} with {program.microbatches} for {self.stage.shape}"
                )
            planning.check(plan)
            agree(plan, self.group)
        self._plan = plan
        self._serial: Plan | None = None
        self._warm = False

    @property
    def plan(self) -> Plan:
        """What the next step plays: the compiled plan, or the serial one as long as there are no costs."""
        if self._plan is None and self.costs is not None:
            self._plan = self._compiled(self.program, self.costs, self.overlap)
        if self._plan is not None:
            return self._plan
        if self._serial is None:
            self._serial = self._compiled(self.program, NodeCosts(), "serial")
        return self._serial

    def _meet(self) -> None:
        """Lets the ranks meet before an exchange that is measured."""
        if self.reducer is not None:
            self.reducer.settle()
        dist.barrier(self.group)

    def _compiled(self, program: Program, costs: NodeCosts, overlap: Overlap) -> Plan:
        plan = planning.compile(program, self.stage.shape, costs, overlap, counts_block=not self.exchange.background)
        planning.check(plan)
        agree(plan, self.group)
        return plan

    def step(self, inputs: Tensor, *, target: Tensor) -> StepResult:
        """Forward and backward of a batch; adds the gradients of the mean loss to ``.grad``.

        The loss is the mean over microbatches and over the ranks of the mesh; a rank reports the mean of its own.

        Args:
            inputs: ``[B, …]``, this rank's batch, cut into equal microbatches along the first dimension.
            target: ``[B, …]``.

        Raises:
            ValueError: B is not divisible by the microbatches.
        """
        plan = self.plan
        scale = 1.0 / (self.program.microbatches * self.exchange.ranks)
        measuring = self.costs is None and self._plan is None
        if measuring and self.group is not None:
            self.player.before_launch, self.stage.exchange = self._meet, BackToBack(self.exchange)
        if self.reducer is not None:
            self.reducer.begin()
        microbatches = self._play(plan, inputs, target, scale, grad=True)
        if self.reducer is not None:
            self.reducer.finish()
        spans = self.player.spans()
        if measuring:
            self.player.before_launch, self.stage.exchange = None, self.exchange
            if self._warm:
                self.costs = measured_costs(plan, spans, self.group)
            self._warm = True
        return self._result(microbatches, Timeline(spans))

    def evaluate(self, inputs: Tensor, *, target: Tensor) -> StepResult:
        """The loss of a batch, without gradients; any batch size that divides into microbatches of equal size."""
        program = forward_only(self.program.microbatches)
        plan = planning.compile(program, self.stage.shape, self.costs or NodeCosts(), self.overlap)
        microbatches = self._play(plan, inputs, target, 1.0, grad=False)
        return self._result(microbatches, Timeline(self.player.spans()))

    def _play(self, plan: Plan, inputs: Tensor, target: Tensor, scale: float, *, grad: bool) -> list[Microbatch]:
        count = self.program.microbatches
        seed = int(torch.randint(2**62, ()))
        parts = zip(_split(inputs, count, "inputs"), _split(target, count, "target"), strict=True)
        microbatches = [
            self.stage.microbatch(
                x, y, index=index, loss_fn=self.loss_fn, loss_scale=scale, seed=seed + index, grad=grad
            )
            for index, (x, y) in enumerate(parts)
        ]
        with self.stage.installed(scale), torch.no_grad():
            self.player.play(plan.nodes, dict(enumerate(microbatches)), self.reducer)
        return microbatches

    def _result(self, microbatches: list[Microbatch], timeline: Timeline) -> StepResult:
        losses = tuple(m.output for m in microbatches if m.output is not None)
        assert len(losses) == len(microbatches)
        return StepResult(
            torch.stack(losses).mean(), losses, timeline, self.player.peak_activations, self.player.peak_held
        )


def _split(batch: Tensor, count: int, name: str) -> tuple[Tensor, ...]:
    size = batch.shape[0] if batch.dim() else 0
    if size == 0 or size % count:
        raise ValueError(f"{name}: a batch of {size} cannot be cut into {count} microbatches; allowed: a multiple")
    return batch.split(size // count)


def _ep_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or ()
    if "ep" not in names or mesh.size() != mesh["ep"].size():
        raise ValueError(f"mesh with dimensions {names} of sizes {tuple(mesh.shape)}; allowed: one dimension 'ep'")
    group = mesh.get_group("ep")
    return group if group.size() > 1 else None
