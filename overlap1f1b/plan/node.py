"""Sub-op nodes: the parts of an action, and the resource on which each runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple, cast, get_args

from overlap1f1b.schedule import Kind, Placement


class Op(StrEnum):
    """Sub-ops of a block, in forward order; ``DENSE`` is a whole block without experts.

    ``SEND`` and ``RECEIVE`` pass activations and gradients between stages of different ranks. ``RECOMPUTE_…`` runs the
    forward of its sub-op again, as a part of the backward, because the activations were dropped. ``GATHER`` brings the
    sharded parameters of a block, ``RELEASE`` frees them. ``OFFLOAD`` copies what a segment's forward has left for its
    backward to host memory, ``FREE`` waits for that and frees it, and ``FETCH`` brings it back.
    """

    DENSE = "dense"
    ATTENTION = "attention"
    COUNTS = "counts"
    DISPATCH = "dispatch"
    EXPERTS = "experts"
    COMBINE = "combine"
    AGGREGATE = "aggregate"
    REDUCE = "reduce"
    GATHER = "gather"
    RELEASE = "release"
    SEND = "send"
    RECEIVE = "receive"
    RECOMPUTE_DENSE = "recompute_dense"
    RECOMPUTE_ATTENTION = "recompute_attention"
    RECOMPUTE_EXPERTS = "recompute_experts"
    OFFLOAD = "offload"
    FREE = "free"
    FETCH = "fetch"

    __hash__ = str.__hash__  # see Kind


class Resource(StrEnum):
    """Resources that work side by side.

    Each is first in, first out; ``PEER`` is so for each neighbour, ``HOST``, the link to host memory, for each way.
    """

    COMPUTE = "compute"
    EXCHANGE = "exchange"
    CONTROL = "control"
    PEER = "peer"
    HOST = "memory"

    __hash__ = str.__hash__


RESOURCE_OF = dict.fromkeys(Op, Resource.COMPUTE) | {
    Op.COUNTS: Resource.CONTROL,
    Op.DISPATCH: Resource.EXCHANGE,
    Op.COMBINE: Resource.EXCHANGE,
    Op.REDUCE: Resource.EXCHANGE,
    Op.GATHER: Resource.EXCHANGE,
    Op.RELEASE: Resource.CONTROL,
    Op.SEND: Resource.PEER,
    Op.RECEIVE: Resource.PEER,
    Op.OFFLOAD: Resource.HOST,
    Op.FREE: Resource.HOST,
    Op.FETCH: Resource.HOST,
}

RECOMPUTE_OF = {
    Op.DENSE: Op.RECOMPUTE_DENSE,
    Op.ATTENTION: Op.RECOMPUTE_ATTENTION,
    Op.EXPERTS: Op.RECOMPUTE_EXPERTS,
}
SEGMENT_BEHIND = {Op.DISPATCH: Op.EXPERTS, Op.COMBINE: Op.AGGREGATE}
"""Sub-ops that are computed behind an exchange of rows."""
CONTRIBUTING = frozenset((Op.DENSE, Op.ATTENTION, Op.EXPERTS, Op.AGGREGATE))
"""Sub-ops whose backward may contribute to gradients of parameters."""
RECOMPUTES = frozenset(RECOMPUTE_OF.values())
OWN_AGAIN = RECOMPUTES - {Op.RECOMPUTE_EXPERTS}
"""Sub-ops that compute all of a block again but its experts: they need what each of its segments has kept for that."""
MOVES = frozenset((Op.OFFLOAD, Op.FREE, Op.FETCH))
"""Sub-ops of a block's activations that go to host memory and come back. They belong to no action: any order may get
them, see :func:`overlap1f1b.plan.offload.offloaded`."""
EXCHANGED = frozenset((Op.COUNTS, Op.DISPATCH, Op.COMBINE))
"""Sub-ops that exchange rows, or say how many."""
OF_PARAMETERS = frozenset((Op.REDUCE, Op.GATHER, Op.RELEASE))
"""Sub-ops of a block's parameters: they belong to no action. Their kind is W, and their microbatch the last one that
contributes to the gradients, or the one for which the parameters are gathered."""
_DROPPED: dict[Recompute, tuple[Op, ...]] = {
    "none": (),
    "experts": (Op.EXPERTS,),
    "attention": (Op.DENSE, Op.ATTENTION),
    "block": (Op.DENSE, Op.ATTENTION, Op.EXPERTS),
}

_BEHIND = {Op.EXPERTS: 1, Op.RECOMPUTE_EXPERTS: 1, Op.AGGREGATE: 2}
_ROUND_TRIP = (Op.COUNTS, Op.DISPATCH, Op.COMBINE)

Place = tuple[Op, int, int]
"""Where a node is in its block: sub-op, call and part."""


class Node(NamedTuple):
    """One sub-op of one microbatch: ``kind`` is F, I (the input gradient) or W.

    >>> str(Node(Op.EXPERTS, Kind.W, microbatch=3, block=1))
    'experts.w[1] m3'

    ``block`` counts the stage's blocks, ``call`` a block's calls of experts (or its own exchanges of a sub-op, or
    its gathers), ``part`` the parts of a call; weight gradients of all parts are one node. Copies to host memory and
    back have number and part of a :attr:`segment` in place of both.
    """

    op: Op
    kind: Kind
    microbatch: int
    block: int
    call: int = 0
    part: int = 0
    stage: int = 0
    pipe: int = 0

    @property
    def resource(self) -> Resource:
        """The resource that the node occupies."""
        return RESOURCE_OF[self.op]

    @property
    def chain(self) -> tuple[int, int, int, Kind]:
        """Pipe, stage, microbatch and direction of the chain of nodes that it belongs to."""
        return self.pipe, self.stage, self.microbatch, self.kind

    @property
    def place(self) -> Place:
        """Where it is in its block."""
        return self.op, self.call, self.part

    @property
    def segment(self) -> tuple[int, int]:
        """Number and part of the segment whose activations it leaves or needs: the first, then experts, sums, experts …

        >>> Node(Op.AGGREGATE, Kind.I, microbatch=0, block=0, call=1).segment
        (4, 0)
        """
        if self.op in MOVES:
            return self.call, self.part
        return (2 * self.call + _BEHIND[self.op], self.part) if self.op in _BEHIND else (0, 0)

    @property
    def stay(self) -> tuple[int, ...]:
        """Microbatch, block, stage, pipe and segment of these activations."""
        return (self.microbatch, self.block, self.stage, self.pipe, *self.segment)

    @property
    def name(self) -> str:
        """Sub-op and direction, as in records and tables, for example ``experts.w``."""
        return f"{self.op.value}.{'b' if self.kind is Kind.I else self.kind.value.lower()}"

    @property
    def tag(self) -> int:
        """Tag of an exchange, below 2³¹: the same on every rank, and unique among exchanges in flight."""
        number = ((self.microbatch % 512) * 64 + self.stage % 64) * 256 + self.block % 256
        number = (number * 4 + self.call % 4) * MOST_PARTS + self.part
        return number * 8 + 2 * _ROUND_TRIP.index(self.op) + (self.kind is Kind.F)

    def __str__(self) -> str:
        place = f" s{self.stage}{chr(39) * self.pipe}" if self.stage or self.pipe else ""
        call = (f".{self.call}" if self.call or self.part else "") + (f".{self.part}" if self.part else "")
        return f"{self.name}[{self.block}{call}] m{self.microbatch}{place}"


class BlockShape(NamedTuple):
    """The properties of a block that a plan depends on.

    Args:
        expert_calls: Calls of experts in the block's forward; 0 for a block without.
        split: Whether weight gradients of the block's own layers (outside the experts) can be computed apart.
        reduced: Whether gradients of the block, its experts' included, are summed over ranks after the last
            contribution.
        recompute: Activations that its forward drops and its backward computes again.
        exchanges: Exchanges of rows that a block without calls of experts makes by itself, ``DISPATCH`` or ``COMBINE``;
            the sizes of the rows are known when they start.
        parts: Parts of the tokens of each call of experts, each with exchanges of its own: the exchange of one part
            travels behind the experts of another.
        experts_split: Whether weight gradients of the experts can be computed apart; frozen experts have none.
        gathered: Whether its parameters are sharded, and gathered and released inside a step.
        offload: Whether its activations may leave to host memory.
    """

    expert_calls: int
    split: bool = True
    reduced: bool = False
    recompute: Recompute = "none"
    exchanges: tuple[Op, ...] = ()
    parts: int = 1
    experts_split: bool = True
    gathered: bool = False
    offload: bool = False

    def cut(self, exchanges: tuple[Op, ...]) -> BlockShape:
        """Return the shape of the block if it is cut at exchanges that it makes by itself."""
        if self.expert_calls or not exchanges:
            return self
        return self._replace(exchanges=exchanges).dropping(self.recompute)

    def dropping(self, recompute: Recompute) -> BlockShape:
        """Return the shape of the block if it drops these activations, as far as it can."""
        if self.exchanges:  # no part of such a block can be computed again by itself
            recompute = "attention" if Op.DENSE in _DROPPED[recompute] else "none"
        return self._replace(recompute=recompute)

    @property
    def own(self) -> Op:
        """Sub-op of the block's first segment, and of all that is not the experts'."""
        return Op.ATTENTION if self.expert_calls or self.exchanges else Op.DENSE

    def defers(self, op: Op) -> bool:
        """Return whether a sub-op of the backward leaves weight gradients to a node of their own."""
        several = bool(self.exchanges) or self.expert_calls > 1  # then there is more between exchanges than a sum
        if op is Op.EXPERTS:
            return self.experts_split or bool(self.exchanges)
        return self.split and (op is self.own or (op is Op.AGGREGATE and several))

    def drops(self, op: Op) -> bool:
        """Return whether the forward of a sub-op keeps nothing for the backward."""
        return op in _DROPPED[self.recompute]


StageShape = tuple[BlockShape, ...]


PARTED = (Op.DISPATCH, Op.EXPERTS, Op.COMBINE, Op.RECOMPUTE_EXPERTS)
"""Sub-ops whose time is shared by the parts of a call."""
MOST_PARTS = 8
"""Largest number of parts of a call: :attr:`Node.tag` keeps so many apart."""


def parse_parts(value: object) -> int:
    """Return a number of parts if it is allowed.

    Raises:
        ValueError: It is no whole number from 1 to :data:`MOST_PARTS`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_PARTS:
        raise ValueError(f"parts={value!r}; allowed: 1 to {MOST_PARTS}")
    return value


