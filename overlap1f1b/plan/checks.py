"""The rules that a plan keeps, checked before anything runs."""

from __future__ import annotations

from overlap1f1b.plan.node import Node, Op, backward_chain, forward_chain, weight_node
from overlap1f1b.plan.plan import Plan
from overlap1f1b.schedule import Kind


def check(plan: Plan) -> None:
    """Raises ``ValueError`` for the first broken rule, naming position and node.

    Rules: every node of every action exactly once; each after what it needs; microbatches pass every node that sums
    gradients in the program's order, so that sums keep theirs; reductions after the last contribution; live
    microbatches within what the program declares.
    """
    needs = _needs(plan)
    done: set[Node] = set()
    for position, node in enumerate(plan.nodes):
        where = f"plan of {plan.program.name!r}, position {position}"
        if node in done:
            raise ValueError(f"{where}: {node} stands a second time")
        if node not in needs:
            raise ValueError(f"{where}: {node} belongs to no action of the program")
        for needed in needs[node]:
            if needed not in done:
                raise ValueError(f"{where}: {node} stands before {needed}, which it needs")
        done.add(node)
    missing = next((node for node in needs if node not in done), None)
    if missing is not None:
        raise ValueError(f"plan of {plan.program.name!r}: {missing} is missing")
    limit = plan.program.peak_activations[0]
    if plan.peak_activations > limit and not plan.program.forward_only:
        raise ValueError(
            f"plan of {plan.program.name!r}: {plan.peak_activations} microbatches alive, the program declares {limit}"
        )


def _needs(plan: Plan) -> dict[Node, list[Node]]:
    """For every node of the step the nodes that must stand before it."""
    needs: dict[Node, list[Node]] = {}
    previous: dict[tuple[object, ...], Node] = {}  # the node of the microbatch before, for nodes that sum gradients
    reductions: dict[Node, list[Node]] = {}
    for action in plan.program.actions(0):
        forward = action.kind is Kind.F
        last = None if forward else list(forward_chain(action, plan.shape))[-1]
        for node in (forward_chain if forward else backward_chain)(action, plan.shape):
            needs[node] = [last] if last else []
            last = node
            if forward:
                continue
            summing = [node, weight] if (weight := weight_node(node, plan.shape)) else [node]
            for entry in summing:
                needs.setdefault(entry, [node])
                key = (entry.op, entry.kind, entry.block, entry.seam, entry.stage, entry.pipe)
                if key in previous:
                    needs[entry].append(previous[key])
                previous[key] = entry
            if node.op in (Op.ATTENTION, Op.DENSE) and plan.shape[node.block].reduced:
                reduction = node._replace(op=Op.REDUCE, kind=Kind.W, microbatch=-1)
                reductions.setdefault(reduction, []).extend(summing)
    for reduction, contributions in reductions.items():
        needs[reduction._replace(microbatch=contributions[-1].microbatch)] = contributions
    return needs
