"""The blocks that a rank runs, and what the engine changes in them while a step lasts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from overlap1f1b.engine.run.autograd import Gradients, SplitGroupedMM, SplitLinear, WeightQueue
from overlap1f1b.engine.run.microbatch import LossFunction, Microbatch, MicrobatchBlock, generators_of
from overlap1f1b.engine.run.suspend import seam, uncompiled
from overlap1f1b.moe.auxiliary import AuxiliaryCarrier
from overlap1f1b.moe.experts import Experts
from overlap1f1b.plan import BlockShape, Recompute, StageShape, parse_recompute
from overlap1f1b.transport.exchange import Exchange, LocalExchange


class Stage:
    """Blocks that pass a tensor or several on, each an ordinary module.

    >>> stage = Stage(model, exchange)  # an nn.Sequential, or a list of modules

    Args:
        blocks: Modules in order.
        exchange: Between the ranks that share the experts.
        reduce_own: Whether gradients outside the experts are summed over ranks.
        reduce_experts: Whether those of the experts are.
        number: Of the stage in the model; tells exchanges of several stages apart that are in flight together.
        first: Number of the first block in the model, for messages.
        recompute: What blocks drop after their forward and compute again before their backward: see :class:`Engine`.

    Raises:
        ValueError: No block, experts of another exchange size or rank, or no such thing to recompute.
    """

    def __init__(
        self,
        blocks: nn.Module | Sequence[nn.Module],
        exchange: Exchange | None = None,
        *,
        reduce_own: bool = False,
        reduce_experts: bool = False,
        number: int = 0,
        first: int = 0,
        recompute: Recompute = "none",
    ) -> None:
        self.number = number
        self.exchange = exchange or LocalExchange()
        self.capacity: float | None = None
        """Room for rows in exchanges of equal sizes, see :class:`~overlap1f1b.moe.route.Route`; None sends them all."""
        self.dropped: list[Dropped] = []
        """What every call under a capacity had no room for. Whoever sets one reads it."""
        self.adds_to_main = not reduce_experts
        """Whether gradients of experts' weights may go to their ``main_grad``, where nobody here looks at ``.grad``."""
        self.calls: dict[tuple[int, int], str] = {}
        """What experts were called with, by block and call; the same on all ranks."""
        self.check_tokens: Callable[[int], None] | None = None
        """Told how many tokens each call under a capacity has."""
        self.blocks = blocks_of(blocks)
        if not self.blocks:
            raise ValueError("a stage without blocks; allowed: an nn.Sequential or a list of at least one module")
        first_block = self.blocks[0]
        self.input_names = first_block.input_names if isinstance(first_block, MicrobatchBlock) else ()
        """Of what the first block takes, where it says so."""
        self.names = [f"block {first + index} ({type(block).__name__})" for index, block in enumerate(self.blocks)]
        parameter = next((p for block in self.blocks for p in block.parameters()), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.generators = generators_of(self.device)
        self.expert_parameters: dict[Experts, list[nn.Parameter]] = {}
        self.block_parameters: list[list[nn.Parameter]] = []
        self._find_parameters()
        self.linears = [
            [m for m in block.modules() if _splits(m) and m.weight not in self.tied] for block in self.blocks
        ]
        self.carriers = [[m for m in block.modules() if isinstance(m, AuxiliaryCarrier)] for block in self.blocks]
        """What attaches auxiliary losses in each block."""
        self.shape: StageShape = tuple(
            BlockShape(
                seams=sum(isinstance(m, Experts) for m in block.modules()),
                split=bool(linears),
                reduced=bool(
                    (reduce_own and self.own_parameters(index)) or (reduce_experts and self.expert_parameters_of(index))
                ),
                recompute=parse_recompute(recompute),
            )
            for index, (block, linears) in enumerate(zip(self.blocks, self.linears, strict=True))
        )
        self.whole_backward = [
            not shape.split and not any(p in self.tied for p in own)
            for shape, own in zip(self.shape, self.block_parameters, strict=True)
        ]
        """Blocks whose backward may add to gradients at once: nothing of them waits for another node."""
        every = [m for block in self.blocks for m in block.modules() if isinstance(m, Experts)]
        self.alike = len({m.row_kind for m in every}) <= 1
        """Whether one call of experts tells the sizes of the next."""
        self._seams = [(block, seam) for block, shape in enumerate(self.shape) for seam in range(shape.seams)]
        self._queue = WeightQueue()

    def seam_beside(self, block: int, seam: int, step: int) -> tuple[int, int] | None:
        """(block, seam) of the call of experts that many after this one, or before; None beyond the ends."""
        position = self._seams.index((block, seam)) + step
        return self._seams[position] if 0 <= position < len(self._seams) else None

    def _find_parameters(self) -> None:
        seen: dict[nn.Parameter, int] = {}
        self.tied: dict[nn.Parameter, int] = {}  # parameters of several blocks, by their first
        for index, block in enumerate(self.blocks):
            for experts in (m for m in block.modules() if isinstance(m, Experts)):
                if experts.exchange.ranks != self.exchange.ranks:
                    raise ValueError(
                        f"{self.names[index]} holds experts for {experts.exchange.ranks} ranks, "
                        f"the engine exchanges over {self.exchange.ranks}; allowed: the same number"
                    )
                if experts.exchange.rank != self.exchange.rank:
                    raise ValueError(
                        f"{self.names[index]} holds the experts of rank {experts.exchange.rank} of those that share "
                        f"them, the engine exchanges as rank {self.exchange.rank}; allowed: the same"
                    )
                self.expert_parameters[experts] = [p for p in experts.parameters() if p.requires_grad]
            apart = {p for parameters in self.expert_parameters.values() for p in parameters}
            own = [p for p in block.parameters() if p.requires_grad and p not in apart]
            self.block_parameters.append(own)
            for parameter in own:
                if seen.setdefault(parameter, index) != index:
                    self.tied[parameter] = seen[parameter]

    def own_parameters(self, block: int) -> list[nn.Parameter]:
        """Parameters whose gradients are complete with this block's backward, the experts' apart."""
        return [p for p in self.block_parameters[block] if self.tied.get(p, block) == block]

    def experts_of(self, block: int) -> list[Experts]:
        """The block's experts, in the order of its modules."""
        return [module for module in self.blocks[block].modules() if isinstance(module, Experts)]

    def expert_parameters_of(self, block: int) -> list[nn.Parameter]:
        """Parameters of the block's experts."""
        return [parameter for experts in self.experts_of(block) for parameter in self.expert_parameters[experts]]

    def microbatch(
        self,
        inputs: Tensor | Sequence[Tensor] | None = None,
        target: Tensor | Sequence[Tensor] | None = None,
        *,
        index: int = 0,
        loss_fn: LossFunction | None = None,
        loss_scale: float = 1.0,
        seed: int | None = 0,
        grad: bool = True,
        keep_outputs: bool = False,
    ) -> Microbatch:
        """A microbatch that is ready for its forward; see :class:`Microbatch`."""
        return Microbatch(
            self,
            index,
            inputs,
            target=target,
            loss_fn=loss_fn,
            loss_scale=loss_scale,
            seed=seed,
            grad=grad,
            keep_outputs=keep_outputs,
        )

    def whole(self, microbatch: Microbatch, gradients: Gradients, block: int) -> Gradients:
        """Gradients that one microbatch has completed with this block; those of tied parameters wait for all blocks.

        Plain autograd sums a microbatch's gradients of a tied parameter before it adds them to ``.grad``: so here.
        """
        for parameter in [p for p in gradients if p in self.tied]:
            grad = gradients.pop(parameter)
            before = microbatch.tied.get(parameter)
            microbatch.tied[parameter] = grad if before is None else before + grad
        for parameter, first in self.tied.items():
            if first == block and parameter in microbatch.tied:
                gradients[parameter] = microbatch.tied.pop(parameter)
        return gradients

    def leave_to(self, queue: WeightQueue) -> None:
        """Forwards that run from now on leave their weight gradients to this queue."""
        self._queue = queue

    @contextmanager
    def installed(self, loss_scale: float | None = 1.0) -> Iterator[None]:
        """While it lasts, the modules' calls of experts suspend, and their weight gradients split off.

        Only attributes of these instances change; afterwards every module is as it was. ``loss_scale`` is that of
        auxiliary losses; None leaves each as it is.
        """
        changed: list[tuple[dict[str, Any], str, Any]] = []

        def change(module: nn.Module, name: str, value: object) -> None:
            changed.append((module.__dict__, name, module.__dict__.get(name, _MISSING)))
            module.__dict__[name] = value

        compiler: Any = sys.modules.get("torch._functorch.config")  # loaded with torch.compile
        if compiler is not None:
            donated, compiler.donated_buffer = compiler.donated_buffer, False  # parts of a graph are walked twice
        try:
            for experts in self.expert_parameters:
                change(experts, "forward", seam(experts, _unsplit(experts, experts.forward)))
                change(experts, "product", uncompiled(partial(self._grouped_product, experts)))
            for linear in (m for linears in self.linears for m in linears):
                change(linear, "forward", uncompiled(_SplitForward(self, linear)))
            for carrier in (m for carriers in self.carriers for m in carriers) if loss_scale is not None else ():
                change(carrier, "loss_scale", loss_scale)
            yield
        finally:
            if compiler is not None:
                compiler.donated_buffer = donated
            for attributes, name, value in reversed(changed):
                if value is _MISSING:
                    del attributes[name]
                else:
                    attributes[name] = value

    def _grouped_product(self, experts: Experts, rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
        kernels = experts.kernels if self.adds_to_main else None
        return SplitGroupedMM.apply(rows, weight, counts, self._queue, kernels)

    def linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        """``module``'s forward with its weight gradient left to the queue in force."""
        return SplitLinear.apply(x, module.weight, module.bias, self._queue)


_MISSING = object()


def _unsplit(experts: Experts, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward for calls that nothing suspends, as from a checkpoint that walks what it computes again itself."""
    whole = experts.product

    def call(*args: Tensor) -> Tensor:
        split, experts.product = experts.product, whole
        try:
            return forward(*args)
        finally:
            experts.product = split

    return call


class _SplitForward:
    """Stands in for the forward of one ``nn.Linear``."""

    def __init__(self, stage: Stage, module: nn.Linear) -> None:
        self.stage, self.module = stage, module

    def __call__(self, input: Tensor) -> Tensor:
        return self.stage.linear(self.module, input)


def _splits(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a plain ``nn.Linear`` with a weight of its own to train (no parametrization, no subclass)."""
    return (
        type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
        and (weight := module._parameters.get("weight")) is not None
        and weight.requires_grad
    )


def blocks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks of an ``nn.Sequential`` or a list, in order, or those that a module names as its ``blocks``.

    Raises:
        ValueError: A model with a forward of its own.
    """
    if not isinstance(model, nn.Module):
        return list(model)
    if isinstance(blocks := model.__dict__.get("blocks"), list):
        return list(blocks)
    if type(model).forward is not nn.Sequential.forward:
        raise ValueError(f"a model of type {type(model).__name__}; allowed: an nn.Sequential or a list of blocks")
    # Not children(), which leaves out a module's second place.
    return [block for block in model._modules.values() if block is not None]


class Dropped(NamedTuple):
    """Rows that one call of experts had no room for.

    Args:
        block: Of the stage.
        microbatch: Its number.
        rows: ``[E]`` int64 on the device, of each expert.
        counts: ``[E]`` int64 on the device, those that were sent.
        room: For rows to each rank.
    """

    block: int
    microbatch: int
    rows: Tensor
    counts: Tensor
    room: int
