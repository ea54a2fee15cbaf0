"""Plans in which the tokens of a call of experts travel in parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from overlap1f1b.plan import BlockShape, Node, NodeCosts, Op, Overlap, bound, compile, play_ranks, with_rendezvous
from overlap1f1b.schedule import SCHEDULES, Kind, build_schedule
from overlap1f1b.schedule.placement import SINGLE
from tests.plan.rules import broken_rules, meets

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5.25, counts=0.3, aggregate=0.2, reduce=1, send=1)


def _shape(parts: int, expert_calls: int = 1, **more: object) -> tuple[BlockShape, ...]:
    return (
        BlockShape(expert_calls=0, reduced=True),
        BlockShape(expert_calls=expert_calls, parts=parts, reduced=True, **more),
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", ["serial", "pairs", 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_keeps_the_rules(name: str, overlap: Overlap) -> None:
    """One of two stages, and whether the host waits for counts, in turns over the schedules."""
    number, chunks = SCHEDULES.index(name), 2 if name == "interleaved_1f1b" else None
    program = build_schedule(name, ranks=2, microbatches=4, chunks=chunks)
    shape = (_shape(2), _shape(3, expert_calls=2, recompute="block"))[number // 2 % 2]
    counts_block = number % 2 == 1
    plan = compile(program, shape, COSTS.in_parts(2), overlap, counts_block=counts_block)
    assert not list(broken_rules(plan))
    assert bound(program, shape, COSTS.in_parts(2), overlap) <= plan.predicted * (1 + 1e-12)
    met = with_rendezvous(plan, COSTS, counts_block=counts_block)
    assert not list(broken_rules(met))
    assert meets(met)


def test_experts_wait_for_their_own_part() -> None:
    program = build_schedule("sequential", microbatches=1)
    plan = compile(program, (BlockShape(expert_calls=1, parts=3),), COSTS.in_parts(3), 1)
    (spans,) = play_ranks(plan.ranks, SINGLE, COSTS.in_parts(3))
    at = {(span.node.op, span.node.kind, span.node.part): span for span in spans}
    for kind, exchange, order in ((Kind.F, Op.DISPATCH, (0, 1, 2)), (Kind.I, Op.COMBINE, (2, 1, 0))):
        for first, second in pairwise(order):
            assert at[Op.EXPERTS, kind, first].start >= at[exchange, kind, first].end
            assert at[Op.EXPERTS, kind, first].start < at[exchange, kind, second].end
    assert at[Op.AGGREGATE, Kind.F, 0].start >= at[Op.COMBINE, Kind.F, 2].end
    assert at[Op.ATTENTION, Kind.I, 0].start >= at[Op.DISPATCH, Kind.I, 0].end


def test_parts_that_mix_microbatches_are_refused() -> None:
    program = build_schedule("sequential", microbatches=2)
    plan = compile(program, (BlockShape(expert_calls=1, parts=2),), COSTS.in_parts(2), "serial")
    late = Node(Op.EXPERTS, Kind.I, microbatch=0, block=0, part=0)  # the last part of microbatch 0
    nodes = list(plan.nodes)
    place = nodes.index(late)
    behind = [node for node in nodes[place:] if node.microbatch == 0]
    # Everything of microbatch 0 from there on comes behind the other part of microbatch 1.
    at = nodes.index(Node(Op.EXPERTS, Kind.I, microbatch=1, block=0, part=1))
    mixed = [node for node in nodes[: at + 1] if node not in behind] + behind + nodes[at + 1 :]
    assert sorted(mixed) == sorted(nodes)
    assert any("out of the program's order" in rule for rule in broken_rules(replace(plan, ranks=(tuple(mixed),))))


def test_costs_are_shared_by_the_parts() -> None:
    shared = {(Op.DISPATCH, Kind.F): 4, (Op.EXPERTS, Kind.I): 4, (Op.EXPERTS, Kind.W): 1, (Op.ATTENTION, Kind.F): 1}
    parts = COSTS.in_parts(4)
    assert all(parts.by_op[place] == COSTS.by_op[place] / share for place, share in shared.items())
