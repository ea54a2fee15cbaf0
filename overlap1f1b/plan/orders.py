"""The two fixed orders of nodes, serial and Megatron-Core's merged step, and changes of any order."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest

from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.node import CONTRIBUTING, Node, Op, Resource, peer_of
from overlap1f1b.schedule import Action, Kind, Pair, Slot


def serial(actions: Iterable[Action], chains: Chains) -> Iterator[Node]:
    """Yield one action's nodes after another; in a B each weight gradient follows its input gradient."""
    for action in actions:
        yield from chains.with_weights(action, chains.of(action))


def pairs(slots: Iterable[Slot], chains: Chains) -> Iterator[Node]:
    """Yield the serial order with the members of a pair interleaved by layer in Megatron-Core's fixed order.

    ::

        exchange  | combine.b   | dispatch.f | dispatch.b             | combine.f                  |
        compute   | attention.f | experts.b  | experts.w  experts.f   | attention.b  attention.w   |

    A forward's first layer runs beside a backward's last layer; if one member has more layers, its rest runs alone. A
    transfer between stages starts when its own member is ready, not at the end of the pair.
    """
    for slot in slots:
        if isinstance(slot, Pair):
            layers = zip_longest(_layers(slot.forward, chains), _layers(slot.backward, chains), fillvalue=())
            for forward, backward in layers:
                yield from _merge(forward, backward, slot.backward, chains)
        else:
            yield from serial((slot,), chains)


def with_reductions(nodes: Iterable[Node], chains: Chains) -> list[Node]:
    """Add the reduction of each reduced block right after the last contribution to its gradients."""
    nodes = list(nodes)
    if not any(block.reduced for shape in chains.shapes for block in shape):
        return nodes
    last = {
        (node.pipe, node.stage, node.block): (behind, node)
        for behind, node in enumerate(nodes, 1)
        if node.op in CONTRIBUTING and node.kind is not Kind.F and chains.shapes[node.stage][node.block].reduced
    }
    added = {behind: (node._replace(op=Op.REDUCE, kind=Kind.W, call=0, part=0),) for behind, node in last.values()}
    return with_inserted(nodes, added)


def with_gathers(nodes: Iterable[Node], chains: Chains, at_once: float = math.inf) -> list[Node]:
    """Add gathers and releases, so that the sharded parameters of at most ``at_once`` blocks are there at a time.

    A block is gathered for the computation that uses it first. If there is no room, the block with the furthest next
    use is released, right behind its last use so far. A gather is launched as soon as it has room, but not before the
    first use of the gather two before it. Without a bound each block is gathered once.
    """
    nodes = list(nodes)
    computes = ((at, node) for at, node in enumerate(nodes) if node.resource is Resource.COMPUTE)
    uses = {  # weight gradients need no parameters
        at: (node.stage, node.block)
        for at, node in computes
        if node.kind is not Kind.W and chains.shapes[node.stage][node.block].gathered
    }
    next_use, next_of_block = dict[int, float](), dict[tuple[int, int], int]()
    for at in reversed(uses):
        next_use[at], next_of_block[uses[at]] = next_of_block.get(uses[at], math.inf), at
    gathered: dict[tuple[int, int], tuple[float, int, Node]] = {}  # next and last use, and the gather
    inserted, gathers, first_uses = dict[int, list[Node]](), Counter[tuple[int, int]](), [0, 0]
    # The two zeros are so that [-2] is the first use of the gather before the last one.

    def release(place: tuple[int, int]) -> int:
        _, last, gather = gathered.pop(place)
        inserted.setdefault(last + 1, []).append(gather._replace(op=Op.RELEASE))
        return last + 1

    launched = 0  # gathers keep the order of their first uses
    for at, place in uses.items():
        if place not in gathered:
            room = release(max(gathered, key=lambda block: gathered[block][0])) if len(gathered) >= at_once else 0
            launched = max(launched, room, first_uses[-2])
            gather = nodes[at]._replace(op=Op.GATHER, kind=Kind.W, call=gathers[place], part=0)
            inserted.setdefault(launched, []).append(gather)
            gathers[place] += 1
            first_uses.append(at)
        else:
            gather = gathered[place][2]
        gathered[place] = next_use[at], at, gather
    for place in list(gathered):
        release(place)
    return with_inserted(nodes, inserted)