def forward_order(shape: BlockShape) -> tuple[Place, ...]:
    """Return the nodes of a block's forward in order.

    Each needs the one before it, but for the experts of a part, which need the rows of this part alone.

    >>> [f"{op}[{call}]" for op, call, part in forward_order(BlockShape(expert_calls=1))]
    ['attention[0]', 'counts[0]', 'dispatch[0]', 'experts[0]', 'combine[0]', 'aggregate[0]']
    """
    order: list[Place] = [(shape.own, 0, 0)]
    for position, op in enumerate(shape.exchanges):
        call = shape.exchanges[:position].count(op)
        order += [(op, call, 0), (SEGMENT_BEHIND[op], call, 0)]
    parts = range(shape.parts)
    for call in range(shape.expert_calls):
        order += [(op, call, part) for op in (Op.COUNTS, Op.DISPATCH) for part in parts]
        order += [(op, call, part) for part in parts for op in (Op.EXPERTS, Op.COMBINE)]
        order.append((Op.AGGREGATE, call, 0))
    return tuple(order)


def segments_of(shape: BlockShape) -> list[tuple[Place, list[Place]]]:
    """Return a block's segments in forward order, each with the exchanges of rows behind it.

    >>> for (op, call, part), behind in segments_of(BlockShape(expert_calls=1, parts=2)):
    ...     print(f"{op}[{call}.{part}]", [f"{op}[{call}.{part}]" for op, call, part in behind])
    attention[0.0] ['dispatch[0.0]', 'dispatch[0.1]']
    experts[0.0] ['combine[0.0]']
    experts[0.1] ['combine[0.1]']
    aggregate[0.0] []
    """
    segments: list[tuple[Place, list[Place]]] = []
    for place in forward_order(shape):
        if RESOURCE_OF[place[0]] is Resource.COMPUTE:
            segments.append((place, []))
        elif RESOURCE_OF[place[0]] is Resource.EXCHANGE:
            segments[-1][1].append(place)
    return segments


