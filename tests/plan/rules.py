"""The rules of a plan, written down a second time with nothing of the library but its data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from overlap1f1b.plan import Node, Op, Plan
from overlap1f1b.schedule import Kind

FORWARD = (Op.COUNTS, Op.DISPATCH, Op.EXPERTS, Op.COMBINE, Op.AGGREGATE)
BACKWARD = (Op.AGGREGATE, Op.COMBINE, Op.EXPERTS, Op.DISPATCH)


def expected_nodes(plan: Plan) -> Counter[Node]:
    """Every node of the step."""
    nodes: list[Node] = []
    actions = list(plan.program.actions(0))
    backwards = [action.microbatch for action in actions if action.kind is not Kind.F]
    for block, (seams, split, reduced) in enumerate(plan.shape):
        own = Op.ATTENTION if seams else Op.DENSE
        for action in actions:
            m = action.microbatch
            if action.kind is Kind.F:
                nodes.append(Node(own, Kind.F, m, block))
                nodes += [Node(op, Kind.F, m, block, seam) for seam in range(seams) for op in FORWARD]
            else:
                nodes.append(Node(own, Kind.I, m, block))
                nodes += [Node(op, Kind.I, m, block, seam) for seam in range(seams) for op in BACKWARD]
                nodes += [Node(Op.EXPERTS, Kind.W, m, block, seam) for seam in range(seams)]
                nodes += [Node(own, Kind.W, m, block)] if split else []
        if reduced and backwards:
            nodes.append(Node(Op.REDUCE, Kind.W, backwards[-1], block))
    return Counter(nodes)


def broken_rules(plan: Plan) -> Iterator[str]:
    """What is wrong with a plan; nothing if it may be played."""
    if Counter(plan.nodes) != expected_nodes(plan):
        yield "the nodes are not those of the step"
        return
    at = {node: position for position, node in enumerate(plan.nodes)}
    yield from _broken_chains(plan, at)
    yield from _broken_sums(plan, at)
    yield from _broken_memory(plan, at)


def _broken_chains(plan: Plan, at: dict[Node, int]) -> Iterator[str]:
    chains: dict[tuple[int, Kind], list[tuple[tuple[float, ...], Node]]] = defaultdict(list)
    for node, position in at.items():
        own = node.op in (Op.ATTENTION, Op.DENSE)
        if node.kind is Kind.F:
            place = (node.block, -1, 0) if own else (node.block, node.seam, FORWARD.index(node.op))
        elif node.kind is Kind.I:
            place = (-node.block, 1, 0) if own else (-node.block, -node.seam, BACKWARD.index(node.op))
        else:
            if node.op is not Op.REDUCE and position < at[node._replace(kind=Kind.I)]:
                yield f"{node} before its input gradient"
            continue
        chains[node.microbatch, node.kind].append((place, node))
    for chain in chains.values():
        positions = [at[node] for _, node in sorted(chain)]
        if positions != sorted(positions):
            yield "a chain is out of order"
    for (microbatch, kind), chain in chains.items():
        if kind is Kind.I and min(at[n] for _, n in chain) < max(at[n] for _, n in chains[microbatch, Kind.F]):
            yield f"the backward of {microbatch} begins before its forward ends"


def _broken_sums(plan: Plan, at: dict[Node, int]) -> Iterator[str]:
    order = [action.microbatch for action in plan.program.actions(0) if action.kind is not Kind.F]
    contributions: dict[Node, list[int]] = defaultdict(list)
    reductions: dict[int, int] = {}
    for node, position in at.items():
        if node.op is Op.REDUCE:
            reductions[node.block] = position
        elif node.kind is not Kind.F:
            contributions[node._replace(microbatch=0)].append(position)
    for key, positions in contributions.items():
        in_turn = [at[key._replace(microbatch=m)] for m in order]
        if in_turn != sorted(in_turn):
            yield f"{key} out of the program's order"
        if key.op in (Op.ATTENTION, Op.DENSE) and reductions.get(key.block, len(at)) < max(positions):
            yield f"block {key.block} is reduced too early"


def _broken_memory(plan: Plan, at: dict[Node, int]) -> Iterator[str]:
    if not plan.program.forward_only and peak(plan, at, Kind.I) > plan.program.peak_activations[0]:
        yield "too many alive"


def peak(plan: Plan, at: dict[Node, int], *ending: Kind) -> int:
    """Most microbatches at once between their first node and their last of these kinds."""
    spans = []
    for m in range(plan.program.microbatches):
        mine = [node for node in at if node.microbatch == m and node.op is not Op.REDUCE]
        spans.append((min(at[node] for node in mine), max(at[node] for node in mine if node.kind in ending)))
    return max(sum(first <= position <= last for first, last in spans) for position in range(len(at)))
