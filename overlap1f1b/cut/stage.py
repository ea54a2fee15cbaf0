"""A stage: facts about its blocks, and how they are cut. No attribute changes after the construction.

What the first steps find out about blocks is added to its tables.

What changes on modules while a step lasts is in :mod:`overlap1f1b.play.install`.
"""

import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from operator import is_
from typing import NamedTuple, Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overlap1f1b.cut.blocks import (
    blocks_of,
    device_of,
    is_compiled,
    marked_as_slice,
    modules_of,
    options_of,
    refuse_wrappers,
)
from overlap1f1b.cut.buffers import Buffers
from overlap1f1b.cut.exchanges import OwnExchanges
from overlap1f1b.cut.places import KnownPlaces
from overlap1f1b.cut.random import Draws, generators_of
from overlap1f1b.cut.uses import ParameterUses
from overlap1f1b.kernels.grouped_mm import has_own_products
from overlap1f1b.moe.experts import Experts
from overlap1f1b.moe.router import Router
from overlap1f1b.plan import BlockShape, Recompute, StageShape, parse_parts, parse_recompute, segments_of
from overlap1f1b.schedule import Placement
from overlap1f1b.schedule.values import checked
from overlap1f1b.transport.exchange import Exchange, LocalExchange
from overlap1f1b.transport.mesh import Mesh


class Cut:
    """A stage that is cut as a plan says, by the shapes of its blocks.

    Attributes:
        segments: Segments of each block, see :func:`~overlap1f1b.plan.segments_of`; and whether its weight gradients
            have a node of their own. The first segment shares this node with the rest of the block.
        behind: Exchanges of rows behind each segment of each block.
        exchanges: Number of exchanges of rows of each block.
        last: Number of the last block.
    """

    def __init__(self, shape: StageShape) -> None:
        self.shape, self.last = shape, len(shape) - 1
        every = [segments_of(block) for block in shape]
        self.segments = [
            [(place, bool(number) and block.defers(place[0])) for number, (place, _) in enumerate(segments)]
            for block, segments in zip(shape, every, strict=True)
        ]
        self.behind = [[behind for _, behind in segments] for segments in every]
        self.exchanges = [sum(map(len, behind)) for behind in self.behind]


class Inside(NamedTuple):
    """What is inside a block."""

    linears: list[nn.Linear]  # whose weight gradients are computed apart
    apart: Set[nn.Parameter]  # weights whose gradients are
    carriers: list[Router]  # modules that attach auxiliary losses
    places: KnownPlaces  # where its forward keeps something between its exchanges
    buffers: Buffers  # for what ``recompute`` computes again

    @classmethod
    def of(cls, block: nn.Module, tied: Set[nn.Parameter]) -> Self:
        """Return what is inside a block; no gradient of a ``tied`` parameter is computed apart."""
        options, modules = options_of(block), list(block.modules())
        linears = [m for m in modules if splits(m) and m.weight not in tied and m not in options.whole]
        weights = {p for m in linears if isinstance(p := m.weight, nn.Parameter)}
        apart = weights.union(options.apart).difference(tied)
        carriers = [m for m in modules if isinstance(m, Router)]
        return cls(linears, apart, carriers, KnownPlaces(block, options.state), Buffers(block))


