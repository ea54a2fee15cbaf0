"""The nodes of a program's actions, transfers between ranks included."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import cast

from overlap1f1b.plan.node import (
    BlockShape,
    Node,
    Op,
    Resource,
    StageShape,
    backward_order,
    forward_order,
    parse_parts,
    parse_recompute,
)
from overlap1f1b.schedule import Action, Kind, Placement
from overlap1f1b.schedule.values import check_size

Shapes = StageShape | Sequence[StageShape]
"""The blocks of every stage, or a sequence with the blocks of each stage."""


class Chains:
    """The nodes of every action, transfers between stages included.

    >>> chains = Chains(Placement.loop(2), (BlockShape(expert_calls=0),))
    >>> [str(node) for node in chains.of(Action.parse("1F0"))]
    ['receive.f[0] m0 s1', 'dense.f[0] m0 s1']
    >>> [str(node) for node in chains.of(Action.parse("1I0"))]
    ['dense.b[0] m0 s1', 'send.b[0] m0 s1']

    Args:
        placement: Which rank holds which stage.
        shape: Blocks of every stage, or a sequence with the blocks of each stage.

    Raises:
        ValueError: The shapes are of another number of stages, a stage has no blocks, a shape is one block instead of a
            sequence, or a block has fewer than 0 calls of experts.
    """

    def __init__(self, placement: Placement, shape: Shapes) -> None:
        self.placement = placement
        self.shapes = _each(shape, placement.stages)
        # One compilation asks for the same chains for every candidate.
        self.of, self.local_needs = cache(self._of), cache(self._local_needs)
        self.weight, self.receive = cache(self._weight), cache(self._receive)

    def _of(self, action: Action) -> tuple[Node, ...]:
        """Return the nodes of an action in order, without the weight gradients of a B: see :meth:`weight`."""
        forward, (_, stage, microbatch, pipe) = action.kind is Kind.F, action
        blocks = list(enumerate(self.shapes[stage]))
        if not forward:
            blocks.reverse()
        kind, order = (Kind.F, forward_order) if forward else (Kind.I, backward_order)
        chain = [
            Node(op, kind, microbatch, block, call, part, stage, pipe)
            for block, shape in blocks
            for op, call, part in order(shape)
        ]
        if action.kind is Kind.W:
            return tuple(filter(None, map(self.weight, chain)))
        before, after = (action.stage - 1, action.stage + 1) if forward else (action.stage + 1, action.stage - 1)
        if self._travels(action, before):
            chain.insert(0, chain[0]._replace(op=Op.RECEIVE, call=0, part=0))
        if self._travels(action, after):
            chain.append(chain[-1]._replace(op=Op.SEND, call=0, part=0))
        return tuple(chain)

    def _weight(self, node: Node) -> Node | None:
        """Return the weight gradient that becomes possible after a node of a backward, if any.

        The parts of a call have one, so that their sum has one order.
        """
        if node.part or node.kind is not Kind.I or node.resource is not Resource.COMPUTE:
            return None
        return node._replace(kind=Kind.W) if self.shapes[node.stage][node.block].defers(node.op) else None

    def with_weights(self, action: Action, nodes: Iterable[Node]) -> Iterator[Node]:
        """Yield nodes of an action, in a B each with its weight gradient behind it."""
        for node in nodes:
            yield node
            if action.kind is Kind.B and (weight := self.weight(node)) is not None:
                yield weight

    def _local_needs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions of the same rank that must end before an action; a B counts as an I."""
        if action.kind is Kind.W:
            return (action._replace(kind=Kind.I),)
        forward = action.kind is Kind.F
        before = action.stage - 1 if forward else action.stage + 1
        needs = [] if forward else [action._replace(kind=Kind.F)]
        if 0 <= before < self.placement.stages and not self._travels(action, before):
            needs.append(action._replace(kind=Kind.F if forward else Kind.I, stage=before))
        return tuple(needs)

    def _receive(self, node: Node) -> Node:
        """Return the RECEIVE node of a SEND node."""
        forward = node.kind is Kind.F
        stage = node.stage + (1 if forward else -1)
        block = 0 if forward else len(self.shapes[stage]) - 1
        return node._replace(op=Op.RECEIVE, stage=stage, block=block)

    def _travels(self, action: Action, stage: int) -> bool:
        pipe = self.placement.pipes[action.pipe]
        return 0 <= stage < len(pipe) and pipe[stage] != pipe[action.stage]


def _each(shape: Shapes, stages: int) -> tuple[StageShape, ...]:
    """Return the blocks of each stage; ValueError for shapes that are none."""
    if isinstance(shape, BlockShape) or not isinstance(shape, Sequence):
        raise ValueError(f"shape={shape!r}; allowed: a sequence of blocks, such as (BlockShape(expert_calls=1),)")
    if not shape or isinstance(shape[0], BlockShape):
        shapes = (cast("StageShape", tuple(shape)),) * stages
    else:
        shapes = tuple(cast("Sequence[StageShape]", shape))
    for stage, blocks in enumerate(shapes):
        if isinstance(blocks, BlockShape) or not isinstance(blocks, Sequence):
            raise ValueError(f"stage {stage}: shape={blocks!r}; allowed: a sequence of blocks for each stage")
        for block in blocks:
            _check_block(block, stage)
    if len(shapes) != stages:
        raise ValueError(f"shapes of {len(shapes)} stages for a program of {stages}; allowed: one, or one for each")
    if not all(shapes):
        raise ValueError("a stage of 0 blocks; allowed: at least 1")
    return shapes


def _check_block(block: object, stage: int) -> None:
    if not isinstance(block, BlockShape):
        raise ValueError(f"stage {stage}: {block!r} is not a block; allowed: BlockShape(expert_calls=1), for example")
    check_size(f"stage {stage}: expert_calls", block.expert_calls, 0)
    parse_parts(block.parts)
    parse_recompute(block.recompute)
    if block.exchanges and (block.expert_calls or not set(block.exchanges) <= {Op.DISPATCH, Op.COMBINE}):
        found = f"exchanges={tuple(map(str, block.exchanges))}, expert_calls={block.expert_calls}"
        raise ValueError(f"stage {stage}: {found}; allowed: dispatch and combine, or calls of experts")
