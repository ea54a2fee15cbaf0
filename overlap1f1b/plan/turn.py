"""What a player does in turn: the nodes of a plan, with what playing each of them needs.

A node is a turn. Neighbouring blocks that exchange nothing are one turn forward and one backward, a *stretch*, if their
nodes follow one another both ways and nobody asks for each of them. A stretch is one call of autograd, as in a plain
loop; its weight gradients stay in the backward, unless the plan has put those of all its blocks elsewhere.

    nodes   dense.f[0] dense.f[1] send.f | … | dense.b[1] dense.w[1] dense.b[0] dense.w[0]
    turns   blocks 0 and 1 send.f        | … | blocks 0 and 1
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from overlap1f1b.plan.node import OF_PARAMETERS, RECOMPUTES, Node, Op, Place, Resource, awaited_by
from overlap1f1b.schedule import Kind

MicrobatchKey = tuple[int, int]
"""Numbers of stage and microbatch."""


class Way(IntEnum):
    """What plays a turn."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    WEIGHTS = 3
    EXCHANGE = 4
    PEER = 5
    PARAMETERS = 6
    MOVE = 7


class Stretch(NamedTuple):
    """Blocks ``first`` to ``last``; ``deferred`` says that each leaves its weight gradients to a turn of its own."""

    first: int
    last: int
    deferred: bool = False


class Plain(NamedTuple):
    """The blocks of a stage that may be in a stretch.

    Args:
        blocks: Their numbers.
        whole: Those of them whose weight gradients must stay in their backward.
        sharing: Blocks that share parameters, and must all be in the same stretch.
    """

    blocks: frozenset[int]
    whole: frozenset[int] = frozenset()
    sharing: frozenset[int] = frozenset()


class Following(NamedTuple):
    """The exchange of rows that comes next for a part of a microbatch: where, and tags of its rows and its counts."""

    block: int
    place: Place
    tag: int
    counts: int


class Turn(NamedTuple):
    """A node that is played, or the first one of a stretch.

    Args:
        node: The node.
        way: What plays it.
        key: Its stage and microbatch.
        place: Where it is in its block.
        block: Its block, or the first of the stretch.
        awaits: The exchanges that it waits for.
        receives: Whether it waits for what another stage sends.
        stretch: The blocks that are played at once.
        tag: Of an exchange, see :attr:`Node.tag`.
        following: The exchange behind an exchange of rows; None if there is none on this rank.
    """

    node: Node
    way: Way
    key: MicrobatchKey
    place: Place
    block: int
    awaits: tuple[Place, ...] = ()
    receives: bool = False
    stretch: Stretch | None = None
    tag: int = 0
    following: Following | None = None


class Turns(tuple[Turn, ...]):
    """The turns of a rank's nodes, in order."""

    @cached_property
    def late(self) -> tuple[int, ...]:
        """Positions of weight gradients, which a thread that waits may play before their turn."""
        return tuple(at for at, turn in enumerate(self) if turn.way is Way.WEIGHTS)

    @cached_property
    def undivided(self) -> frozenset[int]:
        """The stages all of whose turns are stretches that leave no weight gradients."""
        computing = [turn for turn in self if turn.way <= Way.WEIGHTS]
        divided = {turn.node.stage for turn in computing if turn.stretch is None or turn.stretch.deferred}
        return frozenset({turn.node.stage for turn in computing} - divided)


