"""The rules of a plan, checked before anything runs."""

from __future__ import annotations

from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.clock import play_ranks
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import CONTRIBUTING, RECOMPUTES, Node, Op, Place, Resource, awaited_by
from overlap1f1b.plan.orders import sent_messages, uses_parameters
from overlap1f1b.plan.plan import Plan
from overlap1f1b.schedule import Kind


def check(plan: Plan) -> None:
    """Raise ``ValueError`` for the first broken rule, naming rank, position and node.

    Rules:

    - Every node of every action comes exactly once, on the rank of its stage, after the nodes that it needs there. Of
      the parts of a call the experts of each need the exchange of their own part.
    - Microbatches pass every node that sums gradients in the program's order, so that sums have a fixed order.
    - A reduction comes after the last contribution.
    - Parameters of a block that are gathered inside the step are there wherever the block computes.
    - Live microbatches and waiting weight gradients stay within the program's declared limits.
    - Of any two ranks, one receives in the order in which the other sends.
    - No ranks wait for each other. This covers buffered sends and sends that a lane holds until the receive is posted:
      a lane works beside the thread that issues nodes, and both of its ends have one order.
    """
    chains = Chains(plan.program.placement, plan.shapes)
    for rank, nodes in enumerate(plan.ranks):
        _check_rank(plan, rank, nodes, chains)
        _check_memory(plan, rank)
    _check_lanes(plan, chains)
    try:
        play_ranks(plan.ranks, plan.program.placement, NodeCosts())
    except ValueError as error:
        raise ValueError(f"plan of {plan.program.name!r}, {error}") from None


def _name(plan: Plan, rank: int) -> str:
    return f"plan of {plan.program.name!r}, rank {rank}"


def _check_memory(plan: Plan, rank: int) -> None:
    """Check both peaks. Activations live to the end of a B, or to the W of a backward that the program splits."""
    splits = plan.program.splits(rank)
    alive, limit = plan.held(rank) if splits else plan.live(rank), plan.program.peak_activations[rank]
    if alive > limit and not plan.program.forward_only:
        raise ValueError(f"{_name(plan, rank)}: {alive} microbatches alive, the program declares {limit}")
    if splits and plan.program.peak_weights:
        waiting, limit = plan.waiting(rank), plan.program.peak_weights[rank]
        if waiting > limit:
            raise ValueError(f"{_name(plan, rank)}: {waiting} weight gradients wait, the program declares {limit}")


def _check_rank(plan: Plan, rank: int, nodes: tuple[Node, ...], chains: Chains) -> None:
    needs = _needs(plan, rank, chains)
    done: set[Node] = set()
    stages = {stage for _, stage in plan.program.placement.places(rank)}
    sharded = {(s, b) for s in stages for b, shape in enumerate(chains.shapes[s]) if shape.gathered}
    there: set[tuple[int, int]] = set()  # blocks whose parameters are gathered
    for position, node in enumerate(nodes):
        place = node.stage, node.block
        if node.op in (Op.GATHER, Op.RELEASE) and place in sharded and (place in there) == (node.op is Op.RELEASE):
            there ^= {place}
            continue
        before = needs.get(node)
        if node in done or before is None:
            fault = "comes a second time" if node in done else "belongs to no action of the program on this rank"
            raise ValueError(f"{_name(plan, rank)}, position {position}: {node} {fault}")
        if place not in there and uses_parameters(node, chains):
            raise ValueError(f"{_name(plan, rank)}, position {position}: {node} comes where nothing has gathered it")
        for needed in before:
            if needed not in done:
                raise ValueError(
                    f"{_name(plan, rank)}, position {position}: {node} comes before {needed}, which it needs"
                )
        done.add(node)
    missing = next((node for node in needs if node not in done), None)
    if missing is not None:
        raise ValueError(f"{_name(plan, rank)}: {missing} is missing")


def _needs(plan: Plan, rank: int, chains: Chains) -> dict[Node, list[Node]]:
    """Return, for every node of a rank's step, the nodes of the rank that must stand before it."""
    needs: dict[Node, list[Node]] = {}
    previous: dict[
        tuple[object, ...], Node
    ] = {}  # for nodes that sum gradients, the same node of the previous microbatch
    reductions: dict[Node, list[Node]] = {}
    for action in plan.program.actions(rank):
        last = [chains.of(needed)[-1] for needed in chains.local_needs(action)] if action.kind is not Kind.W else []
        sent: dict[Place, Node] = {}  # exchanges behind the last sub-op that waited for all
        for node in chains.of(action):
            if node.op is Op.RECEIVE:  # posted at any time
                needs[node] = []
                last.append(node)
                continue
            if node.op in RECOMPUTES:  # needs no gradient, which may still travel
                coming = [other for other in last if other.op is Op.RECEIVE]
                needs[node] = [other for other in last if other not in coming] + _exchanges_before(node, sent)
                last = [*coming, node]
            elif action.kind is not Kind.W:
                needs[node] = last + _exchanges_before(node, sent)
                last = _behind(node, last, sent)
            if node.kind is Kind.F or node.op is Op.SEND:
                continue
            for entry in chains.with_weights(action, (node,)):
                if entry not in needs:  # a weight gradient
                    needs[entry] = [node if action.kind is Kind.B else entry._replace(kind=Kind.I)]
                place = entry._replace(part=0) if entry.op is Op.EXPERTS else entry
                key = place[:2] + place[3:]  # without its microbatch
                if key in previous:  # of the part before, or of the last part of the microbatch before
                    needs[entry].append(previous[key])
                previous[key] = entry
                if node.op in CONTRIBUTING and chains.shapes[node.stage][node.block].reduced:
                    reduction = node._replace(op=Op.REDUCE, kind=Kind.W, microbatch=-1, call=0, part=0)
                    reductions.setdefault(reduction, []).append(entry)
    at = {node: position for position, node in enumerate(plan.ranks[rank])}
    for reduction, contributions in reductions.items():  # it has the microbatch of the last one in the plan's order
        last_one = max(contributions, key=lambda node: at.get(node, -1))
        needs[reduction._replace(microbatch=last_one.microbatch)] = contributions
    return needs


def _exchanges_before(node: Node, sent: dict[Place, Node]) -> list[Node]:
    """Return the exchange behind which a node stands: the last one, or of the experts of a part that of the part."""
    one = awaited_by(node)
    found = sent[one] if one in sent else next(reversed(sent.values()), None)
    return [] if found is None else [found]


def _behind(node: Node, last: list[Node], sent: dict[Place, Node]) -> list[Node]:
    """Return the nodes that the next node of an action needs beside its exchange, and keep ``sent``."""
    if node.resource in (Resource.EXCHANGE, Resource.CONTROL):
        sent[node.place] = node
        return last
    if awaited_by(node) not in sent:
        sent.clear()
    return [node]


def _check_lanes(plan: Plan, chains: Chains) -> None:
    expected = {lane: iter(messages) for lane, messages in sent_messages(plan.ranks, chains).items()}
    for rank, nodes in enumerate(plan.ranks):
        for position, node in enumerate(nodes):
            if node.op is not Op.RECEIVE:
                continue
            source = chains.peer(node)
            first = next(expected[source, rank])
            if node != first:
                raise ValueError(
                    f"{_name(plan, rank)}, position {position}: {node} comes where rank {source} sends the message of "
                    f"{first}; allowed: the same order on both"
                )
