"""The order of slots against loops."""

from __future__ import annotations

import pytest
import torch

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.slots import place_slots, sort_slots
from tests.kernels.against import DEVICE, SHAPES, check, choose


@pytest.mark.parametrize(("T", "K", "E"), [(0, 2, 3), (1, 1, 1), (7, 2, 5), (9, 3, 8)])
def test_rows_lie_by_expert_then_by_slot(T: int, K: int, E: int) -> None:
    indices = torch.randint(E, (T, K))
    order, inverse, counts = place_slots(indices, E)
    flat = indices.view(-1).tolist()
    rows: list[int] = []
    for expert in range(E):
        mine = [slot for slot in range(T * K) if flat[slot] == expert]
        rows += mine
        assert int(counts[expert]) == len(mine)
    assert order.tolist() == rows
    assert inverse.tolist() == [rows.index(slot) for slot in range(T * K)]
    assert all(map(torch.equal, sort_slots(indices, E), (order, counts)))


def test_a_slot_of_no_expert_has_no_row() -> None:
    order, inverse, counts = place_slots(torch.tensor([[1, -1], [4, 0], [3, 1]]), 3)
    assert order.tolist() == [3, 0, 5, -1, -1, -1]
    assert inverse.tolist() == [1, -1, -1, 0, -1, 2]
    assert counts.tolist() == [1, 2, 0]


@pytest.mark.triton
@pytest.mark.parametrize(("T", "K", "E", "H"), SHAPES)
def test_triton(T: int, K: int, E: int, H: int) -> None:
    check(place_slots, choose(T, K, E), E)


@pytest.mark.triton
def test_triton_over_many_blocks() -> None:
    indices = torch.randint(-1, 6, (5000, 1), device=DEVICE)  # of no expert too
    check(place_slots, indices, 5)
    assert Kernels("triton")(place_slots, indices, 5).counts.sum() < 5000
