"""The rules of a plan, written down a second time with nothing of the library but its data."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from overlap1f1b.plan import RECOMPUTES, BlockShape, Node, Op, Place, Plan
from overlap1f1b.schedule import Action, Kind

RECOMPUTE_OWN = (Op.RECOMPUTE_ATTENTION, Op.RECOMPUTE_DENSE)
GATHERS = (Op.GATHER, Op.RELEASE)
MOVES = (Op.OFFLOAD, Op.FREE, Op.FETCH)
EXCHANGES = (Op.COUNTS, Op.DISPATCH, Op.COMBINE)
Positions = dict[Node, int]
Message = tuple[int, int, int, Kind]


def rank_of(plan: Plan, pipe: int, stage: int) -> int | None:
    stages = plan.program.placement.pipes[pipe]
    return stages[stage] if 0 <= stage < len(stages) else None


def comes_from(plan: Plan, action: Action) -> int:
    """The stage before an action's, in its direction."""
    return action.stage - 1 if action.kind is Kind.F else action.stage + 1


def inside(block: BlockShape) -> list[Place]:
    """Sub-ops of a forward behind the block's first, in order, with their calls and parts."""
    found, parts = list[Place](), range(block.parts)
    for call in range(block.expert_calls):
        found += [(op, call, part) for op in (Op.COUNTS, Op.DISPATCH) for part in parts]
        found += [(op, call, part) for part in parts for op in (Op.EXPERTS, Op.COMBINE)]
        found.append((Op.AGGREGATE, call, 0))
    number = {Op.DISPATCH: 0, Op.COMBINE: 0}
    for op in block.exchanges:
        found += [(op, number[op], 0), (Op.EXPERTS if op is Op.DISPATCH else Op.AGGREGATE, number[op], 0)]
        number[op] += 1
    return found


def inside_backward(block: BlockShape) -> list[Place]:
    """The same of a backward, before the block's last."""
    if block.exchanges:
        return inside(block)[::-1]
    found, parts = list[Place](), range(block.parts)[::-1]
    for call in reversed(range(block.expert_calls)):
        found.append((Op.AGGREGATE, call, 0))
        found += [(Op.COMBINE, call, part) for part in parts]
        found += [(op, call, part) for part in parts for op in (Op.EXPERTS, Op.DISPATCH)]
    return found


def nodes_of(plan: Plan, rank: int, action: Action) -> Iterator[Node]:
    """The nodes of an action, in no order."""
    blocks = plan.shapes[action.stage]
    m, on = action.microbatch, {"stage": action.stage, "pipe": action.pipe}
    for block, shape in enumerate(blocks):
        behind, drops = inside(shape), shape.recompute
        own = Op.ATTENTION if behind else Op.DENSE
        if action.kind is Kind.F:
            yield Node(own, Kind.F, m, block, **on)
            yield from (Node(op, Kind.F, m, block, *at, **on) for op, *at in behind)
        if action.kind in (Kind.B, Kind.I):
            yield Node(own, Kind.I, m, block, **on)
            yield from (Node(op, Kind.I, m, block, *at, **on) for op, *at in behind if op is not Op.COUNTS)
            if drops in ("experts", "block"):
                again = product(range(shape.expert_calls), range(shape.parts))
                yield from (Node(Op.RECOMPUTE_EXPERTS, Kind.I, m, block, *at, **on) for at in again)
            if drops in ("attention", "block"):
                yield Node(Op.RECOMPUTE_ATTENTION if behind else Op.RECOMPUTE_DENSE, Kind.I, m, block, **on)
        if action.kind in (Kind.B, Kind.W):
            apart = {Op.EXPERTS} if shape.experts_split or shape.exchanges else set()
            if shape.split:
                yield Node(own, Kind.W, m, block, **on)
                apart |= {Op.AGGREGATE} if shape.exchanges or shape.expert_calls > 1 else set()
            if shape.expert_calls:  # the parts of a call have one
                behind = [(op, call, 0) for call in range(shape.expert_calls) for op in (Op.EXPERTS, Op.AGGREGATE)]
            yield from (Node(op, Kind.W, m, block, *at, **on) for op, *at in behind if op in apart)
    if action.kind is Kind.W:
        return
    forward, last = action.kind is Kind.F, len(blocks) - 1
    kind = Kind.F if forward else Kind.I
    before = comes_from(plan, action)
    after = 2 * action.stage - before
    if rank_of(plan, action.pipe, before) not in (None, rank):
        yield Node(Op.RECEIVE, kind, m, 0 if forward else last, **on)
    if rank_of(plan, action.pipe, after) not in (None, rank):
        yield Node(Op.SEND, kind, m, last if forward else 0, **on)


