"""Which nodes are one turn, and what each turn waits for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from overlap1f1b.plan import BlockShape, NodeCosts, Op, Overlap, Plan, StageShape, compile
from overlap1f1b.plan.turn import Plain, Turn, Way, turns_of
from overlap1f1b.schedule import Kind, build_schedule

DENSE, MOE = BlockShape(expert_calls=0), BlockShape(expert_calls=1)
COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=3, dense=2)


def planned(schedule: str, shape: StageShape, overlap: Overlap = "serial", *, ranks: int = 1) -> Plan:
    return compile(build_schedule(schedule, ranks=ranks, microbatches=4), shape, COSTS, overlap=overlap)


def said(turns: list[Turn]) -> list[str]:
    """Return a word for each turn of the first microbatch."""
    turns = [turn for turn in turns if turn.node.microbatch == 0]
    return [f"{turn.node.name}{'' if turn.stretch is None else list(turn.stretch[:2])}" for turn in turns]


def test_neighbours_are_one_turn_each_way() -> None:
    plan = planned("sequential", (DENSE, DENSE, MOE))
    turns = turns_of(plan.nodes, {0: Plain(frozenset((0, 1, 2)), whole=frozenset((2,)))})
    assert said(turns) == ["dense.f[0, 2]", "aggregate.b[0, 2]"]
    assert turns.undivided == {0}


def test_a_block_that_is_not_plain_is_played_by_its_nodes() -> None:
    plan = planned("sequential", (DENSE, DENSE, MOE, DENSE))
    turns = turns_of(plan.nodes, {0: Plain(frozenset((0, 1, 3)))})
    by_nodes = [f"{node.name}" for node in plan.nodes if node.microbatch == 0 and node.block == 2]
    forward, backward = ([name for name in by_nodes if name.endswith(".f") is f] for f in (True, False))
    assert said(turns) == ["dense.f[0, 1]", *forward, "dense.f[3, 3]", "dense.b[3, 3]", *backward, "dense.b[0, 1]"]
    assert not turns.undivided


def test_without_plain_blocks_each_node_is_a_turn() -> None:
    plan = planned("combined_1f1b", (DENSE, MOE), 3)
    assert [turn.node for turn in turns_of(plan.nodes)] == list(plan.nodes)


def test_weight_gradients_that_the_schedule_puts_elsewhere_are_deferred() -> None:
    turns = turns_of(planned("zb_h1", (DENSE, DENSE), ranks=2).ranks[1], {1: Plain(frozenset((0, 1)))})
    stretches = [turn.stretch for turn in turns if turn.stretch is not None and turn.node.name == "dense.f"]
    weights = [turn for turn in turns if turn.way is Way.WEIGHTS]
    assert sum(last - first + 1 for first, last, deferred in stretches if deferred) == len(weights) > 0
    assert not turns.undivided


def test_experts_whose_weight_gradients_are_elsewhere_are_no_stretch() -> None:
    plan = planned("zb_h1", (MOE,), ranks=2)
    turns = turns_of(plan.ranks[1], {1: Plain(frozenset((0,)), whole=frozenset((0,)))})
    assert any(turn.way is Way.WEIGHTS for turn in turns)
    assert all(turn.stretch is None for turn in turns)


def test_weight_gradients_behind_an_exchange_stay_there() -> None:
    """They hide it."""
    plan = planned("combined_1f1b", (MOE, DENSE), 2)
    turns = turns_of(plan.nodes, {0: Plain(frozenset((1,)))})
    nodes = [turn.node for turn in turns]
    assert [node for node in nodes if node.name == "dense.w"] == [
        node for before, node in pairwise(plan.nodes) if node.name == "dense.w" and before != node._replace(kind=Kind.I)
    ]


def test_blocks_that_share_parameters_are_in_one_stretch_or_in_none() -> None:
    plan = planned("sequential", (DENSE, MOE, DENSE))
    apart = turns_of(plan.nodes, {0: Plain(frozenset((0, 2)), sharing=frozenset((0, 2)))})
    assert all(turn.stretch is None for turn in apart)
    together = turns_of(plan.nodes, {0: Plain(frozenset((0, 1, 2)), sharing=frozenset((0, 2)))})
    assert together.undivided == {0}


def test_a_reduction_ends_a_stretch() -> None:
    shape = (DENSE._replace(reduced=True), DENSE._replace(reduced=True))
    turns = turns_of(planned("sequential", shape).nodes, {0: Plain(frozenset((0, 1)))})
    lasts = [turn.stretch for turn in turns if turn.stretch is not None and turn.node.microbatch == 3]
    assert [stretch[:2] for stretch in lasts] == [(0, 0), (1, 1), (1, 1), (0, 0)]


@pytest.mark.parametrize("overlap", ["serial", "pairs", 3])
def test_what_a_turn_waits_for(overlap: Overlap) -> None:
    """Experts wait for the rows of their own dispatch, all others for every exchange of their microbatch."""
    flying: dict[object, set[object]] = {}
    for turn in turns_of(planned("combined_1f1b", (MOE, MOE), overlap).nodes):
        there = flying.setdefault((turn.key, turn.node.kind), set())
        if turn.way is Way.EXCHANGE:
            there.add(turn.place)
        if turn.way <= Way.BACKWARD:
            assert set(turn.awaits) <= there
            there -= set(turn.awaits)
            assert not {place for place in there if place[0].value != "counts"}


def test_what_follows_an_exchange() -> None:
    """Of the same part: a forward goes to the next exchange, its last one to the backward, which comes back."""
    turns = turns_of(planned("combined_1f1b", (MOE._replace(parts=2), DENSE, MOE), 2).nodes)
    exchanges = [turn for turn in turns if turn.way is Way.EXCHANGE and turn.node.op is not Op.COUNTS]
    way: dict[object, list[str]] = {}
    for turn in exchanges:
        way.setdefault((turn.key, turn.node.part), []).append(f"{turn.node.name}[{turn.block}]")
    first = (
        "dispatch.f[0] combine.f[0] dispatch.f[2] combine.f[2] combine.b[2] dispatch.b[2] combine.b[0] dispatch.b[0]"
    )
    assert all(" ".join(names) == first for (_, part), names in way.items() if part == 0)
    of = {turn.tag: turn for turn in exchanges}
    assert len(of) == len(exchanges)
    for turn in exchanges:
        if (next_ := turn.following) is None:
            assert turn.node.kind is Kind.I
        else:
            assert (of[next_.tag].block, of[next_.tag].place) == (next_.block, next_.place)
            names = way[turn.key, turn.node.part]
            assert names.index(f"{of[next_.tag].node.name}[{next_.block}]") == 1 + names.index(
                f"{turn.node.name}[{turn.block}]"
            )
            counts = of[next_.tag].node._replace(op=Op.COUNTS).tag
            assert next_.counts == counts
