"""Rows in the order of their experts against loops, and gradients against finite differences."""

from __future__ import annotations

import pytest
import torch

from overlap1f1b.kernels.permute import GatherRows, PermuteRows, gather_rows, spread_rows, spread_weighted
from overlap1f1b.kernels.slots import place_slots, sort_slots
from tests.kernels.against import DTYPES, SHAPES, check, choose, draw


@pytest.mark.parametrize(("T", "K", "E", "H"), [(0, 2, 3, 4), (1, 1, 1, 1), (7, 2, 5, 3), (9, 3, 8, 30)])
def test_against_loops(T: int, K: int, E: int, H: int) -> None:
    indices, tokens, weights = torch.randint(E, (T, K)), torch.randn(T, H), torch.rand(T, K)
    order, counts = sort_slots(indices, E)
    slots = sorted(range(T * K), key=lambda slot: (int(indices.view(-1)[slot]), slot))
    assert order.tolist() == slots
    assert counts.tolist() == [int((indices == e).sum()) for e in range(E)]
    rows = gather_rows(tokens, order, K)
    assert all(torch.equal(rows[i], tokens[slot // K]) for i, slot in enumerate(slots))
    placed = place_slots(indices, E, align=4)
    rows, factors = PermuteRows.apply(tokens, weights, placed)
    for row, slot in enumerate(placed.order.tolist()):
        expected = (tokens[slot // K], weights.view(-1)[slot]) if slot >= 0 else (torch.zeros(H), torch.zeros(()))
        assert torch.equal(rows[row], expected[0])
        assert torch.equal(factors[row], expected[1])


def test_gradients() -> None:
    indices = torch.tensor([[2, 0], [0, 1], [2, 1]])
    order, _ = sort_slots(indices, 4)
    tokens = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: GatherRows.apply(t, order, 2), tokens)
    placed = place_slots(indices, 4, align=2)
    assert torch.autograd.gradcheck(lambda t, w: PermuteRows.apply(t, w, placed), (tokens, weights))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "K", "E", "H"), SHAPES)
def test_triton(T: int, K: int, E: int, H: int, dtype: torch.dtype) -> None:
    indices, tokens, weights = choose(T, K, E), draw(T, H, dtype=dtype), draw(T, K, dtype=dtype)
    for align in (1, 4):
        order, inverse, _ = place_slots(indices, E, align)
        check(spread_rows, tokens, order, inverse, K, align > 1, exact=True)
        check(spread_weighted, tokens, weights, order, inverse, align > 1, exact=True)
