"""Rows by their number."""

from __future__ import annotations

import pytest
import torch

from overlap1f1b.kernels.take import put_rows, take_rows
from tests.kernels.against import DEVICE, DTYPES, SHAPES, check, draw


def test_minus_one_is_a_row_of_zeros() -> None:
    rows = torch.randn(3, 2)
    taken = take_rows(rows, torch.tensor([2, -1, 0, 0]), True)
    assert torch.equal(taken, torch.stack([rows[2], torch.zeros(2), rows[0], rows[0]]))
    assert torch.equal(take_rows(rows[:0], torch.tensor([-1]), True), torch.zeros(1, 2))


def test_put_is_the_inverse_of_take() -> None:
    rows, index = torch.randn(5, 2), torch.randperm(5)
    assert torch.equal(put_rows(take_rows(rows, index), index), rows)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "K", "E", "H"), SHAPES)
def test_triton(T: int, K: int, E: int, H: int, dtype: torch.dtype) -> None:
    rows, index = draw(T * K, H, dtype=dtype), torch.randperm(T * K, device=DEVICE)
    check(take_rows, rows, index, exact=True)
    check(put_rows, rows, index, exact=True)
    check(take_rows, rows, torch.where(index % 3 == 0, -1, index), True, exact=True)
