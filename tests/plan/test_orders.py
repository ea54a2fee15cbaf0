"""The two fixed orders against their pictures."""

from collections.abc import Iterable
from itertools import accumulate
from math import inf
from textwrap import dedent
from unittest.mock import patch

import pytest

from overlap1f1b.plan import BlockShape, Node, NodeCosts, Op, Overlap, Resource, Span, compile
from overlap1f1b.plan.orders import pairs, serial, with_gathers, with_reductions
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.simulation import play_nodes
from tests.plan.cases import DENSE, MOE, chains_of, play, with_nodes
from tests.plan.rules import broken_rules
from tests.plan.tries import all_tries
from tests.programs import combined_1f1b, sequential

# Unit times; what the picture of Megatron-Core's merged step shows over two columns takes two.
COSTS = NodeCosts(
    {(op, kind): 1.0 for op in (Op.ATTENTION, Op.EXPERTS, Op.DENSE) for kind in (Kind.F, Kind.I, Kind.W)}
    | {(Op.DISPATCH, Kind.F): 1.0, (Op.COMBINE, Kind.F): 2.0, (Op.COMBINE, Kind.I): 1.0, (Op.DISPATCH, Kind.I): 2.0}
)


def drawn(spans: Iterable[Span]) -> list[str]:
    """Exchange and compute lane side by side, time running down.

    ::

        combine.b0 m0  | attention.f0 m1
        dispatch.f0 m1 | experts.b0 m0
        …              | experts.w0 m0

    Names stand at their start and go on as ``…``; nodes that take no time are left out.
    """
    spans = [span for span in spans if span.end > span.start]
    first, last = round(min(span.start for span in spans)), round(max(span.end for span in spans))
    columns: dict[Resource, list[str]] = {lane: [""] * (last - first) for lane in (Resource.EXCHANGE, Resource.COMPUTE)}
    for span in spans:
        column, start = columns[span.node.resource], round(span.start) - first
        for line in range(start, round(span.end) - first):
            assert not column[line], f"two nodes at once on the {span.node.resource.value} lane"
            column[line] = "…"
        column[start] = f"{span.node.name}{span.node.block} m{span.node.microbatch}"
    width = max(map(len, columns[Resource.EXCHANGE]))
    return [f"{a:{width}} | {b}".rstrip() for a, b in zip(*columns.values(), strict=True)]


def lines(picture: str) -> list[str]:
    """The lines of an indented picture."""
    return [line.rstrip() for line in dedent(picture).split("\n") if line.strip()]


def the_pair(*shape: BlockShape) -> list[Node]:
    """The nodes of ``B0‖F1`` in ``F0 B0‖F1 B1``."""
    nodes = pairs(combined_1f1b(2, 0).ranks[0], chains_of(shape))
    return [node for node in nodes if (node.microbatch == 1) == (node.kind is Kind.F)]


def picture(*shape: BlockShape) -> list[str]:
    """The lanes of the pair."""
    pair = the_pair(*shape)
    spans = play(tuple(pairs(combined_1f1b(2, 0).ranks[0], chains_of(shape))), COSTS)
    return drawn(span for span in spans if span.node in pair)


def test_pair_is_megatrons_merged_step() -> None:
    assert picture(MOE, MOE) == lines("""
        combine.b1 m0  | attention.f0 m1
        dispatch.f0 m1 | experts.b1 m0
        dispatch.b1 m0 | experts.w1 m0
        …              | experts.f0 m1
        combine.f0 m1  | attention.b1 m0
        …              | attention.w1 m0
        combine.b0 m0  | attention.f1 m1
        dispatch.f1 m1 | experts.b0 m0
        dispatch.b0 m0 | experts.w0 m0
        …              | experts.f1 m1
        combine.f1 m1  | attention.b0 m0
        …              | attention.w0 m0
    """)


def test_pair_of_one_layer_names_every_node() -> None:
    assert " ".join(node.name for node in the_pair(MOE)) == (
        "aggregate.b combine.b attention.f counts.f dispatch.f experts.b dispatch.b experts.w experts.f combine.f "
        "attention.b attention.w aggregate.f"
    )


def test_outside_pairs_nothing_is_interleaved() -> None:
    program, shape = combined_1f1b(4, extra_warmup=1), (MOE, DENSE)
    alone = [action for action in program.actions(0) if str(action) in ("0F0", "0F1", "0B2", "0B3")]
    expected = list(serial(alone, chains_of(shape)))
    assert [node for node in pairs(program.ranks[0], chains_of(shape)) if node in expected] == expected


