"""The two fixed orders of nodes: serial, and Megatron-Core's merged step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest

from overlap1f1b.plan.node import Node, Op, StageShape, backward_chain, forward_chain, weight_node
from overlap1f1b.schedule import Action, Kind, Pair, Step


def serial(actions: Iterable[Action], shape: StageShape) -> Iterator[Node]:
    """Each action's nodes, then the next action's, each weight gradient right after its input gradient."""
    for action in actions:
        yield from _with_weights(_chain(action, shape), shape)


def pairs(steps: Iterable[Step], shape: StageShape) -> Iterator[Node]:
    """Serial, but the members of a pair interleaved layer by layer in Megatron-Core's fixed order.

    ::

        exchange  | combine.b   | dispatch.f | dispatch.b             | combine.f                  |
        compute   | attention.f | experts.b  | experts.w  experts.f   | attention.b  attention.w   |

    A forward's first layer meets a backward's last one; where one member has more layers, the rest runs alone.
    """
    for step in steps:
        if isinstance(step, Pair):
            forward, backward = _layers(step.forward, shape), _layers(step.backward, shape)
            for f, b in zip_longest(forward, backward, fillvalue=()):
                yield from _merge(f, b, shape)
        else:
            yield from serial((step,), shape)


def with_reductions(nodes: Iterable[Node], shape: StageShape) -> Iterator[Node]:
    """The same order, each reduced block's reduction launched right after the last contribution to its gradients."""
    nodes = list(nodes)
    last = {
        node.block: index
        for index, node in enumerate(nodes)
        if node.op in (Op.ATTENTION, Op.DENSE) and node.kind is not Kind.F and shape[node.block].reduced
    }
    for index, node in enumerate(nodes):
        yield node
        if last.get(node.block) == index:
            yield node._replace(op=Op.REDUCE, kind=Kind.W)


def _chain(action: Action, shape: StageShape) -> list[Node]:
    return list(forward_chain(action, shape) if action.kind is Kind.F else backward_chain(action, shape))


def _with_weights(nodes: Iterable[Node], shape: StageShape) -> Iterator[Node]:
    for node in nodes:
        yield node
        weight = weight_node(node, shape)
        if weight is not None:
            yield weight


def _layers(action: Action, shape: StageShape) -> list[list[Node]]:
    """The action's chain cut into parts of one exchange round trip; dense blocks go with the part beside them."""
    chain = _chain(action, shape)
    aggregates = [index for index, node in enumerate(chain) if node.op is Op.AGGREGATE]
    cuts = [index + 1 for index in aggregates[:-1]] if action.kind is Kind.F else aggregates[1:]
    return [chain[a:b] for a, b in pairwise([0, *cuts, len(chain)])]


def _merge(forward: Sequence[Node], backward: Sequence[Node], shape: StageShape) -> Iterator[Node]:
    """One layer of each: the parts between exchanges alternate, backward first."""
    parts_f, parts_b = _parts(forward), _parts(backward)
    if len(parts_f) == len(parts_b) == 3:
        experts_b = list(_with_weights(parts_b[1], shape))
        yield from _with_weights(parts_b[0], shape)  # …, aggregate.b, combine.b
        yield from parts_f[0]  # attention.f, counts, dispatch.f
        yield from (node for node in experts_b if node.kind is not Kind.W)  # experts.b, dispatch.b
        yield from (node for node in experts_b if node.kind is Kind.W)
        yield from parts_f[1]  # experts.f, combine.f
        yield from _with_weights(parts_b[2], shape)  # attention.b, attention.w
        yield from parts_f[2]  # aggregate.f
    else:
        yield from _with_weights(backward, shape)
        yield from forward


def _parts(nodes: Sequence[Node]) -> list[list[Node]]:
    """The nodes cut after each exchange of rows."""
    cuts = [index + 1 for index, node in enumerate(nodes) if node.op in (Op.DISPATCH, Op.COMBINE)]
    return [list(nodes[a:b]) for a, b in pairwise([0, *cuts, len(nodes)])]
