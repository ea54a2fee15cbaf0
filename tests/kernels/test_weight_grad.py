"""Weight gradients of a grouped product added to a main gradient, against a loop."""

from __future__ import annotations

import pytest
import torch

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.grouped_mm import GroupedMM
from overlap1f1b.kernels.weight_grad import add_weight_grad_
from tests.kernels.against import DEVICE, DTYPES, draw


def test_what_the_product_gives_its_weight_is_added() -> None:
    counts = [2, 0, 3]
    rows = torch.randn(5, 4)
    weight, grad = torch.randn(3, 6, 4, requires_grad=True), torch.randn(5, 6)
    (expected,) = torch.autograd.grad(GroupedMM.apply(rows, weight, counts), weight, grad)
    before = torch.randn(3, 6, 4)
    main = before.clone()
    add_weight_grad_(main, grad, rows, torch.tensor([2, 2, 5]))
    torch.testing.assert_close(main, before + expected)
    assert torch.equal(main[1], before[1])


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("counts", "C", "A"),
    [([0, 0], 30, 1), ([1], 1, 257), ([0, 300, 0, 1, 699, 0], 30, 257), ([70, 30], 257, 30), ([5, 0, 16], 128, 256)],
)
def test_triton(counts: list[int], C: int, A: int, dtype: torch.dtype) -> None:
    R = sum(counts)
    grad, rows = draw(R + 3, C, dtype=dtype), draw(R + 3, A, dtype=dtype)
    grad[R:], rows[R:] = torch.nan, torch.nan  # rows beyond the last offset
    offsets = torch.tensor(counts, device=DEVICE).cumsum(0)
    before = draw(len(counts), C, A)
    found = Kernels("triton")(add_weight_grad_, before.clone(), grad, rows, offsets)
    expected = add_weight_grad_(before.double(), grad, rows, offsets)
    size = 1e-6 * max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=size)
    assert all(torch.equal(found[e], before[e]) for e, count in enumerate(counts) if not count)
