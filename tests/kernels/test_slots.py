"""The places of rows and choices against loops."""

import pytest
import torch
from torch import Tensor

from overlap1f1b.kernels.slots import Places, place_rows, place_slots
from tests.kernels.against import DEVICE, check, choose


def by_loops(indices: Tensor, E: int, ranks: int, room: int | None, choices: int) -> Places:
    """:func:`place_rows`, token by token for each rank."""
    (T, K), local = indices.shape, E // ranks
    rows = list[int]()
    spots, inverse, counts = torch.full((T, K), -1), torch.full((T * K,), -1), torch.zeros(ranks, 1 + local).long()
    for rank in range(ranks):
        first = len(rows) if room is None else rank * room
        sent = kept = 0
        for token, experts in enumerate(indices.tolist()):
            mine = [k for k, e in enumerate(experts) if e // local == rank and 0 <= e < E]
            for k in mine:
                counts[rank, 1 + experts[k] % local] += 1
            counts[rank, 0] += bool(mine)
            if mine and (room is None or sent < room):
                fit = mine if room is None else mine[: max(choices - kept, 0)]
                for m, k in enumerate(fit):
                    spots[token, k] = (first + sent) * K + m
                    if not m:
                        inverse[token * K + k] = first + sent
                rows += [token] if fit else []
            sent, kept = sent + bool(mine), kept + len(mine)
        rows += [] if room is None else [-1] * (first + room - len(rows))
    rows += [-1] * (T * min(K, ranks) - len(rows)) if room is None else []
    return Places(torch.tensor(rows, dtype=torch.int64), spots, inverse, counts)


PLACED = [(0, 1, 2, 2), (1, 1, 1, 1), (7, 2, 6, 3), (9, 3, 4, 4), (9, 5, 8, 2), (20, 1, 5, 1), (150, 8, 64, 8)]
LIMITS = [(None, 0), (0, 0), (3, 3), (3, 4), (40, 50)]


@pytest.mark.parametrize(("T", "K", "E", "ranks"), PLACED)
@pytest.mark.parametrize(("room", "choices"), LIMITS)
def test_rows_lie_by_rank_then_by_token(T: int, K: int, E: int, ranks: int, room: int | None, choices: int) -> None:
    indices = torch.rand(T, E).argsort(-1)[:, :K]
    found = place_rows(indices, E, ranks, room, choices)
    for name, one, other in zip(Places._fields, found, by_loops(indices, E, ranks, room, choices), strict=True):
        assert torch.equal(one, other), name


def test_what_names_no_expert_has_no_place() -> None:
    order, spots, inverse, counts = place_rows(torch.tensor([[1, -1, 1], [4, 0, 3]]), 4, 2)
    assert order.tolist() == [0, 1, 1, -1]
    assert spots.tolist() == [[0, -1, 1], [-1, 3, 6]]
    assert inverse.tolist() == [0, -1, -1, -1, 1, 2]
    assert counts.tolist() == [[2, 1, 2], [1, 0, 1]]


@pytest.mark.triton
@pytest.mark.parametrize(
    ("T", "K", "E", "ranks"), [*PLACED, (1100, 2, 6, 3), pytest.param(700, 3, 300, 100, marks=pytest.mark.wide)]
)
def test_rows_by_triton(T: int, K: int, E: int, ranks: int) -> None:
    indices = choose(T, K, E)
    for room, choices in LIMITS[:: 1 if T < 100 else 4]:  # slow in the interpreter
        check(place_rows, indices, E, ranks, room, choices)
    if K > 1 and T > 1:
        indices[0, 1], indices[-1, 0] = indices[0, 0], -1
        check(place_rows, indices, E, ranks)


@pytest.mark.parametrize(("R", "M", "E"), [(0, 2, 3), (1, 1, 1), (7, 2, 5), (9, 3, 8)])
def test_choices_lie_by_expert_then_by_row(R: int, M: int, E: int) -> None:
    chosen = torch.randint(E + 1, (R, M), dtype=torch.int16)
    flat = chosen.view(-1).tolist()
    spots = [spot for expert in range(E) for spot in range(R * M) if flat[spot] == expert + 1]
    order, inverse, ends = place_slots(chosen, E, len(spots) + 2)
    assert order.tolist() == [*spots, -1, -1][: len(flat)]
    assert inverse.tolist() == [spots.index(spot) if spot in spots else -1 for spot in range(R * M)]
    assert ends.tolist() == [sum(0 < one <= expert + 1 for one in flat) for expert in range(E)]
    assert ends.dtype == torch.int32


@pytest.mark.triton
@pytest.mark.parametrize(("R", "M", "E"), [(0, 2, 3), (1, 8, 8), (1000, 1, 7), (125, 8, 300), (2500, 1, 5)])
def test_choices_by_triton(R: int, M: int, E: int) -> None:
    longer = torch.randint(E + 1, (R, M + 4), dtype=torch.int16, device=DEVICE)
    chosen = longer[:, :M]  # a part of longer rows
    for choices in {R * M, int((chosen > 0).sum())}:
        check(place_slots, chosen, E, choices)
