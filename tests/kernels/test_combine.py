"""Sums of a token's rows against loops, and gradients against finite differences."""

from __future__ import annotations

import pytest
import torch

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.combine import spread_grad, sum_rows
from overlap1f1b.kernels.slots import invert, place_slots, sort_slots
from tests.kernels.against import DEVICE, DTYPES, SHAPES, check, choose, draw


@pytest.mark.parametrize(("T", "K", "E", "H"), [(0, 2, 3, 4), (1, 1, 1, 1), (7, 2, 5, 3), (9, 3, 8, 30)])
def test_against_loops(T: int, K: int, E: int, H: int) -> None:
    order, _ = sort_slots(torch.randint(E, (T, K)), E)
    rows, weights = torch.randn(T * K, H), torch.rand(T, K)
    place = order.tolist().index
    expected = [sum(weights[t, k] * rows[place(t * K + k)] for k in range(K)) for t in range(T)]
    found = sum_rows(rows, invert(order), K, weights)
    torch.testing.assert_close(found, torch.stack(expected) if T else rows.view(0, H))


def test_gradients_are_those_of_autograd() -> None:
    order, _ = sort_slots(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4)
    rows = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    inverse, grad = invert(order), torch.randn(3, 5, dtype=torch.float64)
    total = (rows[inverse].view(3, 2, 5) * weights.unsqueeze(2)).sum(1)
    expected = torch.autograd.grad(total, (rows, weights), grad)
    with torch.no_grad():
        torch.testing.assert_close(spread_grad(grad, rows, order, inverse, weights), expected)


def test_low_precision_sums_in_float32() -> None:
    order = torch.arange(256)
    rows, weights = torch.ones(256, 1, dtype=torch.bfloat16), torch.ones(1, 256, dtype=torch.bfloat16)
    rows[0] = 256
    assert sum_rows(rows, order, 256, weights).item() == 512  # in bfloat16, 256 + 1 stays 256


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "K", "E", "H"), SHAPES)
def test_triton(T: int, K: int, E: int, H: int, dtype: torch.dtype) -> None:
    indices, grad, weights = choose(T, K, E), draw(T, H, dtype=dtype), draw(T, K, dtype=dtype)
    order, inverse, _ = place_slots(indices, E)
    rows = draw(T * K, H, dtype=dtype)
    for partial in (False, True):
        if partial:
            inverse = torch.where(inverse % 5 == 0, -1, inverse)  # what has no row counts nothing
            order = torch.full_like(order, -1).scatter_(
                0, inverse[inverse >= 0], torch.arange(T * K, device=DEVICE)[inverse >= 0]
            )
        check(sum_rows, rows, inverse, K, None, partial)
        check(sum_rows, rows, inverse, K, weights, partial)
        check(spread_grad, grad, rows, order, inverse, weights, partial)
    if H > 1:  # a part of longer rows
        check(sum_rows, rows[:, : H // 2], inverse, K, None, True)


@pytest.mark.triton
def test_triton_sums_in_the_order_of_k() -> None:
    inverse, rows = torch.randperm(1000), draw(1000, 30)
    found = Kernels("triton")(sum_rows, rows, inverse.to(rows.device), 8)
    assert torch.equal(found, sum_rows(rows, inverse.to(rows.device), 8))