def turns_of(
    nodes: Sequence[Node], plain: Mapping[int, Plain] | None = None, tagged: Callable[[Node], Node] = lambda node: node
) -> Turns:
    """Return the turns of a rank's nodes; ``plain`` has the blocks of each stage that may be in a stretch.

    ``tagged`` returns the node whose tag an exchange has.
    """
    stretches = _stretches(nodes, plain) if plain else {}
    flying: dict[tuple[MicrobatchKey, Kind], dict[Place, None]] = defaultdict(dict)
    received, begun = set[tuple[MicrobatchKey, Kind]](), set[tuple[MicrobatchKey, Stretch, bool]]()
    turns, last = list[Turn](), dict[tuple[int, ...], int]()  # positions of the last exchange of rows of each part
    for node in nodes:
        key, place, way = (node.stage, node.microbatch), node.place, _way_of(node)
        stretch, action, awaits = stretches.get(node), (key, node.kind), tuple[Place, ...]()
        if stretch is not None:
            if (this := (key, stretch, node.kind is Kind.F)) in begun:
                continue
            begun.add(this)
        flies = flying[action]
        if stretch is None and way is Way.EXCHANGE:
            if node.op is Op.DISPATCH:  # its start waits for them
                flies.pop((Op.COUNTS, node.call, node.part), None)
            flies[place] = None
        elif way <= Way.BACKWARD:
            alone = awaited_by(node)
            awaits = (alone,) if alone in flies else tuple(flies)
            for one in awaits:
                del flies[one]
        receives = way <= Way.BACKWARD and action in received
        if receives:
            received.remove(action)
        elif node.op is Op.RECEIVE:
            received.add(action)
        own, tag, block = tagged(node), 0, node.block if stretch is None else stretch.first
        if way is Way.EXCHANGE:
            tag, part = own.tag, (*key, node.part)
            if node.op is not Op.COUNTS:
                if (at := last.get(part)) is not None:
                    following = Following(block, place, tag, own._replace(op=Op.COUNTS).tag)
                    turns[at] = turns[at]._replace(following=following)
                last[part] = len(turns)
        turns.append(Turn(node, way, key, place, block, awaits, receives, stretch, tag))
    return Turns(turns)


def _way_of(node: Node) -> Way:
    if node.op in OF_PARAMETERS:
        return Way.PARAMETERS
    if node.resource is Resource.PEER:
        return Way.PEER
    if node.resource is Resource.HOST:
        return Way.MOVE
    if node.resource is not Resource.COMPUTE:
        return Way.EXCHANGE
    if node.op in RECOMPUTES:
        return Way.RECOMPUTE
    return {Kind.F: Way.FORWARD, Kind.W: Way.WEIGHTS}.get(node.kind, Way.BACKWARD)


_Rows = dict[MicrobatchKey, dict[int, dict[Kind, set[int]]]]
"""Of each microbatch and block the rows in which it has nodes of each kind."""


def _stretches(nodes: Sequence[Node], plain: Mapping[int, Plain]) -> dict[Node, Stretch]:
    """Return the stretch of each node that is in one."""
    of: dict[tuple[MicrobatchKey, int], Stretch] = {}
    for key, rows in _rows(nodes, plain).items():
        _, whole, sharing = plain[key[0]]
        found = _neighbours(rows, whole)
        every = [range(one.first, one.last + 1) for one in found]
        together = any(sharing <= set(blocks) for blocks in every)
        for one, blocks in zip(found, every, strict=True):
            if together or sharing.isdisjoint(blocks):
                of |= {(key, block): one for block in blocks}
    return {
        node: stretch
        for node in nodes
        if not _apart(node) and (stretch := of.get(((node.stage, node.microbatch), node.block))) is not None
        if node.kind is not Kind.W or not stretch.deferred
    }


def _rows(nodes: Sequence[Node], plain: Mapping[int, Plain]) -> _Rows:
    """Number the rows of nodes of plain blocks that follow one another, of one microbatch and direction."""
    rows: _Rows = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
    number, before = 0, None
    for node in nodes:
        key = node.stage, node.microbatch
        stops = _apart(node) or node.block not in plain[node.stage].blocks
        now = None if stops else (key, node.kind is Kind.F)
        number += now is None or now != before
        before = now
        if now is not None:
            rows[key][node.block][node.kind].add(number)
    return rows


def _neighbours(rows: Mapping[int, Mapping[Kind, set[int]]], whole: Set[int]) -> list[Stretch]:
    """Return the stretches of blocks of one microbatch: neighbours with their nodes in the same rows."""
    found: list[Stretch] = []
    last: object = None
    for block in sorted(rows):
        forward, backward, weights = (rows[block].get(kind, set()) for kind in (Kind.F, Kind.I, Kind.W))
        deferred = not weights <= backward
        if len(forward) != 1 or len(backward) > 1 or (deferred and block in whole):
            continue
        joins = last == (block - 1, forward, backward, deferred)
        found.append(Stretch(found.pop().first if joins else block, block, deferred))
        last = block, forward, backward, deferred
    return found


def _apart(node: Node) -> bool:
    return node.op in OF_PARAMETERS or node.resource is Resource.PEER
