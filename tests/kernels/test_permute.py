"""Rows in the order of their experts against loops, and the weights that they carry."""

from __future__ import annotations

import pytest
import torch

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.permute import OpenRows, opened, spread_rows, spread_weighted, take_rows
from overlap1f1b.kernels.slots import pack_slots, place_slots
from tests.kernels.against import DEVICE, DTYPES, SHAPES, check, choose, draw


@pytest.mark.parametrize(("T", "K", "E", "H"), [(0, 2, 3, 4), (1, 1, 1, 1), (7, 2, 6, 3), (9, 3, 8, 30)])
@pytest.mark.parametrize("capacity", [None, 5])
def test_against_loops(T: int, K: int, E: int, H: int, capacity: int | None) -> None:
    indices, tokens, weights = torch.randint(E, (T, K)), torch.randn(T, H), torch.rand(T, K)
    partial = capacity is not None
    if capacity is None:
        order, inverse, _ = place_slots(indices, E)
    else:
        order, inverse, _, _ = pack_slots(indices, E, 1, capacity, Kernels("torch"))
    rows = spread_rows(tokens, order, inverse, K, partial)
    carried, factors = opened(spread_weighted(tokens, weights, order, inverse, partial), H, weights.dtype)
    assert torch.equal(rows, carried)
    for row, slot in enumerate(order.tolist()):
        token, weight = (tokens[slot // K], weights.view(-1)[slot]) if slot >= 0 else (torch.zeros(H), torch.zeros(()))
        assert torch.equal(rows[row], token)
        assert torch.equal(factors[row], weight)


@pytest.mark.parametrize("hidden", [1, 8, 30, 257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32, torch.float64])
def test_a_weight_is_carried_with_all_its_bits(hidden: int, dtype: torch.dtype, wide: torch.dtype) -> None:
    """Whatever its dtype and that of the row; rows begin at multiples of 16 bytes."""
    indices, tokens, weights = torch.randint(4, (5, 2)), torch.randn(5, hidden).to(dtype), torch.rand(5, 2).to(wide)
    order, inverse, _ = place_slots(indices, 4)
    carried = spread_weighted(tokens, weights, order, inverse)
    assert carried.shape[1] * carried.element_size() % 16 == 0
    assert 16 <= (carried.shape[1] - hidden) * carried.element_size() < 32
    rows, factors = opened(carried.requires_grad_(), hidden, wide)
    assert torch.equal(rows, tokens[order // 2])
    assert torch.equal(factors, weights.view(-1)[order])
    grads = torch.randn_like(rows), torch.randn_like(factors)
    (found,) = torch.autograd.grad(OpenRows.apply(carried, hidden, wide), carried, grads)
    assert all(map(torch.equal, opened(found, hidden, wide), grads))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "K", "E", "H"), SHAPES)
def test_triton(T: int, K: int, E: int, H: int, dtype: torch.dtype) -> None:
    indices, tokens, weights = choose(T, K, E), draw(T, H, dtype=dtype), draw(T, K)
    order, inverse, _ = place_slots(indices, E)
    packed = pack_slots(indices, E, 1, T * K // 2 + 1, Kernels("torch"))
    for places, partial in (((order, inverse), False), (packed[:2], True)):
        check(spread_rows, tokens, *places, K, partial, exact=True)
        found = Kernels("triton")(spread_weighted, tokens, weights, *places, partial)
        wanted = spread_weighted(tokens, weights, *places, partial)
        assert found.shape == wanted.shape
        assert all(map(torch.equal, opened(found, H, weights.dtype), opened(wanted, H, weights.dtype)))


def test_minus_one_is_a_row_of_zeros() -> None:
    rows = torch.randn(3, 2)
    taken = take_rows(rows, torch.tensor([2, -1, 0, 0]), True)
    assert torch.equal(taken, torch.stack([rows[2], torch.zeros(2), rows[0], rows[0]]))
    assert torch.equal(take_rows(rows[:0], torch.tensor([-1]), True), torch.zeros(1, 2))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "K", "E", "H"), SHAPES)
def test_take_by_triton(T: int, K: int, E: int, H: int, dtype: torch.dtype) -> None:
    rows, index = draw(T * K, H, dtype=dtype), torch.randperm(T * K, device=DEVICE)
    check(take_rows, rows, index, exact=True)
    check(take_rows, rows, torch.where(index % 3 == 0, -1, index), True, exact=True)