class Stage:
    """Consecutive blocks of a model, each an ordinary module that maps one tensor or several to one or a tuple.

    >>> stage = Stage(model, exchange)  # an nn.Sequential, or a list of modules

    Args:
        blocks: Modules in order.
        exchange: Between the ranks that share the experts; by default nothing is exchanged.
        reduce_dense: Whether gradients of parameters outside the experts are summed over ranks.
        reduce_experts: Whether gradients of the experts are summed over ranks.
        number: Position of the stage in the model; it tells concurrent exchanges of several stages apart.
        first: Position of the first block in the model, for messages.
        recompute: Parts of each block that are computed a second time before their backward.
        parts: Parts of the tokens of each call of experts. An engine sets both by :meth:`shaped`.
        gathered: Blocks whose sharded parameters are gathered by nodes inside a step.
        sliced: DTensors of which the ranks that share the experts have different parts.
        device: Device of the stage's tensors; by default the first parameter's, or the CPU.

    Raises:
        ValueError: No block, one under ``DistributedDataParallel``, experts made for another exchange, or an unknown
            ``recompute``.
    """

    @checked
    def __init__(
        self,
        blocks: nn.Module | Sequence[nn.Module],
        exchange: Exchange | None = None,
        *,
        reduce_dense: bool = False,
        reduce_experts: bool = False,
        number: int = 0,
        first: int = 0,
        recompute: Recompute = "none",
        parts: int = 1,
        gathered: Set[int] = frozenset(),
        sliced: Set[Tensor] = frozenset(),
        device: torch.device | None = None,
    ) -> None:
        parse_parts(parts)
        self.number, self._sliced = number, sliced
        self.exchange = exchange or LocalExchange()
        self.blocks = blocks_of(blocks)
        if not self.blocks:
            raise ValueError("a stage without blocks; allowed: an nn.Sequential or a list of at least one module")
        self.names = [f"block {first + index} ({type(block).__name__})" for index, block in enumerate(self.blocks)]
        """Names of the blocks, for messages."""
        self.device = device or device_of(self.blocks) or torch.device("cpu")
        self.expert_parameters: dict[Experts, list[nn.Parameter]] = {}
        self.dense_parameters: list[list[nn.Parameter]] = []
        """Trained parameters of each block outside its experts."""
        self.tied: dict[nn.Parameter, int] = {}
        """Parameters that several blocks share, with the first of these blocks."""
        self._find_parameters()
        self.inside = [Inside.of(block, self.tied.keys()) for block in self.blocks]
        """What is inside each block."""
        shapes = []
        for index, block in enumerate(self.blocks):
            options, experts, own = options_of(block), self.experts_of(index), self.expert_parameters_of(index)
            whole = any(isinstance(p, DTensor) for p in self._complete(index) + own)
            weights = [p for module in experts for p in module.weights()]
            shape = BlockShape(
                expert_calls=len(experts),
                split=bool(self.inside[index].apart) or options.delays,
                reduced=bool((reduce_dense and self.dense_parameters_of(index)) or (reduce_experts and own) or whole),
                recompute=parse_recompute("none" if options.keeps else recompute),
                parts=parts if experts else 1,
                experts_split=not experts or any(p.requires_grad and not has_own_products(p) for p in weights),
                gathered=index in gathered,
            )
            shapes.append(shape)
        self.shape: StageShape = tuple(shapes)
        """Shapes of the blocks in the first step; those of later steps follow from it, see :meth:`shaped`."""
        self.draws = Draws(self.blocks, generators_of(self.device))
        self._cuts: dict[StageShape, Cut] = {}
        self._uses: dict[Hashable, ParameterUses] = {}
        self.own_exchanges: dict[int, OwnExchanges] = {}
        """Exchanges that blocks make by themselves, as the first step has shown."""
        self.alike = len({m.row_kind for m in self.expert_parameters}) <= 1
        """Whether all experts are alike, so that a receive can be announced one call ahead."""

    def _find_parameters(self) -> None:
        """Divide the parameters of each block into those of experts and the rest, and note which are tied."""
        refuse_wrappers(self.blocks, self.names)
        first: dict[nn.Parameter, int] = {}
        for index, name in enumerate(self.names):
            for experts in self.experts_of(index):
                if experts.exchange.ranks != self.exchange.ranks:
                    raise ValueError(
                        f"{name} holds experts for {experts.exchange.ranks} ranks, "
                        f"the engine exchanges over {self.exchange.ranks}; allowed: the same number "
                        "(experts with group=mesh.get_group('ep'), an engine with mesh=mesh)"
                    )
                if experts.exchange.rank != self.exchange.rank:
                    raise ValueError(
                        f"{name} holds the experts of rank {experts.exchange.rank} of their group, "
                        f"the engine exchanges as rank {self.exchange.rank}; allowed: the same"
                    )
                self.expert_parameters[experts] = [p for p in experts.parameters() if p.requires_grad]
            apart = {p for parameters in self.expert_parameters.values() for p in parameters}
            dense = [p for p in self.blocks[index].parameters() if p.requires_grad and p not in apart]
            self.dense_parameters.append(dense)
            for parameter in dense:
                if first.setdefault(parameter, index) != index:
                    self.tied[parameter] = first[parameter]

    def trained(self, apart: Set[nn.Module]) -> list[list[nn.Parameter]]:
        """Return the trained parameters of each block's modules, except the modules in ``apart``."""
        every = ([m for m in modules_of(block) if m not in apart] for block in self.blocks)
        return [[p for m in own for p in m._parameters.values() if p is not None and p.requires_grad] for own in every]

    def check_trained(self, before: Sequence[Sequence[nn.Parameter]], apart: Set[nn.Module]) -> None:
        """Check that each block trains the same parameters as before: others would not be summed over ranks."""
        for name, known, now in zip(self.names, before, self.trained(apart), strict=True):
            if len(now) != len(known) or not all(map(is_, now, known)):
                raise ValueError(
                    f"{name} trains other parameters than when the Engine was made; allowed on several "
                    "ranks: a new Engine after parameters are frozen, unfrozen or replaced"
                )

    @property
    def sharing(self) -> frozenset[int]:
        """Blocks that share parameters with others."""
        return frozenset(n for n, own in enumerate(self.dense_parameters) if not self.tied.keys().isdisjoint(own))

    def cut(self, shape: StageShape) -> Cut:
        """Return how the stage is cut by the shapes of a plan."""
        if shape not in self._cuts:
            self._cuts[shape] = Cut(shape)
        return self._cuts[shape]

    def uses_of(self, block: int, shape: BlockShape, autocast: Hashable = None) -> ParameterUses:
        """Return where a block of this shape uses its parameters, as its forwards under this autocast show."""
        # What decides where a block is divided into segments; what it recomputes and what leaves does not.
        cut = shape.expert_calls, shape.split, shape.reduced, shape.exchanges, shape.parts, shape.experts_split
        key = block, cut, autocast
        if key not in self._uses:
            shares = any(self.tied.get(p, block) != block for p in self.dense_parameters[block])
            self._uses[key] = ParameterUses(set(self.inside[block].apart), shares=shares)
        return self._uses[key]

    def cut_at(self, shape: StageShape, found: Mapping[tuple[int, int], OwnExchanges]) -> StageShape:
        """Return shapes cut at exchanges that blocks make by themselves, given by (stage, block)."""
        shapes = list(shape)
        for block, before in enumerate(shapes):
            if (self.number, block) not in found:
                continue
            own = self.own_exchanges[block] = found[self.number, block]
            if is_compiled(self.blocks[block]):
                warnings.warn(
                    f"torch.compile of {self.names[block]} does nothing in an engine: a block that exchanges rows by "
                    "itself runs eagerly there; allowed: a block that calls Experts",
                    stacklevel=2,
                )
            shapes[block] = before.cut(tuple(exchange.op for exchange in own.every))
        return tuple(shapes)

    def shaped(self, shape: StageShape, mode: Recompute, parts: int) -> StageShape:
        """Return shapes of blocks that drop the activations of a mode, as far as they can, and cut calls."""
        shapes = []
        for block, before in zip(self.blocks, shape, strict=True):
            dropping = before.dropping("none" if options_of(block).keeps else mode)
            shapes.append(dropping._replace(parts=parts) if before.expert_calls else dropping)
        return tuple(shapes)

    def dense_parameters_of(self, block: int) -> list[nn.Parameter]:
        """Return the parameters outside the experts whose gradients are complete after this block's backward."""
        return [p for p in self._complete(block) if not self.is_slice(p)]

    def _complete(self, block: int) -> list[nn.Parameter]:
        return [p for p in self.dense_parameters[block] if self.tied.get(p, block) == block]

    def is_slice(self, parameter: nn.Parameter) -> bool:
        """Return whether ranks that share the experts have different parts of a parameter, in a layer of a user's own.

        It is a DTensor that says so, or has ``allreduce = False``, as Megatron-Core and DeepSpeed mark experts.
        """
        return parameter in self._sliced or marked_as_slice(parameter)

    def experts_of(self, block: int) -> list[Experts]:
        """Return the block's experts, in the order of its modules."""
        return [module for module in self.blocks[block].modules() if isinstance(module, Experts)]

    def expert_parameters_of(self, block: int) -> list[nn.Parameter]:
        """Return the trained parameters of the block's experts, and of experts in layers of a user's own."""
        own = [parameter for experts in self.experts_of(block) for parameter in self.expert_parameters[experts]]
        return own + [p for p in self._complete(block) if self.is_slice(p)]


