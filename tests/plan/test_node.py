"""Nodes: names, lanes, and the chains of an action."""

from __future__ import annotations

import pytest

from overlap1f1b.plan import (
    RECOMPUTES,
    BlockShape,
    Chains,
    Node,
    Op,
    Recompute,
    Resource,
    parse_recompute,
)
from overlap1f1b.schedule import Action, Kind, Placement
from tests.plan.cases import DENSE, MOE, chains_of


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (Node(Op.EXPERTS, Kind.W, microbatch=3, block=1), "experts.w[1] m3"),
        (Node(Op.DISPATCH, Kind.I, microbatch=0, block=2, call=1), "dispatch.b[2.1] m0"),
        (Node(Op.DISPATCH, Kind.I, microbatch=0, block=2, part=1), "dispatch.b[2.0.1] m0"),
        (Node(Op.ATTENTION, Kind.F, microbatch=10, block=0), "attention.f[0] m10"),
        (Node(Op.REDUCE, Kind.W, microbatch=7, block=0), "reduce.w[0] m7"),
    ],
)
def test_text(node: Node, text: str) -> None:
    assert str(node) == text


def test_lanes() -> None:
    lanes = {op: Node(op, Kind.F, 0, 0).resource for op in Op}
    assert {op for op, lane in lanes.items() if lane is Resource.EXCHANGE} == {
        Op.DISPATCH,
        Op.COMBINE,
        Op.REDUCE,
        Op.GATHER,
    }
    assert {op for op, lane in lanes.items() if lane is Resource.CONTROL} == {Op.COUNTS, Op.RELEASE}
    assert {op for op, lane in lanes.items() if lane is Resource.COMPUTE} == {
        Op.DENSE,
        Op.ATTENTION,
        Op.EXPERTS,
        Op.AGGREGATE,
        *RECOMPUTES,
    }


def test_chains_of_dense_and_expert_blocks() -> None:
    shape = (DENSE, MOE, BlockShape(expert_calls=2))
    forward = [str(node) for node in chains_of(shape).of(Action(Kind.F, 0, 4))]
    assert " ".join(forward).replace(" m4", "") == (
        "dense.f[0] attention.f[1] counts.f[1] dispatch.f[1] experts.f[1] combine.f[1] aggregate.f[1] "
        "attention.f[2] counts.f[2] dispatch.f[2] experts.f[2] combine.f[2] aggregate.f[2] "
        "counts.f[2.1] dispatch.f[2.1] experts.f[2.1] combine.f[2.1] aggregate.f[2.1]"
    )
    backward = [str(node) for node in chains_of(shape).of(Action(Kind.B, 0, 4))]
    assert " ".join(backward).replace(" m4", "") == (
        "aggregate.b[2.1] combine.b[2.1] experts.b[2.1] dispatch.b[2.1] "
        "aggregate.b[2] combine.b[2] experts.b[2] dispatch.b[2] attention.b[2] "
        "aggregate.b[1] combine.b[1] experts.b[1] dispatch.b[1] attention.b[1] dense.b[0]"
    )


@pytest.mark.parametrize(
    ("mode", "chain"),
    [
        ("none", "aggregate.b[1] combine.b[1] experts.b[1] dispatch.b[1] attention.b[1] dense.b[0]"),
        (
            "experts",
            "aggregate.b[1] combine.b[1] recompute_experts.b[1] experts.b[1] dispatch.b[1] attention.b[1] dense.b[0]",
        ),
        (
            "attention",
            "recompute_attention.b[1] aggregate.b[1] combine.b[1] experts.b[1] dispatch.b[1] attention.b[1] "
            "recompute_dense.b[0] dense.b[0]",
        ),
        (
            "block",
            "recompute_attention.b[1] aggregate.b[1] combine.b[1] recompute_experts.b[1] experts.b[1] dispatch.b[1] "
            "attention.b[1] recompute_dense.b[0] dense.b[0]",
        ),
    ],
)
def test_what_is_dropped_is_computed_again_where_it_is_needed_first(mode: Recompute, chain: str) -> None:
    shape = (DENSE._replace(recompute=mode), MOE._replace(recompute=mode))
    backward = [str(node) for node in chains_of(shape).of(Action(Kind.B, 0, 4))]
    assert " ".join(backward).replace(" m4", "") == chain
    exchanges = [node for node in chains_of(shape).of(Action(Kind.B, 0, 4)) if node.resource is Resource.EXCHANGE]
    assert [node.op for node in exchanges] == [Op.COMBINE, Op.DISPATCH]


def test_of_several_calls_all_are_computed_again_at_once_but_each_ones_experts_apart() -> None:
    shape = (BlockShape(expert_calls=2, recompute="block"),)
    ops = [node.op for node in chains_of(shape).of(Action(Kind.B, 0, 4))]
    assert ops.count(Op.RECOMPUTE_ATTENTION) == 1
    assert ops.index(Op.RECOMPUTE_ATTENTION) == 0
    assert ops.count(Op.RECOMPUTE_EXPERTS) == 2


def test_chains_carry_stage_and_pipe() -> None:
    chains = Chains(Placement.bidirectional(4), (MOE, DENSE))
    for kind in (Kind.F, Kind.B):
        assert {node[-2:] for node in chains.of(Action(kind, 3, 0, pipe=1))} == {(3, 1)}


def test_weight_nodes_hang_off_experts_and_off_what_is_split() -> None:
    shape = (DENSE, BlockShape(0, split=False), BlockShape(2), BlockShape(1, split=False))
    action = Action(Kind.B, 0, 0)
    chains = chains_of(shape)
    weights = [str(w) for node in chains.of(action) if (w := chains.weight(node))]
    assert weights == [
        "experts.w[3] m0",
        "aggregate.w[2.1] m0",
        "experts.w[2.1] m0",
        "aggregate.w[2] m0",
        "experts.w[2] m0",
        "attention.w[2] m0",
        "dense.w[0] m0",
    ]
    assert not any(map(chains.weight, chains.of(action._replace(kind=Kind.F))))


def test_tags_tell_exchanges_apart() -> None:
    shape = (MOE,) * 3 + (BlockShape(expert_calls=4), BlockShape(expert_calls=2, parts=8))
    nodes = [
        node
        for microbatch in range(5)
        for stage in (0, 1, 16, 255)
        for kind in (Kind.F, Kind.B)
        for node in Chains(Placement.loop(1, 256), shape).of(Action(kind, stage, microbatch))
        if node.resource in (Resource.EXCHANGE, Resource.CONTROL)
    ]
    assert len({node.tag for node in nodes}) == len(nodes)
    assert all(0 <= node.tag < 2**31 for node in nodes)
    assert Node(Op.COMBINE, Kind.F, microbatch=2047, block=4095, call=15, part=7, stage=999).tag < 2**31


def test_modes_drop_what_they_name() -> None:
    ops = (Op.DENSE, Op.ATTENTION, Op.EXPERTS)
    dropped = {
        mode: [op.value for op in ops if BlockShape(1, recompute=parse_recompute(mode)).drops(op)]
        for mode in ("none", "experts", "attention", "block")
    }
    assert dropped == {
        "none": [],
        "experts": ["experts"],
        "attention": ["dense", "attention"],
        "block": ["dense", "attention", "experts"],
    }


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^recompute='full'; allowed: none, experts, attention, block$"):
        parse_recompute("full")
    with pytest.raises(ValueError, match=r"^recompute='full'; allowed"):
        Chains(Placement.loop(1), (BlockShape(1, recompute="full"),))  # type: ignore[arg-type]
