"""The public surface of the DualPipe repository (github.com/deepseek-ai/DualPipe) on the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.cut.blocks import device_of, own_call
from overlap1f1b.engine import Engine, EngineOptions, Feed
from overlap1f1b.play.feed import Microbatches
from overlap1f1b.play.microbatch import OptionalTensors, Tensors, check_loss
from overlap1f1b.schedule import Program, build_schedule
from overlap1f1b.schedule.values import check_kind, check_size, checked
from overlap1f1b.transport.mesh import grid_of

__all__ = ["DualPipe", "DualPipeV", "set_p2p_tensor_dtype", "set_p2p_tensor_shapes"]

Criterion = Callable[..., Tensor]
"""``(*outputs, *labels) → scalar``."""


def set_p2p_tensor_shapes(shapes: Sequence[tuple[int, ...]]) -> None:
    """Do nothing: ranks learn shapes and dtypes from each other."""


def set_p2p_tensor_dtype(dtype: torch.dtype) -> None:
    """Do nothing: ranks learn shapes and dtypes from each other."""


class Pipeline(nn.Module):
    """The common base of both classes; each subclass defines the stages of its two modules.

    Args:
        modules: The two modules of this rank. Each maps tensors to a tensor or a tuple of tensors, and is one block of
            the engine; each child of an ``nn.Sequential`` without hooks of its own is a block.
        batch_dim: Dimension along which inputs and labels are split into microbatches.
        process_group: The pipeline's ranks; by default all.
        rank_mapping: ``rank_mapping[i]`` is the pipeline rank of rank ``i`` of the group; by default ``i``.
        expert_group: The ranks that share the experts of the modules, each in a separate pipeline.
        options: How the engine plays. Gradients are never summed over ranks.

    Raises:
        ValueError: There are not two modules, the ranks do not fit the schedule, or the groups do not form a grid.
    """

    schedule: ClassVar[str]

    @checked
    def __init__(
        self,
        modules: Sequence[nn.Module],
        batch_dim: int = 0,
        process_group: dist.ProcessGroup | None = None,
        rank_mapping: Sequence[int] | None = None,
        *,
        expert_group: dist.ProcessGroup | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        super().__init__()
        check_kind("batch_dim", batch_dim, int)
        self.module = nn.ModuleList(modules)
        if len(self.module) != 2:
            raise ValueError(f"{len(self.module)} modules; allowed: two, of the two stages of this rank")
        self.batch_dim = batch_dim
        self.options = EngineOptions() if options is None else options
        self.group: dist.ProcessGroup = process_group or dist.distributed_c10d._get_default_group()
        size = self.group.size()
        order = list(range(size) if rank_mapping is None else rank_mapping)
        if sorted(order) != list(range(size)):
            raise ValueError(f"rank_mapping={order} of {size} ranks; allowed: each of 0 to {size - 1} once")
        device = device_of(self.module) or torch.device("cpu")
        self.mesh = grid_of(self.group, expert_group, device, self.options.limit, order=order)
        self.rank, self.num_ranks = order[self.group.rank()], size
        self.is_first_rank, self.is_last_rank = self.rank == 0, self.rank == self.num_ranks - 1
        self._engine: Engine | None = None  # made by the first step

    @checked
    def step(
        self,
        *inputs: Tensor | None,
        num_chunks: int = 0,
        criterion: Criterion | None = None,
        labels: Tensor | Sequence[Tensor | None] = (),
        return_outputs: bool = False,
    ) -> tuple[Tensor | None, Tensor | Tensors | None]:
        """Run forward and backward of a batch; under ``torch.no_grad()`` the forward alone.

        Gradients of each microbatch's loss are added to ``.grad``, unscaled; inputs that require one get theirs.

        Args:
            inputs: Arguments of the first stage's module, split into microbatches; ignored if none begin on this rank.
            num_chunks: Number of microbatches of the step.
            criterion: ``(*outputs, *labels) → scalar``, on ranks where microbatches end.
            labels: Arguments of the criterion, split into the microbatches that end here; ignored if none end here.
            return_outputs: Whether the outputs of the last stage are returned.

        Returns:
            The losses ``[microbatches that end here]`` and the outputs, joined along ``batch_dim``, or
            ``[microbatches that end here]`` if an output is one number. Each is None if it is not requested, or if no
            microbatches end here.

        Raises:
            ValueError: The schedule does not allow this number of microbatches, or the batch is missing or too small.
            RuntimeError: Another rank failed, or did not answer within the limit.
        """
        check_size("num_chunks", num_chunks, 0)
        check_loss(criterion, "criterion")
        if num_chunks < 1:
            raise ValueError(f"num_chunks={num_chunks}; allowed: {2 * self.num_ranks} or more microbatches")
        if self._engine is None:
            self._engine = self._make_engine(num_chunks)
        engine = self._engine
        engine.microbatches = num_chunks
        batch = StepArguments(inputs, labels, criterion, self.batch_dim, return_outputs)
        played = engine.play(lambda: batch.feed(engine.program, self.rank), grad=torch.is_grad_enabled())
        return batch.finish(played.microbatches, engine.program)

    def close(self) -> None:
        """Release threads and communicators."""
        if self._engine is not None:
            self._engine.close()

    def _make_engine(self, num_chunks: int) -> Engine:
        program = build_schedule(self.schedule, ranks=self.num_ranks, microbatches=num_chunks)
        stages: dict[int, list[nn.Module] | nn.Module] = {
            stage: module if type(module).forward is nn.Sequential.forward and not own_call(module) else [module]
            for (_, stage), module in zip(program.placement.places(self.rank), self.module, strict=True)
        }
        return Engine(stages, program, mesh=self.mesh, options=replace(self.options, reduce=False))


class DualPipe(Pipeline):
    """Two pipelines through the same ranks in opposite directions (DeepSeek-V3, arXiv 2412.19437).

    >>> model = DualPipe((stages[rank], stages[ranks - 1 - rank]))
    >>> loss, outputs = model.step(x, num_chunks=20, criterion=criterion, labels=(y,))

    On rank ``r`` of P the first module is stage ``r`` of the pipeline that begins on rank 0, the second one stage
    ``P − 1 − r`` of the pipeline that begins on the last rank. Each pipeline gets half of the microbatches: the first
    and the last rank each give inputs, and the labels for the other's inputs. Two ranks hold each stage, and their
    gradients stay separate: sum them before the optimizer's step.

    A module's own ``overlapped_forward_backward`` is not called. The arguments are as for :class:`Pipeline`.
    """

    schedule = "dualpipe"


class DualPipeV(Pipeline):
    """DualPipe cut in half and folded: one pipeline that goes down the ranks and back (Sea AI Lab 2025).

    >>> model = DualPipeV((stages[rank], stages[2 * ranks - 1 - rank]))

    On rank ``r`` of P the modules are stages ``r`` and ``2P − 1 − r``; the first rank gives inputs and labels and gets
    losses and outputs. For everything else see :class:`DualPipe`.
    """

    schedule = "dualpipev"


@dataclass(frozen=True)
class StepArguments:
    """The arguments of a step: tensors split along ``dim`` into the microbatches that begin or end on this rank."""

    inputs: OptionalTensors
    labels: Any
    criterion: Criterion | None
    dim: int
    return_outputs: bool

    def feed(self, program: Program, rank: int) -> Feed:
        """Return the feed of an engine's stages: losses are unscaled, auxiliary losses keep their routers' scale."""
        last, inputs, labels = program.placement.stages - 1, dict[int, Tensors](), dict[int, OptionalTensors]()
        for pipe, stage in program.placement.places(rank):
            indices = program.microbatches_of(pipe)
            if stage == 0:
                inputs.update(zip(indices, self._inputs_of(len(indices)), strict=True))
            if stage == last:
                labels.update(zip(indices, self._labels_of(len(indices)), strict=True))

        def arguments_of(stage: int, microbatch: int) -> dict[str, Any]:
            criterion = self.criterion if stage == last else None
            # Labels may be None, where the engine's targets may not.
            loss_fn = criterion and (lambda *outputs: criterion(*outputs, *labels[microbatch]))
            inputs_of = inputs[microbatch] if stage == 0 else None
            return {"inputs": inputs_of, "loss_fn": loss_fn, "return_outputs": self.return_outputs}

        return Feed(arguments_of, dict.fromkeys(range(program.microbatches), 1.0), None)

    def _inputs_of(self, count: int) -> list[Tensors]:
        # As leaves.
        inputs = [x for x in self.inputs if x is not None]
        if not inputs or not all(isinstance(x, Tensor) for x in self.inputs):
            what = ", ".join(type(x).__name__ for x in self.inputs) or "nothing"
            raise ValueError(f"inputs {what} on a rank where a pipe begins; allowed: tensors")
        split = [self._split(x.detach(), count, "inputs") for x in inputs]
        for x, parts in zip(inputs, split, strict=True):
            for part in parts:
                part.requires_grad_(x.requires_grad and torch.is_grad_enabled())
        return list(zip(*split, strict=True))

    def _labels_of(self, count: int) -> list[OptionalTensors]:
        """Return the labels of each microbatch, None where none are given."""
        if self.criterion is None and torch.is_grad_enabled():
            raise ValueError("criterion=None on a rank where a pipe ends; allowed: a function, or torch.no_grad()")
        labels = self.labels if isinstance(self.labels, list | tuple) else [self.labels]
        wrong = [x for x in labels if not isinstance(x, Tensor) and (x is not None or self.labels is None)]
        if wrong:
            raise ValueError(
                f"labels {type(wrong[0]).__name__} on a rank where a pipe ends; "
                "allowed: a tensor, or a tuple of tensors and None"
            )
        split = [(None,) * count if x is None else self._split(x, count, "labels") for x in labels]
        return list(zip(*split, strict=True)) if split else [()] * count

    def _split(self, x: Tensor, count: int, name: str) -> Tensors:
        if not -x.dim() <= self.dim < x.dim() or x.shape[self.dim] < count:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} for {count} microbatches along dimension {self.dim}; "
                f"allowed: at least {count} there"
            )
        return x.tensor_split(count, dim=self.dim)

    def finish(self, played: Microbatches, program: Program) -> tuple[Tensor | None, Tensor | Tensors | None]:
        """Return losses and outputs of a step with :meth:`feed`, and set the gradients of inputs that require one."""
        first, last = played.of_stage(0), played.of_stage(program.placement.stages - 1)
        grads = [tuple(g for g in microbatch.input_grads if g is not None) for microbatch in first]
        if any(grads):
            joined = [torch.cat(parts, self.dim) for parts in zip(*grads, strict=True)]
            torch.autograd.backward([x for x in self.inputs if x is not None and x.requires_grad], joined)
        results = [microbatch.outputs for microbatch in last if microbatch.outputs is not None]
        loss = torch.stack([loss for (loss,) in results]) if results and self.criterion is not None else None
        if not results or not self.return_outputs:
            return loss, None
        kept = results if self.criterion is None else [microbatch.returned.kept for microbatch in last]
        outputs = tuple(  # scalars become [microbatches], as losses do
            torch.cat(parts, self.dim) if parts[0].dim() else torch.stack(parts) for parts in zip(*kept, strict=True)
        )
        return loss, outputs[0] if len(outputs) == 1 else outputs