def splits(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a plain ``nn.Linear`` with a trained real weight.

    Not so a subclass or a parametrization; nor parameters whose classes have products of their own.
    """
    return (
        has_forward_of_linear(module)
        and (weight := module._parameters.get("weight")) is not None
        and weight.requires_grad
        and not weight.is_complex()
        and not any(has_own_products(parameter) for parameter in module.parameters())
    )


def has_forward_of_linear(module: nn.Module) -> bool:
    """Return whether nobody has given a module a forward other than ``nn.Linear``'s."""
    return type(module).forward is nn.Linear.forward and "forward" not in module.__dict__


def parameters_of(stages: Mapping[int, Stage]) -> Iterator[tuple[str, str, nn.Parameter, bool]]:
    """Yield name, block, the parameter, and whether it is an expert's."""
    for number, stage in stages.items():
        for index, block in enumerate(stage.blocks):
            experts = {id(p) for module in stage.experts_of(index) for p in module.parameters()}
            for name, parameter in block.named_parameters():
                expert = id(parameter) in experts or stage.is_slice(parameter)
                yield name, f"{stage.names[index]} of stage {number}", parameter, expert


def all_shapes(mine: Mapping[int, StageShape], placement: Placement, mesh: Mesh) -> tuple[StageShape, ...]:
    """Return the shapes of all stages, from the ranks that hold them; replicas have agreed on theirs before."""
    every = mesh.every(dict(mine))
    shapes = {stage: shape for table in every.values() for stage, shape in table.items()}
    return tuple(shapes[stage] for stage in range(placement.stages))