def with_inserted(nodes: Sequence[Node], added: Mapping[int, Sequence[Node]]) -> list[Node]:
    """Return nodes with others before the positions for which they are given."""
    if not added:
        return list(nodes)
    return [node for at in range(len(nodes) + 1) for node in (*added.get(at, ()), *nodes[at : at + 1])]


def receiving_in_order(ranks: Sequence[Sequence[Node]], chains: Chains) -> tuple[tuple[Node, ...], ...]:
    """Move receives ahead, so that each rank receives in the order in which its peers send.

    All other nodes keep their order. Where launches cost nothing, a receive takes no time, so nothing ends later.
    """
    sent: dict[tuple[int, int], list[Node]] = {}  # for every two ranks, the receives on the second
    for rank, nodes in enumerate(ranks):
        for node in nodes:
            if node.op is Op.SEND:
                sent.setdefault((rank, peer_of(node, chains.placement)), []).append(chains.receive(node))
    ordered = []
    for rank, nodes in enumerate(ranks):
        position = {node: index for index, node in enumerate(nodes) if node.op is Op.RECEIVE}
        moved: dict[int, list[Node]] = {}  # receives by their new position, the last one first
        for (_, to), receives in sent.items():
            at = len(nodes)
            for node in reversed(receives if to == rank else ()):
                at = min(at, position[node])
                moved.setdefault(at, []).append(node)
        order: list[Node] = []
        for index, node in enumerate(nodes):
            order += reversed(moved.get(index, ()))
            if node.op is not Op.RECEIVE:
                order.append(node)
        ordered.append(tuple(order))
    return tuple(ordered)


def _layers(action: Action, chains: Chains) -> list[tuple[Node, ...]]:
    """Split an action's chain into parts of one exchange round trip; dense blocks join the part beside them."""
    chain = chains.of(action)
    aggregates = [index for index, node in enumerate(chain) if node.op is Op.AGGREGATE]
    cuts = [index + 1 for index in aggregates[:-1]] if action.kind is Kind.F else aggregates[1:]
    return [chain[a:b] for a, b in pairwise([0, *cuts, len(chain)])]


def _merge(forward: Sequence[Node], backward: Sequence[Node], action: Action, chains: Chains) -> Iterator[Node]:
    """Interleave one layer of each member: the parts between exchanges alternate, backward first."""
    parts_f, parts_b = _parts(forward), _parts(backward)
    if len(parts_f) == len(parts_b) >= 3:
        # aggregate.b, combine.b and attention.f, dispatch.f; experts.b, dispatch.b, experts.w and experts.f, combine.f,
        # for each part; attention.b, attention.w and aggregate.f.
        for part_b, part_f in zip(parts_b, parts_f, strict=True):
            nodes = list(chains.with_weights(action, part_b))
            if any(node.op is Op.DISPATCH for node in nodes):  # its exchange leaves before the weight gradients
                nodes.sort(key=lambda node: node.kind is Kind.W)
            yield from nodes
            yield from part_f
    else:
        yield from chains.with_weights(action, backward)
        yield from forward


def _parts(nodes: Sequence[Node]) -> list[list[Node]]:
    """Split the nodes after each exchange of rows, or after the exchanges of several parts."""
    rows = [*(node.op in (Op.DISPATCH, Op.COMBINE) for node in nodes), False]
    cuts = [index + 1 for index, (here, following) in enumerate(pairwise(rows)) if here and not following]
    return [list(nodes[a:b]) for a, b in pairwise([0, *cuts, len(nodes)])]
