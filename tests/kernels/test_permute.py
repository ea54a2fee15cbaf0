"""Rows in the order of their experts against loops, and gradients against finite differences."""

from __future__ import annotations

import pytest
import torch

from overlap1f1b.kernels.permute import AggregateRows, GatherRows, aggregate_rows, gather_rows, sort_slots


@pytest.mark.parametrize(("T", "K", "E", "H"), [(0, 2, 3, 4), (1, 1, 1, 1), (7, 2, 5, 3), (9, 3, 8, 30)])
def test_against_loops(T: int, K: int, E: int, H: int) -> None:
    indices, tokens, weights = torch.randint(E, (T, K)), torch.randn(T, H), torch.rand(T, K)
    order, counts = sort_slots(indices, E)
    slots = sorted(range(T * K), key=lambda slot: (int(indices.view(-1)[slot]), slot))
    assert order.tolist() == slots
    assert counts.tolist() == [int((indices == e).sum()) for e in range(E)]
    rows = gather_rows(tokens, order, K)
    assert all(torch.equal(rows[i], tokens[slot // K]) for i, slot in enumerate(slots))
    result = aggregate_rows(rows * 2, order, weights)
    expected = torch.stack([tokens[t] * 2 * weights[t].sum() for t in range(T)]) if T else torch.zeros(0, H)
    torch.testing.assert_close(result, expected)


def test_gradients() -> None:
    indices = torch.tensor([[2, 0], [0, 1], [2, 1]])
    order, _ = sort_slots(indices, 4)
    tokens = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: GatherRows.apply(t, order, 2), tokens)
    assert torch.autograd.gradcheck(lambda r, w: AggregateRows.apply(r, order, w), (rows, weights))


def test_low_precision_sums_in_float32() -> None:
    order = torch.arange(256)
    rows, weights = torch.ones(256, 1, dtype=torch.bfloat16), torch.ones(1, 256, dtype=torch.bfloat16)
    rows[0] = 256
    assert aggregate_rows(rows, order, weights).item() == 512  # in bfloat16, 256 + 1 stays 256