def expected_nodes(plan: Plan, rank: int) -> Counter[Node]:
    """Every node of a rank's step."""
    actions = list(plan.program.actions(rank))
    nodes = [node for action in actions for node in nodes_of(plan, rank, action)]
    last = {
        (node.pipe, node.stage, node.block): node.microbatch
        for node in nodes
        if node.op in (Op.ATTENTION, Op.DENSE)
        and node.kind is not Kind.F
        and plan.shapes[node.stage][node.block].reduced
    }
    reductions = [Node(Op.REDUCE, Kind.W, m, block, 0, 0, stage, pipe) for (pipe, stage, block), m in last.items()]
    return Counter(nodes + reductions)


def broken_rules(plan: Plan) -> Iterator[str]:
    """What is wrong with a plan; nothing if it may be played."""
    for rank, nodes in enumerate(plan.ranks):
        yield from _broken_gathers(plan, rank, nodes)
        yield from _broken_moves(plan, nodes)
    plan = replace(plan, ranks=tuple(map(without_gathers, plan.ranks)))
    if any(Counter(nodes) != expected_nodes(plan, rank) for rank, nodes in enumerate(plan.ranks)):
        yield "the nodes are not those of the step"
        return
    for rank, nodes in enumerate(plan.ranks):
        at = {node: position for position, node in enumerate(nodes)}
        yield from _broken_chains(plan, rank, at)
        yield from _broken_sums(plan, rank, at)
        limit = plan.program.peak_activations[rank]
        splits = any(action.kind is Kind.W for action in plan.program.actions(rank))
        ending = (Kind.I, Kind.W) if splits else (Kind.I,)
        if not plan.program.forward_only and peak(plan, at, *ending) > limit:
            yield "too many alive"
        if splits and plan.program.peak_weights and waiting(plan, rank, at) > plan.program.peak_weights[rank]:
            yield "too many weight gradients wait"
    for held in (False, True):
        if not finishes(plan, held=held):
            yield f"ranks wait for each other, sends {'held' if held else 'buffered'}"


