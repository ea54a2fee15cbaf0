"""The order of slots against loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.combine import spread_grad, sum_rows
from overlap1f1b.kernels.permute import spread_rows
from overlap1f1b.kernels.slots import group_places, pack_places, pack_slots, place_slots, sort_slots
from tests.kernels.against import DEVICE, DTYPES, SHAPES, check, choose, draw


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


@pytest.mark.parametrize(("T", "K", "E", "D"), [(0, 1, 2, 2), (7, 2, 6, 3), (9, 3, 4, 4), (20, 1, 5, 1)])
@pytest.mark.parametrize("capacity", [0, 3, 40])
def test_packed_places_against_a_loop(T: int, K: int, E: int, D: int, capacity: int) -> None:
    indices = choose(T, K, E).cpu()
    packing = pack_slots(indices, E, D, capacity, Kernels("torch"))
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
def test_packed_places_by_triton(T: int, K: int, E: int, D: int, capacity: int, H: int, dtype: torch.dtype) -> None:
    indices, tokens, weights = choose(T, K, E), draw(T, H, dtype=dtype), draw(T, K, dtype=dtype)
    slots = place_slots(indices, E)
    check(pack_places, *slots, D, capacity)
    packing = pack_slots(indices, E, D, capacity, Kernels("triton"))
    assert all(map(torch.equal, packing, pack_slots(indices, E, D, capacity, Kernels("torch"))))
    rows = draw(D * capacity, H, dtype=dtype)
    check(spread_rows, tokens, packing.order, packing.inverse, K, True, exact=True)
    check(sum_rows, rows, packing.inverse, K, weights, True)
    check(spread_grad, tokens, rows, packing.order, packing.inverse, weights, True)


ARRIVED = [(1, 1), (1, 6), (2, 1), (2, 3), (4, 20), (20, 3)]


def received(ranks: int, local: int, room: int | None) -> tuple[Tensor, int]:
    """Numbers of rows of each source and expert, some of them 0, and of all rows with padding."""
    arrived = torch.randint(0, 9, (ranks, local), device=DEVICE) * torch.randint(0, 2, (ranks, local), device=DEVICE)
    return arrived, int(arrived.sum()) if room is None else ranks * (int(arrived.sum(1).max()) + room)


@pytest.mark.parametrize(("ranks", "local"), ARRIVED)
@pytest.mark.parametrize("room", [None, 0, 5])
def test_received_rows_are_grouped_by_expert_then_by_source(ranks: int, local: int, room: int | None) -> None:
    arrived, rows = received(ranks, local, room)
    found = group_places(arrived.cpu(), rows, room is not None)
    place, parts = 0, dict[tuple[int, int], list[int]]()
    for source, counts in enumerate(arrived.tolist()):
        place = place if room is None else source * (rows // ranks)
        for expert, count in enumerate(counts):
            parts[expert, source] = list(range(place, place + count))
            place += count
    order = [place for part in sorted(parts) for place in parts[part]]
    assert found.order.tolist() == order + [-1] * (rows - len(order))
    assert found.inverse.tolist() == [order.index(place) if place in order else -1 for place in range(rows)]
    assert found.ends.tolist() == arrived.sum(0).cumsum(0).tolist()
    assert found.ends.dtype == torch.int32


@pytest.mark.triton
@pytest.mark.parametrize(("ranks", "local"), ARRIVED)
@pytest.mark.parametrize("room", [None, 0, 5])
def test_groups_by_triton(ranks: int, local: int, room: int | None) -> None:
    for factor in (0, 1, 100):
        arrived, rows = received(ranks, local, room)
        check(group_places, factor * arrived, factor * rows, room is not None)
