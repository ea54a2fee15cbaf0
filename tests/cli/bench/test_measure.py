"""Gradients of two rows are equal only if torch.equal says so."""

from __future__ import annotations

import math

import pytest
import torch

from overlap1f1b.cli.bench.measure import compare

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([[1.0, 2.0], [3.0]], [[1.0, 2.0], [3.0]], (True, 0.0)),
        ([[1.0, 2.0], [3.0]], [[1.0, 2.5], [3.25]], (False, 0.5)),
        ([[1.0, 2.0], []], [[1.5, 2.0], []], (False, 0.5)),
        ([[INF]], [[INF]], (True, 0.0)),
        ([[INF]], [[1.0]], (False, INF)),
        ([[NAN, 1.0]], [[NAN, 1.0]], (False, INF)),
        ([[1.0], [NAN]], [[1.0], [1.0]], (False, INF)),
        ([[NAN], [1.0]], [[1.0], [2.0]], (False, INF)),
    ],
)
def test_compare(one: list[list[float]], other: list[list[float]], expected: tuple[bool, float]) -> None:
    assert compare([torch.tensor(g) for g in one], [torch.tensor(g) for g in other]) == expected


def test_the_last_bit_counts() -> None:
    one = torch.tensor([1.0])
    equal, difference = compare([torch.nextafter(one, torch.tensor([2.0]))], [one])
    assert not equal
    assert difference == pytest.approx(2**-23)
    assert math.isfinite(difference)


def test_other_parameters_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare([torch.ones(1)], [])
