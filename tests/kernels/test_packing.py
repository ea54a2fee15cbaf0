"""Rows in equal places for every destination against loops."""

from __future__ import annotations

import pytest
import torch

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.combine import spread_grad, sum_rows
from overlap1f1b.kernels.packing import pack_places, pack_slots
from overlap1f1b.kernels.permute import spread_rows
from overlap1f1b.kernels.slots import place_slots
from tests.kernels.against import DTYPES, check, choose, draw


@pytest.mark.parametrize(("T", "K", "E", "D"), [(0, 1, 2, 2), (7, 2, 6, 3), (9, 3, 4, 4), (20, 1, 5, 1)])
@pytest.mark.parametrize("capacity", [0, 3, 40])
def test_against_a_loop(T: int, K: int, E: int, D: int, capacity: int) -> None:
    indices = choose(T, K, E).cpu()
    packing = pack_slots(indices, E, D, capacity, None)
    flat, order = indices.reshape(-1).tolist(), []
    counts, dropped = [0] * E, [0] * E
    for destination in range(D):
        mine = [s for e in range(E) if e // (E // D) == destination for s in range(T * K) if flat[s] == e]
        order += mine[:capacity] + [-1] * (capacity - len(mine))
        for n, slot in enumerate(mine):
            (counts if n < capacity else dropped)[flat[slot]] += 1
    assert packing.order.tolist() == order
    assert packing.inverse.tolist() == [order.index(s) if s in order else -1 for s in range(T * K)]
    assert (packing.counts.tolist(), packing.dropped.tolist()) == (counts, dropped)


@pytest.mark.parametrize(("options", "message"), [((3, 2, 1), "destinations=2; allowed: 1, 3"), ((2, 2, -1), "=-1")])
def test_refused(options: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_slots(torch.zeros(1, 1, dtype=torch.int64), *options, None)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "K", "E", "D", "capacity", "H"),
    [
        (0, 2, 4, 2, 3, 30),
        (1, 8, 8, 8, 1, 1),
        (125, 8, 30, 30, 20, 257),
        (1000, 1, 6, 3, 0, 30),
        (1000, 1, 6, 3, 900, 30),
    ],
)
def test_triton(T: int, K: int, E: int, D: int, capacity: int, H: int, dtype: torch.dtype) -> None:
    indices, tokens, weights = choose(T, K, E), draw(T, H, dtype=dtype), draw(T, K, dtype=dtype)
    slots = place_slots(indices, E)
    check(pack_places, *slots, D, capacity)
    packing = pack_slots(indices, E, D, capacity, Kernels("triton"))
    assert all(map(torch.equal, packing, pack_slots(indices, E, D, capacity, None)))
    rows = draw(D * capacity, H, dtype=dtype)
    check(spread_rows, tokens, packing.order, packing.inverse, K, True, exact=True)
    check(sum_rows, rows, packing.inverse, K, weights, True)
    check(spread_grad, tokens, rows, packing.order, packing.inverse, weights, True)
