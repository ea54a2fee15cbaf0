"""Gradients of two rows are equal only if torch.equal says so; what a benchmark computes is on the rank's device."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap1f1b.running.bench.measure import Bench, compare
from overlap1f1b.running.options import BenchOptions, ModelOptions
from overlap1f1b.running.ranks import Rank

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


SMALL = ModelOptions(layers=1, hidden=16, heads=2, intermediate=16)


def on_a_device(text: Path, **options: Any) -> Bench:
    """A benchmark on the device "meta", which stands for a GPU."""
    given = BenchOptions(ep=1, model=SMALL, text=(text,), **options)
    return Bench(given, Rank(0, 1, torch.device("meta"), None), lambda _: None)


def test_the_batch_is_on_the_device_of_the_model(text: Path) -> None:
    bench = on_a_device(text)
    assert {tensor.device.type for tensor in (bench.inputs, bench.target, *bench.model.parameters())} == {"meta"}


@pytest.mark.parametrize(("name", "value"), [("wire", "1gbit"), ("compute", "timed")])
def test_a_gpu_has_neither_a_wire_nor_timed_compute(text: Path, name: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"--{name} {value}.*on meta; allowed: on a CPU alone"):
        on_a_device(text, **{name: value})
