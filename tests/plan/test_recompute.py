"""Modes of recompute, by their names."""

from __future__ import annotations

import pytest

from overlap1f1b.plan import BlockShape, Chains, Op, parse_recompute
from overlap1f1b.schedule import Placement


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
