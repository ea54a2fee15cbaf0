"""What actions are made of on each rank."""

from typing import Any

import pytest

from overlap1f1b.plan import BlockShape, Chains
from overlap1f1b.schedule import Action, Placement
from tests.plan.cases import DENSE, MOE


def test_transfers_stand_at_the_ends_that_lead_to_other_ranks() -> None:
    chains = Chains(Placement.loop(3), (DENSE,))
    expected = {
        "0F0": ["dense.f", "send.f"],
        "1F0": ["receive.f", "dense.f", "send.f"],
        "2F0": ["receive.f", "dense.f"],
        "2B0": ["dense.b", "send.b"],
        "1I0": ["receive.b", "dense.b", "send.b"],
        "0B0": ["receive.b", "dense.b"],
        "1W0": ["dense.w"],
    }
    assert {action: [node.name for node in chains.of(Action.parse(action))] for action in expected} == expected


def test_shapes_are_one_for_all_or_one_for_each() -> None:
    assert Chains(Placement.loop(2), (MOE,)).shapes == ((MOE,), (MOE,))
    assert Chains(Placement.loop(2), ((MOE,), (DENSE,))).shapes == ((MOE,), (DENSE,))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (((MOE,),), "shapes of 1 stages for a program of 2; allowed: one, or one for each"),
        (((MOE,), ()), "a stage of 0 blocks; allowed: at least 1"),
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
