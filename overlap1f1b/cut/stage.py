"""A stage: its blocks, and what the engine changes in them while a step lasts."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from operator import is_, itemgetter
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overlap1f1b.cut.blocks import (
    blocks_of,
    device_of,
    is_compiled,
    marked_as_slice,
    options_of,
    refuse_wrappers,
)
from overlap1f1b.cut.buffers import Buffers
from overlap1f1b.cut.crossing import functions_cross
from overlap1f1b.cut.edges import next_sequence_number
from overlap1f1b.cut.exchanges import Foreign, Shown, matched
from overlap1f1b.cut.places import ModuleAttributes
from overlap1f1b.cut.random import Draws, generators_of
from overlap1f1b.cut.replacement import Replacement, replaced
from overlap1f1b.cut.uses import ParameterUses
from overlap1f1b.cut.weights import WeightQueue, split_grouped_mm, split_linear
from overlap1f1b.kernels.grouped_mm import EightBits
from overlap1f1b.moe.experts import Experts, GroupedProduct
from overlap1f1b.moe.route import Route
from overlap1f1b.moe.router import Router
from overlap1f1b.plan import BlockShape, Place, Recompute, StageShape, parse_parts, parse_recompute, segments_of
from overlap1f1b.schedule import Placement
from overlap1f1b.transport import devices
from overlap1f1b.transport.calls import ExchangeCall
from overlap1f1b.transport.exchange import Exchange, LocalExchange
from overlap1f1b.transport.mesh import Mesh
from overlap1f1b.transport.streams import InlineStream, SideStream, side_stream
from overlap1f1b.transport.suspension import Stack, ThreadState, uncompiled


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
        recompute: Parts of each block that are computed a second time before their backward: see :class:`Engine`.
        parts: Parts of the tokens of each call of experts: see :class:`Engine`.
        sliced: DTensors of which the ranks that share the experts have different parts.
        device: Device of the stage's tensors; by default the first parameter's, or the CPU.

    Raises:
        ValueError: No block, one under ``DistributedDataParallel``, experts made for another exchange, or an unknown
            ``recompute``.
    """

    thread: ThreadState
    """State of the thread between the nodes of a step."""
    began: int
    """Sequence number below those of all autograd nodes of a step, and above earlier ones."""
    stacks: list[Stack]
    """Stacks without a forward, in a step: all its nodes run from the same depth of C calls."""

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
        sliced: Set[Tensor] = frozenset(),
        device: torch.device | None = None,
    ) -> None:
        self.number, self.parts, self._sliced = number, parse_parts(parts), sliced
        self.exchange = exchange or LocalExchange()
        self.capacity: float | None = None
        """Room for rows, see :class:`~overlap1f1b.moe.route.Route`; with None exchanges have exact sizes."""
        self.on_route: Callable[[Route, str], None] | None = None
        """Called with the route of every call of experts, its block and its microbatch, under a capacity."""
        self.adds_to_main = not reduce_experts
        """Whether experts' weight gradients may go to ``main_grad``: not if the engine reduces ``.grad``."""
        self.agree: Callable[[Mapping[str, object]], None] | None = None
        """Called with the sizes of each call of experts before its first exchange, which must be equal on all ranks."""
        self._agreed: set[tuple[int, int]] = set()  # blocks and calls
        self.first_rows: dict[tuple[int, int], Tensor] | None = None
        """``[≤ 64, H]``, the first rows that went to experts, by (block, call); None if nobody asks for them."""
        self.blocks = blocks_of(blocks)
        if not self.blocks:
            raise ValueError("a stage without blocks; allowed: an nn.Sequential or a list of at least one module")
        self.input_names = options_of(self.blocks[0]).input_names
        self.names = [f"block {first + index} ({type(block).__name__})" for index, block in enumerate(self.blocks)]
        """Names of the blocks, for messages."""
        self.device = device or device_of(self.blocks) or torch.device("cpu")
        self.generators = generators_of(self.device)
        self.expert_parameters: dict[Experts, list[nn.Parameter]] = {}
        self.dense_parameters: list[list[nn.Parameter]] = []
        """Trained parameters of each block outside its experts."""
        self.tied: dict[nn.Parameter, int] = {}
        """Parameters that several blocks share, with the first of these blocks."""
        self._find_parameters()
        self.linears = [
            [m for m in block.modules() if splits(m) and m.weight not in self.tied and m not in options_of(block).whole]
            for block in self.blocks
        ]
        """Layers of each block whose weight gradients are computed apart."""
        self.carriers = [[m for m in block.modules() if isinstance(m, Router)] for block in self.blocks]
        """Modules of each block that attach auxiliary losses."""
        self.shape: StageShape = tuple(
            BlockShape(
                expert_calls=len(self.experts_of(index)),
                split=bool(self.linears[index] or self._apart_of(index)) or options_of(block).delays,
                reduced=bool(
                    (reduce_dense and self.dense_parameters_of(index))
                    or (reduce_experts and self.expert_parameters_of(index))
                    or any(isinstance(p, DTensor) for p in self._complete(index) + self.expert_parameters_of(index))
                ),
                recompute=parse_recompute("none" if options_of(block).keeps else recompute),
                parts=parts if self.experts_of(index) else 1,
                experts_split=not self.experts_of(index)
                or any(p.requires_grad for m in self.experts_of(index) for p in m.weights()),
            )
            for index, block in enumerate(self.blocks)
        )
        self.draws = Draws(self.blocks, self.generators, [shape.recompute != "none" for shape in self.shape])
        self._find_exchanges()
        self._shares = [
            any(self.tied.get(p, block) != block for p in dense) for block, dense in enumerate(self.dense_parameters)
        ]
        """Whether a block uses parameters of an earlier one."""
        self.uses = [
            ParameterUses(self._apart_of(index) | {p for m in linears if isinstance(p := m.weight, nn.Parameter)})
            for index, linears in enumerate(self.linears)
        ]
        """Where each block uses its parameters."""
        self.made: list[tuple[int, int, int]] = []
        """First and last sequence number, which is excluded, of each segment in this step, and its microbatch."""
        self.foreign = Foreign()
        self.attributes = [ModuleAttributes(block, options_of(block).state) for block in self.blocks]
        """What each block's forward keeps between its exchanges."""
        self.buffers = [Buffers(block) for block in self.blocks]
        """Buffers of each block, for what ``recompute`` computes again."""
        self.alike = len({m.row_kind for m in self.expert_parameters}) <= 1
        """Whether all experts are alike, so that a receive can be announced one call ahead."""
        self.queue = WeightQueue()
        """Where forwards that run now leave their weight gradients."""
        self.anchor = torch.empty(0, requires_grad=True)

    def _find_parameters(self) -> None:
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
        every = ([m for m in block.modules() if m not in apart] for block in self.blocks)
        return [[p for m in own for p in m._parameters.values() if p is not None and p.requires_grad] for own in every]

    def check_trained(self, before: Sequence[Sequence[nn.Parameter]], apart: Set[nn.Module]) -> None:
        """Check that each block trains the same parameters as before: others would not be summed over ranks."""
        for name, known, now in zip(self.names, before, self.trained(apart), strict=True):
            if len(now) != len(known) or not all(map(is_, now, known)):
                raise ValueError(
                    f"{name} trains other parameters than when the Engine was made; allowed on several "
                    "ranks: a new Engine after parameters are frozen, unfrozen or replaced"
                )

    def _apart_of(self, block: int) -> set[nn.Parameter]:
        return set(options_of(self.blocks[block]).apart) - self.tied.keys()

    def _find_exchanges(self) -> None:
        segments = [segments_of(shape) for shape in self.shape]
        self.segments = [
            [(place, bool(number) and shape.defers(place[0])) for number, (place, _) in enumerate(of_block)]
            for shape, of_block in zip(self.shape, segments, strict=True)
        ]
        """Segments of each block, see :func:`segments_of`; and whether its weight gradients have a node of their own.
        The first segment shares this node with the rest of the block."""
        self.behind = [[behind for _, behind in of_block] for of_block in segments]
        """Exchanges of rows behind each segment of each block."""
        self.exchange_after: dict[tuple[int, Place], tuple[int, Place]] = {}
        """The next exchange of the same part, each given by its block and its place there."""
        last: dict[int, tuple[int, Place]] = {}  # of each part
        for block, behind in enumerate(self.behind):
            for place in chain.from_iterable(behind):
                *_, part = place
                if part in last:
                    self.exchange_after[last[part]] = block, place
                last[part] = block, place
        self.exchange_before = {following: exchange for exchange, following in self.exchange_after.items()}

    @cached_property
    def library_stream(self) -> SideStream:
        """The stream of exchanges that a library carries out."""
        return InlineStream() if devices.of(self.device) is None else side_stream(self.device, "library")

    def watches(self, block: int) -> bool:
        """Return whether parameters may enter the first segment of a block, or exchanges of its own may be in it."""
        foreign = self.foreign
        looked_at = foreign.seen is not None and block in foreign.seen
        return self._shares[block] or looked_at or block in foreign.hidden or self.uses[block].watched

    def look_for_exchanges(self) -> None:
        """Note in the next step the exchanges that blocks make by themselves."""
        self.foreign.look([block for block, shape in enumerate(self.shape) if not shape.expert_calls])

    def adopt_exchanges(self, shown: Mapping[tuple[int, int], Shown]) -> None:
        """Cut blocks from now on at the exchanges that the microbatches of all ranks have shown, by (stage, block)."""
        shapes = list(self.shape)
        for block, shape in enumerate(shapes):
            place = self.number, block
            exchanges = matched(shown[place], self.names[block]) if place in shown else ()
            if not exchanges:
                continue
            self.foreign.hidden[block] = exchanges
            if is_compiled(self.blocks[block]):
                warnings.warn(
                    f"torch.compile of {self.names[block]} does nothing in an engine: a block that exchanges rows by "
                    "itself runs eagerly there; allowed: a block that calls Experts",
                    stacklevel=2,
                )
            shapes[block] = shape.cut(tuple(exchange.op for exchange in exchanges))
            self.uses[block].forget()
        self.shape = tuple(shapes)
        self._find_exchanges()

    def cut_into(self, parts: int) -> None:
        """Cut calls of experts into another number of parts from the next step on."""
        self.parts = parse_parts(parts)
        for uses, shape in zip(self.uses, self.shape, strict=True):
            if shape.expert_calls:
                uses.forget()
        self.shape = tuple(shape._replace(parts=parts) if shape.expert_calls else shape for shape in self.shape)
        self._find_exchanges()

    def drop(self, modes: Sequence[Recompute]) -> None:
        """Compute activations of each block again as its mode says from the next step on, as far as it can."""
        self.shape = tuple(
            shape.dropping("none" if options_of(block).keeps else mode)
            for block, shape, mode in zip(self.blocks, self.shape, modes, strict=True)
        )
        self.draws = Draws(self.blocks, self.generators, [shape.recompute != "none" for shape in self.shape])

    def gather(self, blocks: Set[int]) -> None:
        """Let nodes gather the sharded parameters of these blocks inside a step."""
        self.shape = tuple(shape._replace(gathered=block in blocks) for block, shape in enumerate(self.shape))

    def state_of(self, block: int) -> ModuleAttributes | None:
        """Return what a block's forward keeps while it is suspended; None if it keeps nothing."""
        attributes = self.attributes[block]
        return attributes if attributes.carries else None

    def note_route(self, call: ExchangeCall, route: Route, block: int, number: int, microbatch: int) -> None:
        """Note a call of experts, by its number in the block, and its sizes."""
        if call.back:
            return
        if self.on_route is not None:
            self.on_route(route, f"{self.names[block]}, microbatch {microbatch}")
        if self.agree is not None and (block, number) not in self._agreed:
            self._agreed.add((block, number))
            bits = f", sent in {route.precision}" if route.precision else ""
            sizes = f"{route.top_k} experts a token, hidden {route.hidden}, {str(call.tensors[0].dtype)[6:]}{bits}"
            self.agree({f"call {number} of experts in {self.names[block]} of stage {self.number}": sizes})
        if self.first_rows is not None and (block, number) not in self.first_rows:
            self.first_rows[block, number] = call.tensors[0].detach()[:64, : route.hidden].clone()

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

    @contextmanager
    def installed(self, aux_scale: float | None = 1.0) -> Iterator[None]:
        """Replace the forwards of linear layers and the products of experts, which split their weight gradients off.

        Only attributes of module instances change, and all of them change back at the end.

        Args:
            aux_scale: Scale of auxiliary losses; None leaves the scale of each module as it is.
        """
        for uses in self.uses:
            uses.settle()
        stacks: list[Stack] = []
        self.thread, self.stacks = ThreadState.capture(self.device), stacks
        self.began, self.made = next_sequence_number(), []
        with replaced(self._replacements(aux_scale)), functions_cross(), self.draws.checked():
            try:
                yield
            finally:
                while stacks:
                    stacks.pop().end()

    def maker_of(self, number: int) -> int | None:
        """Return the microbatch whose segment has made the autograd node with a sequence number; None if none has."""
        at = bisect_right(self.made, number, key=itemgetter(0)) - 1
        return self.made[at][2] if at >= 0 and number < self.made[at][1] else None

    def _replacements(self, aux_scale: float | None) -> Iterator[Replacement]:
        for experts in self.expert_parameters:
            attributes = vars(experts)
            yield attributes, "forward", uncompiled(experts.forward)
            yield attributes, "capacity", self.capacity
            yield attributes, "parts", self.parts
            yield attributes, "product", uncompiled(self._split_product(experts))
        for linear in (m for linears in self.linears for m in linears):
            yield vars(linear), "forward", uncompiled(self._split_forward(linear))
        for carrier in (m for carriers in self.carriers for m in carriers) if aux_scale is not None else ():
            yield vars(carrier), "aux_scale", aux_scale

    def _split_forward(self, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        """Return the forward of a linear layer that leaves its weight gradient to the queue in force."""

        def forward(input: Tensor) -> Tensor:
            weight, bias = linear.weight, linear.bias
            # It was frozen since. Or torch.func has put a tensor in its place, or transforms a call and knows no
            # Function.
            plain = not isinstance(weight, nn.Parameter) or not weight.requires_grad
            if plain or torch._C._are_functorch_transforms_active():
                return F.linear(input, weight, bias)
            return split_linear(input, (weight,), bias, self.queue, self.anchor)

        return forward

    def _split_product(self, experts: Experts) -> GroupedProduct:
        """Return the grouped product of experts that leaves its weight gradient to the queue in force."""
        kernels = experts.kernels if self.adds_to_main else None
        precision = experts.precision
        eight = None if precision is None else EightBits(experts.kernels, precision, keeps=True)  # for this step

        def product(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
            anchor = self.anchor if weight.requires_grad else None
            return split_grouped_mm(rows, (weight,), counts, self.queue, kernels, anchor, eight)

        return product


def splits(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a plain ``nn.Linear`` with a trained real weight (no parametrization, no subclass)."""
    return (
        type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
        and (weight := module._parameters.get("weight")) is not None
        and weight.requires_grad
        and not weight.is_complex()
    )


def parameters_of(stages: Mapping[int, Stage]) -> Iterator[tuple[str, str, nn.Parameter, bool]]:
    """Yield name, block, the parameter, and whether it is an expert's."""
    for number, stage in stages.items():
        for index, block in enumerate(stage.blocks):
            experts = {id(p) for module in stage.experts_of(index) for p in module.parameters()}
            for name, parameter in block.named_parameters():
                expert = id(parameter) in experts or stage.is_slice(parameter)
                yield name, f"{stage.names[index]} of stage {number}", parameter, expert


def all_shapes(stages: Mapping[int, Stage], placement: Placement, mesh: Mesh) -> tuple[StageShape, ...]:
    """Return the shapes of all stages, from the ranks that hold them; replicas have agreed on theirs before."""
    every = mesh.every({number: stage.shape for number, stage in stages.items()})
    shapes = {stage: shape for table in every.values() for stage, shape in table.items()}
    return tuple(shapes[stage] for stage in range(placement.stages))