def test_dense_blocks_go_with_the_layer_beside_them() -> None:
    assert picture(DENSE, MOE, DENSE, MOE) == lines("""
        combine.b3 m0  | dense.f0 m1
                       | attention.f1 m1
        dispatch.f1 m1 | experts.b3 m0
        dispatch.b3 m0 | experts.w3 m0
        …              | experts.f1 m1
        combine.f1 m1  | attention.b3 m0
        …              | attention.w3 m0
                       | dense.b2 m0
                       | dense.w2 m0
        combine.b1 m0  | dense.f2 m1
                       | attention.f3 m1
        dispatch.f3 m1 | experts.b1 m0
        dispatch.b1 m0 | experts.w1 m0
        …              | experts.f3 m1
        combine.f3 m1  | attention.b1 m0
        …              | attention.w1 m0
                       | dense.b0 m0
                       | dense.w0 m0
    """)


def test_layers_are_counted_by_call() -> None:
    pair = the_pair(BlockShape(expert_calls=2))
    rows = [f"{node.name} {node.call}" for node in pair if node.op in (Op.COMBINE, Op.DISPATCH)]
    assert ", ".join(rows) == (
        "combine.b 1, dispatch.f 0, dispatch.b 1, combine.f 0, combine.b 0, dispatch.f 1, dispatch.b 0, combine.f 1"
    )


def test_a_stage_without_experts_pairs_backward_then_forward() -> None:
    assert " ".join(f"{node.name}{node.block}" for node in the_pair(DENSE, DENSE)) == (
        "dense.b1 dense.w1 dense.b0 dense.w0 dense.f0 dense.f1"
    )


def test_reductions_follow_the_last_contribution() -> None:
    shape = (BlockShape(0, reduced=True), BlockShape(1), BlockShape(1, split=False, reduced=True))
    nodes = list(with_reductions(serial(sequential(2).actions(0), chains_of(shape)), chains_of(shape)))
    text = [f"{node.name}{node.block} m{node.microbatch}" for node in nodes]
    assert [name for name in text if name.startswith("reduce")] == ["reduce.w2 m1", "reduce.w0 m1"]
    assert text[text.index("reduce.w2 m1") - 1] == "attention.b2 m1"  # its weight gradients are not apart
    assert text[text.index("reduce.w0 m1") - 1] == "dense.w0 m1"
    assert [node for node in nodes if node.op is not Op.REDUCE] == list(
        serial(sequential(2).actions(0), chains_of(shape))
    )


GATHERS = (Op.GATHER, Op.RELEASE)


def _at_once(nodes: Iterable[Node]) -> list[int]:
    return list(accumulate((node.op is Op.GATHER) - (node.op is Op.RELEASE) for node in nodes))


@pytest.mark.parametrize("overlap", ["serial", "pairs", 3])
@pytest.mark.parametrize("room", [1, 2, 3, inf])
def test_gathers_leave_the_order_and_keep_within_their_room(overlap: Overlap, room: float) -> None:
    shape = tuple(BlockShape(number % 2, gathered=number != 1) for number in range(5))
    plan = compile(build_schedule("combined_1f1b", microbatches=4, extra_warmup=1), shape, COSTS, overlap)
    nodes = [node for node in plan.nodes if node.op not in GATHERS]
    gathered = with_gathers(nodes, chains_of(shape), room)
    assert [node for node in gathered if node.op not in GATHERS] == nodes
    assert (max(_at_once(gathered)), _at_once(gathered)[-1]) == (min(room, 4), 0)
    assert [node.op for node in gathered].count(Op.GATHER) == 4 or room < 4
    assert not list(broken_rules(with_nodes(plan, gathered)))
    at = next(at for at, node in enumerate(gathered) if node.op is Op.GATHER)
    for wrong in (gathered[:at] + gathered[at + 1 :], gathered[:at] + gathered[at : at + 1] + gathered[at:]):
        assert list(broken_rules(with_nodes(plan, wrong)))


@pytest.mark.parametrize(
    ("exchange", "gather", "longer"), [(5, 14.8, 1.02), pytest.param(0, 7.6, 1.04, marks=pytest.mark.wide)]
)
def test_gathers_of_two_blocks_at_a_time_are_hidden(exchange: float, gather: float, longer: float) -> None:
    """All gathers together take half as long as all compute, and the step hardly longer than without them."""
    program, blocks = build_schedule("combined_1f1b", microbatches=8, extra_warmup=0), 6
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=exchange, gather=gather)
    with all_tries(), patch("overlap1f1b.plan.compiler.GATHERED", (2.0,)):
        plain = compile(program, (BlockShape(1),) * blocks, costs, 3)
        plan = compile(program, (BlockShape(1, gathered=True),) * blocks, costs, 3)
    assert plan.gathered(0) == 2
    timeline = play_nodes(plan, costs)
    figures = timeline.ranks[0].by_exchange()["gather.w"]
    assert figures.exchange == pytest.approx(0.5 * timeline.busy(0), rel=0.05)
    assert figures.hidden_fraction >= 0.8
    assert plan.predicted <= longer * plain.predicted
