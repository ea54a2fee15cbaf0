"""Costs of actions, and those that make no sense."""

from __future__ import annotations

from typing import Any

import pytest

from overlap1f1b.schedule import parse_slot
from overlap1f1b.simulation import Costs


def test_costs_of_steps() -> None:
    costs = Costs(forward=2, backward=6, weight=4, pair=0.5)
    want = {"0F0": 2, "0B0": 6, "0I0": 2, "0W0": 4, "(0F1;0B0)OVERLAP_F_B": 4, "(0F1;0I0)OVERLAP_F_B": 2}
    assert {text: costs.of(parse_slot(text)) for text in want} == want
    assert {text: costs.of(parse_slot(text), 0.5) for text in want} == {text: cost / 2 for text, cost in want.items()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": 0}, "forward=0; allowed: a finite number > 0"),
        ({"backward": -1}, "backward=-1; allowed: a finite number > 0"),
        ({"pair": 0.0}, "pair=0.0; allowed: a finite number > 0"),
        ({"forward": float("inf")}, "forward=inf; allowed: a finite number > 0"),
        ({"forward": float("nan")}, "forward=nan; allowed: a finite number > 0"),
        ({"weight": -0.5}, "weight=-0.5; allowed: a finite number ≥ 0"),
        ({"send": -1}, "send=-1; allowed: a finite number ≥ 0"),
        ({"activation": -1}, "activation=-1; allowed: a finite number ≥ 0"),
        ({"weight": 2, "backward": 2}, "weight=2 with backward=2, which it is a part of; allowed: from 0 to below 2"),
        ({"forward": "1"}, "forward='1'; allowed: a number"),
        ({"send": None}, "send=None; allowed: a number"),
        ({"held": 1.5}, "held=1.5; allowed: a part of the activations, 0 to 1"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Costs(**options)
