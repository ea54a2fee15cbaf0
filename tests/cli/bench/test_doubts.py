"""Figures that cannot be right are named."""

from __future__ import annotations

from typing import Any

from overlap1f1b.cli.bench.doubts import doubts


def result(over_bound: float, exchange: float = 100.0, over_rate: float | None = None) -> dict[str, Any]:
    row = {"program": "sequential", "overlap": "1", "over_bound": over_bound}
    row |= {"predicted_ms": 100.0, "step_ms": {"median": 100.0}}
    return {
        "compute": "timed",
        "rows": [row, row | {"over_bound": 1.5}],
        "exchange_only_ms": exchange,
        "wire": {"bytes_over_rate_ms": over_rate},
    }


def test_a_step_under_its_bound() -> None:
    assert doubts(result(0.98)) == []
    assert doubts(result(0.9799)) == ["sequential · 1: over bound 0.9799 is under 0.98"]


def test_an_exchange_that_is_not_that_of_the_wire() -> None:
    assert doubts(result(1.0, 109.0, 100.0)) == doubts(result(1.0, 91.0, 100.0)) == []
    expected = ["exchange only 120 ms is not within 10% of bytes over rate, 100 ms"]
    assert doubts(result(1.0, 120.0, 100.0)) == expected
    assert doubts(result(1.0, 80.0, 100.0)) == ["exchange only 80 ms is not within 10% of bytes over rate, 100 ms"]


def test_a_step_that_was_not_predicted() -> None:
    short = result(1.0) | {"processor_share": 0.93}
    short["rows"][0] |= {"predicted_ms": 89.0}
    short["rows"][1] |= {"predicted_ms": 91.0}
    line = "sequential · 1: 89 ms were predicted of 100, with processors 93% busy"
    assert doubts(short) == [line]
    assert doubts(short | {"compute": "real"}) == []
    short["rows"][0] |= {"predicted_ms": None}
    assert doubts(short) == []
