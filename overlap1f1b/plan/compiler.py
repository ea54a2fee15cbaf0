"""The compiler: from a program to the fastest known plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from overlap1f1b.plan.chains import Chains, Shapes
from overlap1f1b.plan.clock import play_ranks
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import Node
from overlap1f1b.plan.offload import leaving
from overlap1f1b.plan.orders import pairs, receiving_in_order, serial, with_gathers, with_reductions
from overlap1f1b.plan.plan import Overlap, Plan, parse_overlap
from overlap1f1b.plan.scheduler import Policy, schedule_ranks
from overlap1f1b.schedule import Program
from overlap1f1b.schedule.values import checked

LARGE = 20_000
"""Number of nodes in a step beyond which fewer variants are tried."""

PATIENCES = (0.0, 0.2, 0.4, 0.6)
"""Tried values of ``Policy.patience``: how long a wait must be, relative to a weight gradient, to issue it there."""

DEFERRED = (1, 2)
"""Tried values of ``Policy.deferred``: microbatches beyond the live ones that wait for weight gradients alone."""

GATHERED = (2.0, 3.0, 4.0, math.inf)
"""Tried numbers of blocks whose sharded parameters are there at once; without a bound each is gathered once a step."""

RETRIED = 6
"""One of so many policies, the best, is tried once more for a host whose launches cost time."""


@checked
def compile(program: Program, shape: Shapes, costs: NodeCosts, overlap: Overlap, *, counts_block: bool = False) -> Plan:
    """Return the plan of a program: the order of every node on every rank.

    For a number k, the compiler builds the fixed orders and an order for every number of open actions up to k, plays
    each with the costs, and keeps the fastest: list scheduling is greedy, and a smaller k is sometimes better. Each
    number is tried with all of ``PATIENCES`` and ``DEFERRED``; for large programs with the first of each. If the host
    waits for counts and launches cost time, the best are tried once more, with these waits behind queued work.

    >>> from overlap1f1b.plan import BlockShape
    >>> from overlap1f1b.schedule import build_schedule
    >>> program = build_schedule("combined_1f1b", microbatches=8)
    >>> costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5)
    >>> [compile(program, (BlockShape(expert_calls=1),) * 4, costs, k).predicted for k in ("serial", "pairs", 3)]
    [1312.0, 880.0, 701.0]

    Args:
        program: A checked program, on any number of ranks.
        shape: Blocks of every stage, or a sequence with the blocks of each stage.
        costs: Costs of the nodes.
        overlap: ``"serial"``, ``"pairs"`` or k.
        counts_block: Whether the host waits for counts, as on a GPU.

    Raises:
        ValueError: The program breaks a rule, the overlap is unknown, the shapes are of another number of stages, a
            stage has no blocks, or the costs are of the wrong kind.
    """
    return fastest(program, shape, costs, overlap, counts_block=counts_block)[0]


def fastest(
    program: Program,
    shape: Shapes,
    costs: NodeCosts,
    overlap: Overlap,
    *,
    counts_block: bool = False,
    rooms: Sequence[float] = (),
    every: bool = True,
    progress: Callable[[float], None] = lambda _: None,
) -> list[Plan]:
    """Return the fastest plan of each order that :func:`compile` tries, the fastest of all first.

    ``rooms`` are the bytes that each pipeline rank may hold beyond those before the step: plans that would hold more
    are left out. Where blocks' activations may leave to host memory, ``every`` says whether all of them do, or those
    that have to. ``progress`` is called between two tries, and may end them by an error.
    """
    overlap = parse_overlap(overlap)
    program.check()
    chains = Chains(program.placement, shape)
    leaves = any(block.offload for blocks in chains.shapes for block in blocks)
    gathers = any(block.gathered for blocks in chains.shapes for block in blocks)

    def played(order: str, candidate: Sequence[list[Node]]) -> Iterator[Plan]:
        ranks = [with_reductions(rank, chains) for rank in candidate]
        for at_once in GATHERED if gathers else GATHERED[-1:]:
            nodes = tuple(tuple(with_gathers(rank, chains, at_once)) for rank in ranks)
            if costs.launch:  # then a receive takes time of the host, so its place counts
                nodes = receiving_in_order(nodes, chains)
            spans = play_ranks(nodes, program.placement, costs, counts_block=counts_block)
            end = max((span.end for rank in spans for span in rank), default=0.0)
            yield Plan(program, overlap, order, chains.shapes, nodes, end, costs.peak_bytes(nodes))

    def plans() -> Iterator[Plan]:
        ends: list[tuple[float, Policy]] = []
        for order, policy, candidate in _candidates(program, chains, costs, overlap, counts_block):
            progress(0.0)
            found = list(played(order, candidate))
            if policy is not None:
                ends.append((min(plan.predicted for plan in found), policy))
            yield from found
        if counts_block and costs.launch:
            for _, policy in sorted(ends)[: -(-len(ends) // RETRIED)]:
                yield from played(f"k={policy.open_actions}", schedule_ranks(program, chains, costs, policy))

    best, found = dict[str, Plan](), plans()
    if leaves:
        found = iter(leaving(found, costs, rooms, every=every, counts_block=counts_block))
    for plan in filter(lambda plan: plan.fits(rooms), found):
        if plan.order not in best or plan.predicted < best[plan.order].predicted:
            best[plan.order] = plan
    ordered = sorted(best.values(), key=lambda plan: plan.predicted)
    return [replace(plan, ranks=receiving_in_order(plan.ranks, chains)) for plan in ordered]


def _candidates(
    program: Program, chains: Chains, costs: NodeCosts, overlap: Overlap, counts_block: bool
) -> Iterator[tuple[str, Policy | None, list[list[Node]]]]:
    """Yield orders for a host that is always ahead, each with its name and policy."""
    ranks = range(len(program.ranks))
    if overlap != "pairs":
        yield "serial", None, [list(serial(program.actions(rank), chains)) for rank in ranks]
    if overlap != "serial":
        yield "pairs", None, [list(pairs(program.ranks[rank], chains)) for rank in ranks]
    if isinstance(overlap, int):
        free = replace(costs, launch={})
        nodes = sum(len(chains.of(action)) for rank in ranks for action in program.actions(rank))
        tries = list(product(DEFERRED, PATIENCES)) if nodes <= LARGE else [(DEFERRED[0], PATIENCES[0])]
        most = min(overlap, max(len(list(program.actions(rank))) for rank in ranks))  # more actions cannot be open
        for k, (deferred, patience) in product(range(1, most + 1), tries):
            policy = Policy(k, counts_block, deferred, patience)
            yield f"k={k}", policy, schedule_ranks(program, chains, free, policy)