def without_gathers(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes but those that gather parameters and release them, or move activations to host memory and back."""
    return tuple(node for node in nodes if node.op not in (*GATHERS, *MOVES))


def _broken_moves(plan: Plan, nodes: Iterable[Node]) -> Iterator[str]:
    """Activations leave behind their segment's forward, and are freed and back before its backward, or stay."""
    stays: dict[tuple[int, ...], str] = defaultdict(str)
    for node in nodes:
        place: tuple[int, ...] = node.pipe, node.stage, node.microbatch, node.block
        experts = node.op in (Op.EXPERTS, Op.RECOMPUTE_EXPERTS)
        first = 0 if node.op in (Op.ATTENTION, Op.DENSE) else 2 * node.call + (1 if experts else 2)
        place = *place, node.call if node.op in MOVES else first, node.part
        if node.op in RECOMPUTE_OWN:
            for other in [other for other in stays if other[:4] == place[:4]]:
                stays[other] += "R"
        elif node.op is Op.RECOMPUTE_EXPERTS:
            stays[place] += "R"
        elif node.op in MOVES:
            stays[place] += node.op[:2]
            if not plan.shapes[node.stage][node.block].offload or (node.kind is Kind.I) is not (node.op is Op.FETCH):
                yield f"{node} where it is no use"
        elif node.kind is not Kind.W and node.op not in (*GATHERS, *EXCHANGES, *RECOMPUTES, Op.SEND, Op.RECEIVE):
            stays[place] += node.kind.value
    for place, stay in stays.items():
        if not re.fullmatch("F?(offrfe)?R*I?", stay):
            yield f"activations of {place} move in the order {stay}"


def _broken_gathers(plan: Plan, rank: int, nodes: Iterable[Node]) -> Iterator[str]:
    """Blocks that are gathered compute between a gather and a release; others have neither."""
    here: set[tuple[int, int]] = set()
    for node in nodes:
        place = node.stage, node.block
        mine = any(rank_of(plan, pipe, node.stage) == rank for pipe in range(len(plan.program.placement.pipes)))
        known = mine and node.block < len(plan.shapes[node.stage]) and plan.shapes[node.stage][node.block].gathered
        if node.op in GATHERS:
            if not known or (place in here) is (node.op is Op.GATHER):
                yield f"{node} where it is no use"
            here ^= {place}
        elif (
            known
            and node.op not in (*EXCHANGES, *MOVES, Op.SEND, Op.RECEIVE)
            and node.kind is not Kind.W
            and place not in here
        ):
            yield f"{node} without parameters"


def _broken_chains(plan: Plan, rank: int, at: Positions) -> Iterator[str]:
    chains: dict[tuple[int, int, int, Kind], list[tuple[tuple[float, ...], Node]]] = defaultdict(list)
    for node, position in at.items():
        own = node.op in (Op.ATTENTION, Op.DENSE)
        place: tuple[float, ...]
        if node.kind is Kind.W:
            parts = plan.shapes[node.stage][node.block].parts if node.op is Op.EXPERTS else 1
            inputs = (node._replace(kind=Kind.I, part=part) for part in range(parts))
            if node.op is not Op.REDUCE and position < max(at[other] for other in inputs):
                yield f"{node} before its input gradient"
            continue
        if node.op in (Op.RECEIVE, Op.SEND):
            place = (float("-inf" if node.op is Op.RECEIVE else "inf"), 0)
        elif own or node.op in RECOMPUTE_OWN:  # first in the forward, last in the backward but for what is dropped
            place = (node.block, -1) if node.kind is Kind.F else (-node.block, 1 if own else float("-inf"))
        else:
            op, before = (Op.EXPERTS, 0.5) if node.op is Op.RECOMPUTE_EXPERTS else (node.op, 0)
            shape = plan.shapes[node.stage][node.block]
            order = inside(shape) if node.kind is Kind.F else inside_backward(shape)
            index = order.index((op, node.call, node.part)) - before
            place = (node.block, index) if node.kind is Kind.F else (-node.block, index - len(order))
        chains[node.pipe, node.stage, node.microbatch, node.kind].append((place, node))
    for chain in chains.values():
        yield from _out_of_order(plan, [node for _, node in sorted(chain)], at)
    for (pipe, stage, microbatch, kind), chain in chains.items():
        needs = [] if kind is Kind.F else [(pipe, stage, microbatch, Kind.F)]
        before = stage - 1 if kind is Kind.F else stage + 1
        if rank_of(plan, pipe, before) == rank:
            needs.append((pipe, before, microbatch, kind))
        first = min(at[node] for _, node in chain if node.op is not Op.RECEIVE)
        for needed in needs:
            if needed in chains and first < max(at[node] for _, node in chains[needed] if node.op is not Op.SEND):
                yield f"{kind} of {microbatch} begins before {needed} ends"


def _out_of_order(plan: Plan, nodes: list[Node], at: Positions) -> Iterator[str]:
    """Compute has one order, exchanges have one; compute waits for the exchanges before it, experts for their part."""
    received, nodes = [node for node in nodes if node.op is Op.RECEIVE], [n for n in nodes if n.op is not Op.RECEIVE]
    for travels in (False, True):
        positions = [at[node] for node in nodes if (node.op in EXCHANGES) is travels]
        if positions != sorted(positions):
            yield "a chain is out of order"
    if any(at[node] > at[other] for node in received for other in nodes if other.op not in RECOMPUTE_OWN):
        yield "a chain begins before its input"  # what was dropped may be computed again before a gradient is here
    for index, node in enumerate(nodes):
        earlier = [other for other in nodes[:index] if (other.op in EXCHANGES) is not (node.op in EXCHANGES)]
        if node.op is Op.EXPERTS and plan.shapes[node.stage][node.block].parts > 1:
            own = [
                other
                for other in earlier
                if (other.block, other.call, other.part) == (node.block, node.call, node.part)
            ]
            earlier = own[-1:]
        if any(at[other] > at[node] for other in earlier):
            yield f"{node} comes before what it needs"


def _broken_sums(plan: Plan, rank: int, at: Positions) -> Iterator[str]:
    order: dict[tuple[int, int, Kind], list[int]] = defaultdict(list)  # of input and of weight gradients
    for action in plan.program.actions(rank):
        for kind, parts in ((Kind.I, (Kind.B, Kind.I)), (Kind.W, (Kind.B, Kind.W))):
            if action.kind in parts:
                order[action.pipe, action.stage, kind].append(action.microbatch)
    contributions: dict[Node, list[int]] = defaultdict(list)
    reductions: dict[tuple[int, int, int], int] = {}
    for node, position in at.items():
        if node.op is Op.REDUCE:
            reductions[node.pipe, node.stage, node.block] = position
        elif node.kind is not Kind.F and node.op not in (Op.SEND, Op.RECEIVE):
            part = 0 if node.op is Op.EXPERTS else node.part  # experts sum over the parts of a call
            contributions[node._replace(microbatch=0, part=part)].append(position)
    for key, positions in contributions.items():
        parts: Iterable[int] = [key.part]
        if key.op is Op.EXPERTS and key.kind is Kind.I:
            parts = reversed(range(plan.shapes[key.stage][key.block].parts))
        turns = product(order[key.pipe, key.stage, key.kind], parts)
        in_turn = [at[key._replace(microbatch=m, part=part)] for m, part in turns]
        if in_turn != sorted(in_turn):
            yield f"{key} out of the program's order"
        place = key.pipe, key.stage, key.block
        if key.op in (Op.ATTENTION, Op.DENSE, Op.EXPERTS, Op.AGGREGATE) and reductions.get(place, len(at)) < max(
            positions
        ):
            yield f"block {place} is reduced too early"


def finishes(plan: Plan, *, held: bool) -> bool:
    """Whether the ranks come to their ends, each stopping where what it computes with is not here.

    A lane between two ranks is two queues: what was sent and the receives that were posted; the first of one goes into
    the first of the other, and a wrong message ends the run. A send is held in its lane until its receive is posted, or
    buffered: then it is here at once.
    """
    at = [0] * len(plan.ranks)
    sent: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    posted: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    awaited: set[Message] = set()
    here: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for rank, nodes in enumerate(plan.ranks):
            while at[rank] < len(nodes):
                node = nodes[at[rank]]
                step = 1 if node.kind is Kind.F else -1
                message = (node.pipe, node.stage, node.microbatch, node.kind)
                if node.op is Op.RECEIVE:
                    source = rank_of(plan, node.pipe, node.stage - step)
                    assert source is not None
                    awaited.add(message)
                    posted[source, rank].append(message)
                elif node.op is Op.SEND:
                    to = rank_of(plan, node.pipe, node.stage + step)
                    assert to is not None
                    message = (node.pipe, node.stage + step, *message[2:])
                    sent[rank, to].append(message)
                    here |= set() if held else {message}
                elif node.op not in RECOMPUTES and message in awaited and message not in here:
                    break
                at[rank] += 1
                moved = True
        for lane, messages in sent.items():
            while messages and posted[lane]:
                if messages[0] != posted[lane].popleft():
                    return False
                here.add(messages.popleft())
                moved = True
    left = any(sent.values()) or any(posted.values())
    return not left and all(position == len(nodes) for position, nodes in zip(at, plan.ranks, strict=True))


def peak(plan: Plan, at: Positions, *ending: Kind) -> int:
    """Most (stage, microbatch) at once between their first computation and their last of these kinds."""
    mine: dict[tuple[int, int, int], list[Node]] = defaultdict(list)
    for node in at:
        if node.op not in (Op.REDUCE, Op.SEND, Op.RECEIVE):
            mine[node.pipe, node.stage, node.microbatch].append(node)
    spans = [
        (min(at[node] for node in nodes), max(at[node] for node in nodes if node.kind in ending))
        for nodes in mine.values()
    ]
    # It is reached where one of them begins.
    return max(sum(first <= begun <= last for first, last in spans) for begun, _ in spans)


def waiting(plan: Plan, rank: int, at: Positions) -> int:
    """Most (stage, microbatch) at once between their last input gradient and their last weight gradient."""
    spans = []
    for action in plan.program.actions(rank):
        if action.kind is Kind.I:
            inputs, weights = (
                [at[node] for node in nodes_of(plan, rank, action._replace(kind=kind)) if node.op is not Op.SEND]
                for kind in (Kind.I, Kind.W)
            )
            if weights and max(weights) > max(inputs):
                spans.append((max(inputs), max(weights)))
    return max((sum(first <= begun < last for first, last in spans) for begun, _ in spans), default=0)


def meets(plan: Plan) -> bool:
    """Whether the ranks come to their ends if each waits at every transfer and reduction until all have come there."""
    at = [0] * len(plan.ranks)
    arrived: dict[object, set[int]] = defaultdict(set)
    moved = True
    while moved:
        moved = False
        for rank, nodes in enumerate(plan.ranks):
            while at[rank] < len(nodes) and nodes[at[rank]].op not in (Op.SEND, Op.RECEIVE, Op.REDUCE):
                at[rank] += 1
            if at[rank] == len(nodes):
                continue
            node, needed = nodes[at[rank]], 2
            stage = node.stage + (0 if node.op is not Op.SEND else 1 if node.kind is Kind.F else -1)
            what: tuple[object, ...] = (node.pipe, stage, node.microbatch, node.kind)
            if node.op is Op.REDUCE:
                what, needed = (node.stage, node.block), len({rank_of(plan, p, node.stage) for p in pipes(plan)})
            arrived[what].add(rank)
            if len(arrived[what]) == needed:
                moved = True
                for other in arrived.pop(what):
                    at[other] += 1
    return all(position == len(nodes) for position, nodes in zip(at, plan.ranks, strict=True))


def pipes(plan: Plan) -> range:
    return range(len(plan.program.placement.pipes))
