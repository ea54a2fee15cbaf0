"""Packed rows against loops, what they carry, and rows expanded by choice."""

import pytest
import torch

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.permute import Layout, expand_rows, pack_rows, spread_rows, take_rows
from overlap1f1b.kernels.slots import place_rows, place_slots
from overlap1f1b.plan import row_bytes
from tests.kernels.against import CASES, DEVICE, DTYPES, check, choose, draw


@pytest.mark.parametrize(
    ("T", "K", "E", "ranks", "H"), [(0, 2, 4, 2, 4), (1, 1, 1, 1, 1), (7, 2, 6, 3, 3), (9, 3, 8, 4, 30)]
)
@pytest.mark.parametrize("room", [None, 5])
def test_against_loops(T: int, K: int, E: int, ranks: int, H: int, room: int | None) -> None:
    indices, tokens, weights = torch.rand(T, E).argsort(-1)[:, :K], torch.randn(T, H), torch.rand(T, K)
    local = E // ranks
    order, spots, _, _ = place_rows(indices, E, ranks, room, 1000)
    layout = Layout.of(tokens, weights)
    packed = pack_rows(tokens, indices, weights, order, spots, local, layout)
    rows, factors, chosen = layout.opened(packed)
    for row, token in enumerate(order.tolist()):
        mine = [k for k in range(K) if token >= 0 and int(spots[token, k]) // layout.choices == row]
        numbers, weighted = ([float(x[token, k]) for k in mine] for x in (indices % local + 1, weights))
        assert torch.equal(rows[row], tokens[token] if token >= 0 else torch.zeros(H))
        assert chosen[row].tolist() == numbers + [0] * (chosen.shape[1] - len(mine))
        assert factors[row].tolist() == weighted + [0] * (layout.choices - len(mine))
    slots = place_slots(chosen[:, : layout.choices], local, int((chosen > 0).sum()))
    expanded, of_choices = expand_rows(packed, slots.order, slots.inverse, layout, False)
    assert torch.equal(expanded, rows[slots.order // layout.choices])
    assert torch.equal(of_choices, factors.reshape(-1)[slots.order])


@pytest.mark.parametrize("hidden", [1, 8, 30, 257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32, torch.float64])
def test_a_weight_is_carried_with_all_its_bits(hidden: int, dtype: torch.dtype, wide: torch.dtype) -> None:
    """Whatever its dtype and that of the row; rows begin at multiples of 16 bytes, and no more is sent than counted."""
    indices = torch.tensor([[0, 3], [2, 1], [3, 2], [1, 0], [0, 1]])
    tokens, weights = torch.randn(5, hidden).to(dtype), torch.rand(5, 2).to(wide)
    for order, spots, ranks in ((None, None, 1), (*place_rows(indices, 4, 2)[:2], 2)):
        layout = Layout.of(tokens, weights)
        packed = pack_rows(tokens, indices, weights, order, spots, 4 // ranks, layout)
        assert packed.dtype == dtype
        assert packed.shape[1] * dtype.itemsize == row_bytes(hidden, 2, dtype.itemsize, wide.itemsize)
        rows, factors, chosen = layout.opened(packed)
        if order is None or spots is None:
            assert torch.equal(rows, tokens)
            assert torch.equal(factors, weights)
            assert torch.equal(chosen[:, :2], indices.to(torch.int16) + 1)
        else:
            assert torch.equal(factors.reshape(-1)[spots], weights)
            assert torch.equal(chosen[:, :2].reshape(-1)[spots], (indices % 2 + 1).to(torch.int16))


@pytest.mark.triton
@pytest.mark.parametrize(("T", "K", "E", "H", "dtype"), CASES)
def test_packed_by_triton(T: int, K: int, E: int, H: int, dtype: torch.dtype) -> None:
    indices, tokens = choose(T, K, E), draw(T, H, dtype=dtype)
    for wide, rooms in zip(DTYPES, ((None, 0), (None, 2 * T // 3 + 1)), strict=True):
        weights = draw(T, K, dtype=wide)
        for room in rooms:
            ranks = 2 if E % 2 == 0 else 1
            order, spots, *_ = place_rows(indices, E, ranks, room, T * K // 2)
            layout = Layout.of(tokens, weights)
            for places in ((order, spots), (None, None)) if ranks == 1 and room is None else ((order, spots),):
                args = tokens, indices, weights, *places, E // ranks, layout
                packed = Kernels("triton")(pack_rows, *args)
                assert torch.equal(packed.view(torch.uint8), pack_rows(*args).view(torch.uint8))
            chosen = layout.opened(packed)[2][:, : layout.choices]
            count = int((chosen > 0).sum())
            for more in (0, 3) if chosen.numel() > count + 3 else (0,):  # padding
                slots = place_slots(chosen, E // ranks, count + more)
                args = packed, slots.order, slots.inverse, layout, more > 0
                found, wanted = Kernels("triton")(expand_rows, *args), expand_rows(*args)
                assert all(map(torch.equal, found, wanted))
                check(spread_rows, layout.opened(packed)[0], *slots[:2], layout.choices, more > 0, exact=True)


def test_minus_one_is_a_row_of_zeros() -> None:
    rows = torch.randn(3, 2)
    taken = take_rows(rows, torch.tensor([2, -1, 0, 0]), True)
    assert torch.equal(taken, torch.stack([rows[2], torch.zeros(2), rows[0], rows[0]]))
    assert torch.equal(take_rows(rows[:0], torch.tensor([-1]), True), torch.zeros(1, 2))


@pytest.mark.triton
@pytest.mark.parametrize(("T", "K", "E", "H", "dtype"), CASES)
def test_take_by_triton(T: int, K: int, E: int, H: int, dtype: torch.dtype) -> None:
    rows, index = draw(T * K, H, dtype=dtype), torch.randperm(T * K, device=DEVICE)
    check(take_rows, rows, index, exact=True)
    check(take_rows, rows, torch.where(index % 3 == 0, -1, index), True, exact=True)
