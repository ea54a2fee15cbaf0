"""DualPipe's two classes, with their constructor and step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.engine.run.microbatch import Tensors, tensors
from overlap1f1b.engine.run.model import own_call
from overlap1f1b.integrations.dualpipe.batch import Batch, Criterion
from overlap1f1b.schedule import Program, build_schedule
from overlap1f1b.transport.mesh import grid_of


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
        self.device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        limit = self.options.limit
        self.mesh = grid_of(self.group, expert_group, self.device, limit, order=order)
        self.rank, self.num_ranks = order[self.group.rank()], size
        self.is_first_rank, self.is_last_rank = self.rank == 0, self.rank == self.num_ranks - 1
        placement = build_schedule(self.schedule, ranks=self.num_ranks, microbatches=2 * self.num_ranks).placement
        self._stages = dict(zip((s for _, s in placement.places(self.rank)), self.module, strict=True))
        self._engine: Engine | None = None  # made by the first step

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
        if num_chunks < 1:
            raise ValueError(f"num_chunks={num_chunks}; allowed: {2 * self.num_ranks} or more microbatches")
        engine = self._engine
        if engine is None or engine.microbatches != num_chunks:
            program = build_schedule(self.schedule, ranks=self.num_ranks, microbatches=num_chunks)
            engine = engine or self._make_engine(program)
            engine.microbatches = num_chunks
        if isinstance(labels, Iterable):
            labels = tensors(labels) if isinstance(labels, Tensor) else tuple(labels)
        batch = Batch(inputs, labels, criterion, self.batch_dim, return_outputs)
        played = engine.play(lambda: batch.feed(engine.program, self.rank), grad=torch.is_grad_enabled())
        return batch.finish(played.microbatches, engine.program)

    def close(self) -> None:
        """Release threads and communicators."""
        if self._engine is not None:
            self._engine.close()

    def _make_engine(self, program: Program) -> Engine:
        stages: dict[int, list[nn.Module] | nn.Module] = {
            number: module if type(module).forward is nn.Sequential.forward and not own_call(module) else [module]
            for number, module in self._stages.items()
        }
        self._engine = Engine(stages, program, mesh=self.mesh, options=replace(self.options, reduce=False))
        return self._engine


class DualPipe(Pipeline):
    """Two pipelines through the same ranks in opposite directions (DeepSeek-V3, arXiv 2412.19437).

    >>> model = DualPipe((stages[rank], stages[ranks - 1 - rank]))
    >>> loss, outputs = model.step(x, num_chunks=20, criterion=criterion, labels=(y,))

    On rank ``r`` of P the first module is stage ``r`` of the pipeline that begins on rank 0, the second one stage
    ``P − 1 − r`` of the pipeline that begins on the last rank. Each pipeline gets half of the microbatches: the first
    and the last rank each give inputs, and the labels for the other's inputs. Two ranks hold each stage, and their
    gradients stay separate: sum them before the optimizer's step.

    The engine cuts the modules at their exchanges, which hide behind other microbatches, and weight gradients of
    ``nn.Linear`` and of experts fill the bubbles; a module's own ``overlapped_forward_backward`` is not called. The
    arguments are as for :class:`Pipeline`.
    """

    schedule = "dualpipe"


class DualPipeV(Pipeline):
    """DualPipe cut in half and folded: one pipeline that goes down the ranks and back (Sea AI Lab 2025).

    >>> model = DualPipeV((stages[rank], stages[2 * ranks - 1 - rank]))

    On rank ``r`` of P the modules are stages ``r`` and ``2P − 1 − r``; the first rank gives inputs and labels and gets
    losses and outputs. For everything else see :class:`DualPipe`.
    """

    schedule = "dualpipev"
