"""A stage in a step: what changes on its modules while the step lasts, and what its forwards share meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlap1f1b.cut.blocks import options_of
from overlap1f1b.cut.edges import next_sequence_number
from overlap1f1b.cut.exchanges import OwnExchanges
from overlap1f1b.cut.replacement import Replacement, replaced
from overlap1f1b.cut.stage import Stage, has_forward_of_linear
from overlap1f1b.cut.uses import ParameterUses
from overlap1f1b.cut.weights import Put, split_grouped_mm, split_linear
from overlap1f1b.kernels.grouped_mm import EightBits, GroupedMM, has_own_products
from overlap1f1b.moe.experts import Experts, GroupedProduct, has_product_of_experts
from overlap1f1b.plan import BlockShape, StageShape
from overlap1f1b.plan.turn import Plain
from overlap1f1b.play.crossing import functions_cross
from overlap1f1b.play.gradients import WeightQueue
from overlap1f1b.play.observers import Observers
from overlap1f1b.play.offload import BlockOffload
from overlap1f1b.transport import devices
from overlap1f1b.transport.exchange import Exchange, LocalExchange
from overlap1f1b.transport.host import HostMemory
from overlap1f1b.transport.streams import InlineStream, SideStream, side_stream
from overlap1f1b.transport.suspension import Stack, ThreadState, uncompiled


class BlockFacts(NamedTuple):
    """What a step knows of a block."""

    shape: BlockShape  # in the step's plan
    uses: ParameterUses  # where it uses its parameters
    own: OwnExchanges  # that it makes by itself, where it is cut


class Installation:
    """A stage while its nodes are played.

    Args:
        stage: The stage.
        shape: Shapes of its blocks in the step's plan; by default those of the stage.
        exchange: Between the ranks that share the experts; by default the stage's.
        capacity: Room for rows, see :class:`~overlap1f1b.moe.route.Route`; with None exchanges have exact sizes.
        adds_to_main: Whether experts' weight gradients may go to ``main_grad``: not if ``.grad`` is reduced, or a step
            that lost rows takes its gradients back.
        observers: Who looks on.
        offloaded: Microbatch and block of activations that leave to host memory.
        host: Carries them.

    Attributes:
        cut: The stage as it is cut in the step.
        facts: What the step knows of each block.
        thread: State of the thread between the nodes.
        began: Sequence number below those of all autograd nodes of the step, and above earlier ones.
        made: First and last sequence number, which is excluded, of each segment, and its microbatch.
        stacks: Stacks without a forward: all nodes run from the same depth of C calls.
        queue: Where forwards that run now leave their weight gradients; None if these stay in the backward.
        anchor: A leaf that requires a gradient, and gets none.
    """

    def __init__(
        self,
        stage: Stage,
        shape: StageShape | None = None,
        *,
        exchange: Exchange | None = None,
        capacity: float | None = None,
        adds_to_main: bool = True,
        observers: Observers | None = None,
        offloaded: Set[tuple[int, int]] = frozenset(),
        host: HostMemory | None = None,
    ) -> None:
        self.offloaded, self._host = offloaded, host
        self.stage, self.cut = stage, stage.cut(stage.shape if shape is None else shape)
        self.exchange = exchange or stage.exchange
        self.observers = observers or Observers()
        self.thread = ThreadState.capture(stage.device)
        casts = self.thread.autocast
        nothing, found = OwnExchanges(), stage.own_exchanges
        self.facts = [
            BlockFacts(
                shape, stage.uses_of(block, shape, casts), found.get(block, nothing) if shape.exchanges else nothing
            )
            for block, shape in enumerate(self.cut.shape)
        ]
        self._capacity, self._adds_to_main = capacity, adds_to_main
        self.began = next_sequence_number()
        self.made: list[tuple[int, int, int]] = []
        self.stacks: list[Stack] = []
        self.queue: WeightQueue | None = WeightQueue()
        self.anchor = torch.empty(0, requires_grad=True)

    @contextmanager
    def on_modules(self, aux_scale: float | None = 1.0, *, divided: bool = True) -> Iterator[None]:
        """Replace the forwards of linear layers and the products of experts, which split their weight gradients off.

        Only attributes of module instances change, and all of them change back at the end.

        Args:
            aux_scale: Scale of auxiliary losses; None leaves the scale of each module as it is.
            divided: Whether a graph is divided, or a weight gradient computed apart; else products stay as they are.
        """
        for _, uses, _ in self.facts:
            uses.settle()
        crossing = functions_cross() if divided else nullcontext()
        with replaced(self._replacements(aux_scale, divided=divided)), crossing:
            try:
                yield
            finally:
                while self.stacks:
                    self.stacks.pop().end()

    def offload_of(self, block: int) -> BlockOffload | None:
        """Return what takes the saved tensors of a block; None where hooks of the caller's own take them."""
        return None if self._host is None or self.thread.hooks else BlockOffload(self._host, self.stage.names[block])

    @cached_property
    def library_stream(self) -> SideStream:
        """The stream of exchanges that a library carries out."""
        device = self.stage.device
        return InlineStream() if devices.gpu_of(device) is None else side_stream(device, "library")

    def maker_of(self, number: int) -> int | None:
        """Return the microbatch whose segment has made the autograd node with a sequence number; None if none has."""
        at = bisect_right(self.made, number, key=itemgetter(0)) - 1
        return self.made[at][2] if at >= 0 and number < self.made[at][1] else None

    @property
    def plain(self) -> Plain:
        """The blocks that may be called as a plain loop calls them, by what their forwards have shown."""
        stage = self.stage
        # Where it is so, plain autograd adds the gradients of experts where the engine would.
        at_once = isinstance(self.exchange, LocalExchange) and self._capacity is None
        at_once &= not any(hasattr(p, "main_grad") for every in stage.expert_parameters.values() for p in every)
        blocks = set()
        for block, (shape, uses, _) in enumerate(self.facts):
            options = options_of(stage.blocks[block])
            if shape.recompute != "none" or shape.gathered or shape.offload or shape.exchanges:
                continue
            if options.apart or options.delays:
                continue
            if shape.expert_calls and not (at_once and shape.parts == 1 and options.state is None):
                continue
            if uses.plain and stage.draws.knows(block):
                blocks.add(block)
        # Of a weight that is used in another way, too, autograd would add that gradient earlier than a queue does.
        whole = [block for block in blocks if self.facts[block].shape.expert_calls or self.facts[block].uses.several]
        return Plain(frozenset(blocks), frozenset(whole), stage.sharing)

    def _replacements(self, aux_scale: float | None, *, divided: bool) -> Iterator[Replacement]:
        """Yield what the step replaces on modules."""
        stage = self.stage
        for experts in stage.expert_parameters:
            attributes = vars(experts)
            yield attributes, "capacity", self._capacity
            if divided:
                yield attributes, "forward", uncompiled(experts.forward)
            if (divided or experts.precision is not None) and has_product_of_experts(experts):
                yield attributes, "product", uncompiled(self._split_product(experts))
        for inside in stage.inside:
            for linear in filter(has_forward_of_linear, inside.linears) if divided else ():
                yield vars(linear), "forward", uncompiled(self._split_forward(linear))
            for carrier in inside.carriers if aux_scale is not None else ():
                yield vars(carrier), "aux_scale", aux_scale

    @property
    def put(self) -> Put:
        """Leaves a weight gradient to the queue in force."""
        assert self.queue is not None
        return self.queue.put

    def _split_forward(self, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        """Return the forward of a linear layer that leaves its weight gradient to the queue in force."""

        def forward(input: Tensor) -> Tensor:
            """Multiply; the weight's gradient goes to the queue, unless the weight is frozen or has another class."""
            weight, bias, queue = linear.weight, linear.bias, self.queue
            # It was frozen since, or has a class with products of its own. Or torch.func has put a tensor in its place,
            # or transforms a call and knows no Function.
            if type(weight) is type(bias) is nn.Parameter:
                plain = not weight.requires_grad
            else:
                plain = not isinstance(weight, nn.Parameter) or not weight.requires_grad or has_own_products(weight)
                plain = plain or (bias is not None and has_own_products(bias))
                bias = bias if bias is None else torch._C._functorch.unwrap_if_dead(bias)  # type: ignore[assignment]
            if plain or queue is None or torch._C._are_functorch_transforms_active():
                return F.linear(input, weight, bias)
            return split_linear(input, (weight,), bias, queue.put, self.anchor)

        return forward

    def _split_product(self, experts: Experts) -> GroupedProduct:
        """Return the grouped product of experts that leaves its weight gradient to the queue in force."""
        kernels = experts.kernels if self._adds_to_main else None
        plain, precision = experts.product, experts.precision
        eight = None if precision is None else EightBits(experts.kernels, precision, keeps=True)  # for this step

        def product(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
            """Multiply the rows of each expert; the weight's gradient goes to the queue, if there is one."""
            queue = self.queue
            if has_own_products(weight) or (queue is None and eight is None):
                return plain(rows, weight, counts)
            if queue is None:
                multiplied: Tensor = GroupedMM.apply(rows, weight, counts, eight)
                return multiplied
            anchor = self.anchor if weight.requires_grad else None
            return split_grouped_mm(rows, (weight,), counts, queue.put, kernels, anchor, eight)

        return product
