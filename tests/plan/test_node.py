"""Nodes: names, lanes, and the chains of an action."""

import pytest

from overlap1f1b.plan import RECOMPUTES, BlockShape, Chains, Node, Op, Resource, parse_recompute
from overlap1f1b.schedule import Action, Kind, Placement
from tests.plan.cases import DENSE, MOE, chains_of


def test_lanes() -> None:
    lanes = {lane: {op for op in Op if Node(op, Kind.F, 0, 0).resource is lane} for lane in Resource}
    assert lanes[Resource.EXCHANGE] == {Op.DISPATCH, Op.COMBINE, Op.REDUCE, Op.GATHER}
    assert lanes[Resource.CONTROL] == {Op.COUNTS, Op.RELEASE}
    assert lanes[Resource.COMPUTE] == {Op.DENSE, Op.ATTENTION, Op.EXPERTS, Op.AGGREGATE, *RECOMPUTES}


def chain(kind: Kind, *shape: BlockShape) -> str:
    """The nodes of an action in words, without their microbatch."""
    return " ".join(map(str, chains_of(shape).of(Action(kind, 0, 4)))).replace(" m4", "")


def test_chains_of_dense_and_expert_blocks() -> None:
    shape = (DENSE, MOE, BlockShape(expert_calls=2))
    assert chain(Kind.F, *shape) == (
        "dense.f[0] attention.f[1] counts.f[1] dispatch.f[1] experts.f[1] combine.f[1] aggregate.f[1] "
        "attention.f[2] counts.f[2] dispatch.f[2] experts.f[2] combine.f[2] aggregate.f[2] "
        "counts.f[2.1] dispatch.f[2.1] experts.f[2.1] combine.f[2.1] aggregate.f[2.1]"
    )
    assert chain(Kind.B, *shape) == (
        "aggregate.b[2.1] combine.b[2.1] experts.b[2.1] dispatch.b[2.1] "
        "aggregate.b[2] combine.b[2] experts.b[2] dispatch.b[2] attention.b[2] "
        "aggregate.b[1] combine.b[1] experts.b[1] dispatch.b[1] attention.b[1] dense.b[0]"
    )


def test_what_is_dropped_is_computed_again_where_it_is_needed_first() -> None:
    """Of several calls all but the experts at once."""
    dense, moe = DENSE._replace(recompute="block"), BlockShape(expert_calls=2, recompute="block")
    assert chain(Kind.B, dense, moe) == (
        "recompute_attention.b[1] aggregate.b[1.1] combine.b[1.1] recompute_experts.b[1.1] experts.b[1.1] "
        "dispatch.b[1.1] aggregate.b[1] combine.b[1] recompute_experts.b[1] experts.b[1] dispatch.b[1] "
        "attention.b[1] recompute_dense.b[0] dense.b[0]"
    )


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
    modes = {"none": "", "experts": "experts", "attention": "dense attention", "block": "dense attention experts"}
    for mode, dropped in modes.items():
        shape = BlockShape(1, recompute=parse_recompute(mode))
        assert " ".join(op for op in ("dense", "attention", "experts") if shape.drops(Op(op))) == dropped


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^recompute='full'; allowed: none, experts, attention, block$"):
        parse_recompute("full")
    with pytest.raises(ValueError, match=r"^recompute='full'; allowed"):
        Chains(Placement.loop(1), (BlockShape(1, recompute="full"),))  # type: ignore[arg-type]
