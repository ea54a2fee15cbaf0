"""Sums of rows against loops; tests/moe/test_route.py has their gradients."""

import pytest
import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.combine import open_grads, pack_grads, spread_grad, sum_rows
from overlap1f1b.kernels.permute import Layout
from overlap1f1b.kernels.slots import Slots, place_rows, place_slots
from tests.kernels.against import CASES, DEVICE, DTYPES, check, choose, draw


def gaps(R: int, M: int, E: int, padding: int = 0, device: str = DEVICE) -> Slots:
    """Places of choices of which some are none; the last rows may be padding."""
    chosen = torch.randint(E + 1, (R, M), device=device, dtype=torch.int16)
    return place_slots(chosen, E, min(int((chosen > 0).sum()) + padding, R * M))


@pytest.mark.parametrize(("R", "M", "E", "H"), [(0, 2, 3, 4), (1, 1, 1, 1), (7, 2, 5, 3), (9, 3, 8, 30)])
def test_against_loops(R: int, M: int, E: int, H: int) -> None:
    slots = gaps(R, M, E, device="cpu")
    rows, weights = torch.randn(len(slots.order), H), torch.rand(len(slots.order))
    expected = torch.zeros(R, H)
    for spot, row in enumerate(slots.inverse.tolist()):
        if row >= 0:
            expected[spot // M] += weights[row] * rows[row]
    torch.testing.assert_close(sum_rows(rows, slots.inverse, M, weights), expected)
    torch.testing.assert_close(sum_rows(rows, slots.inverse, M), sum_rows(rows, slots.inverse, M, weights * 0 + 1))


def test_low_precision_sums_in_float32() -> None:
    order = torch.arange(256)
    rows, weights = torch.ones(256, 1, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)
    rows[0] = 256
    for partial in (False, True):  # in bfloat16, 256 + 1 stays 256
        assert sum_rows(rows, order, 256, weights, partial).item() == 512


def test_what_is_not_there_counts_nothing_with_or_without_a_look() -> None:
    order, inverse, _ = place_slots(torch.tensor([[3, 1], [1, 2]], dtype=torch.int16), 4, 4)
    rows, weights = torch.randn(4, 5), torch.rand(4)
    assert torch.equal(sum_rows(rows, inverse, 2, None, False), sum_rows(rows, inverse, 2, None, True))
    torch.testing.assert_close(sum_rows(rows, inverse, 2, weights, False), sum_rows(rows, inverse, 2, weights, True))
    assert len(order) == 4


@pytest.mark.triton
@pytest.mark.parametrize(("T", "K", "E", "H", "dtype"), CASES)
def test_triton(T: int, K: int, E: int, H: int, dtype: torch.dtype) -> None:
    grad = draw(T, H, dtype=dtype)
    for padding in (0, 3):
        slots = gaps(T, K, E, padding)
        rows, weights = (draw(len(slots.order), *shape, dtype=dtype) for shape in ((H,), ()))
        check(sum_rows, rows, slots.inverse, K)
        check(sum_rows, rows, slots.inverse, K, weights)
        check(spread_grad, grad, rows, *slots[:2], weights, padding > 0, size=H**0.5)
    if H > 1:  # a part of longer rows
        check(sum_rows, rows[:, : H // 2], slots.inverse, K)


@pytest.mark.triton
@pytest.mark.parametrize(("T", "K", "E", "H", "dtype"), CASES)
def test_packed_by_triton(T: int, K: int, E: int, H: int, dtype: torch.dtype) -> None:
    """The gradients of rows as their sums, and those of weights with all their bits."""
    triton = Kernels("triton")
    for wide in DTYPES:
        slots, layout = gaps(T, K, E), Layout.of(torch.empty(0, H, dtype=dtype), torch.empty(0, K, dtype=wide))
        rows, weights = draw(len(slots.order), H, dtype=dtype), draw(len(slots.order), dtype=wide)
        packed = triton(pack_grads, rows, weights, slots.inverse, layout)
        of_rows, *carried = layout.opened(packed)
        assert torch.equal(of_rows, triton(sum_rows, rows, slots.inverse, K))
        twin = pack_grads(rows, weights, slots.inverse, layout)
        assert all(map(torch.equal, carried, layout.opened(twin)[1:]))
        ranks = 2 if E % 2 == 0 else 1
        order, spots, inverse, _ = place_rows(choose(T, K, E), E, ranks)
        layout = Layout.of(rows, torch.empty(0, K, dtype=wide))
        packed = draw(len(order), layout.width, dtype=dtype)
        found, back = triton(open_grads, packed, inverse, spots, layout)
        assert torch.equal(found, triton(sum_rows, packed[:, :H], inverse, K))
        assert _same_bits(back, open_grads(packed, inverse, spots, layout)[1])


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.triton
def test_triton_sums_in_order() -> None:
    inverse, rows = torch.randperm(1000, device=DEVICE), draw(1000, 30)
    assert torch.equal(Kernels("triton")(sum_rows, rows, inverse, 8), sum_rows(rows, inverse, 8))
