"""What actions are made of on each rank."""

from __future__ import annotations

from typing import Any

import pytest

from overlap1f1b.plan import BlockShape, Chains
from overlap1f1b.schedule import Action, Placement
from tests.plan.cases import DENSE, MOE


def texts(chains: Chains, action: str) -> list[str]:
    return [node.name for node in chains.of(Action.parse(action))]


FORWARD = ["attention.f", "counts.f", "dispatch.f", "experts.f", "combine.f", "aggregate.f"]
BACKWARD = ["aggregate.b", "combine.b", "experts.b", "dispatch.b", "attention.b"]


def test_transfers_stand_at_the_ends_that_lead_to_other_ranks() -> None:
    chains = Chains(Placement.loop(3), (MOE,))
    assert texts(chains, "0F0") == [*FORWARD, "send.f"]
    assert texts(chains, "1F0") == ["receive.f", *FORWARD, "send.f"]
    assert texts(chains, "2F0") == ["receive.f", *FORWARD]
    assert texts(chains, "2B0") == [*BACKWARD, "send.b"]
    assert texts(chains, "1I0") == ["receive.b", *BACKWARD, "send.b"]
    assert texts(chains, "0B0") == ["receive.b", *BACKWARD]
    assert texts(chains, "1W0") == ["experts.w", "attention.w"]


def test_both_pipes_of_a_bidirectional_placement() -> None:
    chains = Chains(Placement.bidirectional(2), (MOE,))
    sends = [node for node in chains.of(Action.parse("0'F0")) if node.name == "send.f"]
    assert [chains.peer(node) for node in sends] == [0]  # stage 0 of pipe 1 lies on rank 1
    assert str(chains.receive(sends[0])) == "receive.f[0] m0 s1'"


def test_a_stage_of_the_same_rank_is_needed_whole() -> None:
    chains = Chains(Placement.v(2), (MOE,))
    assert texts(chains, "2F0") == ["receive.f", *FORWARD, "send.f"][1:]
    assert texts(chains, "1F0")[-1] == "aggregate.f"
    assert [str(needed) for needed in chains.local_needs(Action.parse("2F0"))] == ["1F0"]
    assert [str(needed) for needed in chains.local_needs(Action.parse("1B0"))] == ["1F0", "2I0"]
    assert [str(needed) for needed in chains.local_needs(Action.parse("1W0"))] == ["1I0"]


def test_gradients_enter_at_the_last_block() -> None:
    chains = Chains(Placement.loop(2), ((DENSE,), (MOE, DENSE)))
    send = chains.of(Action.parse("1B3"))[-1]
    assert str(send) == "send.b[0] m3 s1"
    assert str(chains.receive(send)) == "receive.b[0] m3"
    send = chains.of(Action.parse("0F3"))[-1]
    assert str(chains.receive(send)) == "receive.f[0] m3 s1"


def test_shapes_are_one_for_all_or_one_for_each() -> None:
    assert Chains(Placement.loop(2), (MOE,)).shapes == ((MOE,), (MOE,))
    assert Chains(Placement.loop(2), ((MOE,), (DENSE,))).shapes == ((MOE,), (DENSE,))
    with pytest.raises(ValueError, match="shapes of 1 stages for a program of 2; allowed: one, or one for each"):
        Chains(Placement.loop(2), ((MOE,),))
    with pytest.raises(ValueError, match="a stage of 0 blocks; allowed: at least 1"):
        Chains(Placement.loop(2), ((MOE,), ()))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (MOE, r"shape=BlockShape\(expert_calls=1, .*\); allowed: a sequence of blocks, such as \(BlockShape\(.*\),\)$"),
        (3, r"shape=3; allowed: a sequence of blocks"),
        (((MOE,), DENSE), r"stage 1: shape=BlockShape\(expert_calls=0, .*; allowed: a sequence of blocks for each"),
        ((MOE, None), r"stage 0: None is not a block; allowed: BlockShape\(expert_calls=1\), for example"),
        (((MOE,), (1,)), r"stage 1: 1 is not a block"),
        ((BlockShape(expert_calls=-1),), r"stage 0: expert_calls=-1; allowed: 0 or more"),
        ((BlockShape(expert_calls=0.5),), r"stage 0: expert_calls=0.5; allowed: a whole number, 0 or more"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_shape(shape: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Chains(Placement.loop(2), shape)