def awaited_by(node: Node) -> Place | None:
    """Return the exchange that experts wait for if it is in flight; None for a sub-op that waits for all exchanges.

    >>> awaited_by(Node(Op.EXPERTS, Kind.I, microbatch=0, block=0, part=1))
    (<Op.COMBINE: 'combine'>, 0, 1)
    """
    if node.op is not Op.EXPERTS:
        return None
    return (Op.DISPATCH if node.kind is Kind.F else Op.COMBINE), node.call, node.part


def peer_of(node: Node, placement: Placement) -> int:
    """Return the other pipeline rank of a send or receive."""
    towards_end = (node.kind is Kind.F) == (node.op is Op.SEND)
    return placement.rank(node.pipe, node.stage + (1 if towards_end else -1))


def backward_order(shape: BlockShape) -> list[Place]:
    """Return the nodes of a block's input gradient in order, which is the forward's reversed, but for parts.

    The gradients of all parts of a call leave before its experts, as the rows of all parts do in a forward. Dropped
    activations are computed again before their first use, without an exchange: the experts' beside the exchange of
    their gradient, the others even before the stage's output gradient arrives.
    """
    order: list[Place] = [(RECOMPUTE_OF[shape.own], 0, 0)] if shape.drops(shape.own) else []
    if shape.exchanges:
        return order + list(reversed(forward_order(shape)))
    again = [Op.RECOMPUTE_EXPERTS] if shape.drops(Op.EXPERTS) else []
    parts = range(shape.parts)[::-1]
    for call in reversed(range(shape.expert_calls)):
        order += [(Op.AGGREGATE, call, 0), *((Op.COMBINE, call, part) for part in parts)]
        order += [(op, call, part) for part in parts for op in (*again, Op.EXPERTS, Op.DISPATCH)]
    return [*order, (shape.own, 0, 0)]


Recompute = Literal["none", "experts", "attention", "block"]
"""Dropped activations: none; the experts'; all others of a block (in a dense block, all); or both."""


def parse_recompute(value: str) -> Recompute:
    """Parse a recompute mode.

    >>> parse_recompute("block")
    'block'

    Raises:
        ValueError: An unknown mode.
    """
    if value in get_args(Recompute):
        return cast("Recompute", value)
    raise ValueError(f"recompute={value!r}; allowed: {', '.join(get_args(Recompute))}")
