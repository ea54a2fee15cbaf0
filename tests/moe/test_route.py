"""Where rows go, on one rank that plays all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from overlap1f1b.moe.route import Route, WeightedRoute
from overlap1f1b.transport.exchange import EqualSplits

H = 3


def exchanged(routes: list[Route], rows: list[Tensor], *, back: bool) -> list[Tensor]:
    """What each rank receives."""
    parts = [r.split(route.receive if back else route.send) for r, route in zip(rows, routes, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(routes))]


def played(
    indices: list[Tensor], experts: int, capacity: float | None, kind: type[Route] = Route
) -> tuple[list[Route], list[Tensor]]:
    """The rows that every expert receives, and the routes."""
    ranks = len(indices)
    routes = [kind(index, experts, ranks, capacity=capacity) for index in indices]
    for rank, route in enumerate(routes):
        route.arrive(torch.stack([other.counts.view(ranks, -1)[rank] for other in routes]))
    tokens = [torch.arange(len(index) * H).view(-1, H) + 1000.0 * (1 + rank) for rank, index in enumerate(indices)]
    weights = [torch.rand(index.shape) for index in indices]
    sent = [route.gather(*given) for route, *given in zip(routes, tokens, weights, strict=True)]
    received = exchanged(routes, sent, back=False)
    grouped = [route.group(rows) for route, rows in zip(routes, received, strict=True)]
    returned = exchanged(
        routes, [route.ungroup(rows) for route, rows in zip(routes, grouped, strict=True)], back=True
    )  # fmt: skip
    for rank, route in enumerate(routes):
        # Every expert returns what it was given: K times the token, where nothing was lost.
        total, of_slots = route.gather_backward(returned[rank])
        if route.dropped is None or not route.dropped.any():
            assert torch.equal(total, tokens[rank] * route.top_k)
            assert of_slots is None if kind is Route else torch.equal(of_slots, weights[rank])
    return routes, [rows[: sum(route.expert_rows)] for route, rows in zip(routes, grouped, strict=True)]


@pytest.mark.parametrize(("ranks", "experts"), [(1, 4), (2, 2), (2, 6), (3, 9)])
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("kind", [Route, WeightedRoute])
def test_equal_splits_bring_the_same_rows_to_the_same_experts(
    ranks: int, experts: int, skewed: bool, kind: type[Route]
) -> None:
    generator = torch.Generator().manual_seed(ranks * experts)
    indices = [
        torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(7)]) % (2 if skewed else experts)
        for _ in range(ranks)
    ]
    torch.manual_seed(0)
    exact, wanted = played(indices, experts, None, kind)
    torch.manual_seed(0)
    padded, found = played(indices, experts, float(ranks), kind)  # room for every row
    for a, b, rows, other in zip(exact, padded, wanted, found, strict=True):
        assert list(a.expert_rows) == list(b.expert_rows)
        assert torch.equal(rows[:, :H], other[:, :H])
        if kind is WeightedRoute:  # a weight lies at the end of its row
            assert torch.equal(rows[:, -4], other[:, -4])
        assert isinstance(b.send, EqualSplits)
        assert b.dropped is not None
        assert not b.dropped.any()
    assert sum(map(len, wanted)) == ranks * 14
    source = torch.cat([rows[:, 0] for rows in wanted])  # (expert, source, slot) order
    assert len(set(source.tolist())) <= ranks * 7


def test_what_finds_no_room_is_counted() -> None:
    route = Route(torch.tensor([[0], [0], [0], [1], [3]]), 4, 2, capacity=0.8)
    assert route.send == [2, 2]
    assert route.dropped is not None
    assert route.dropped.tolist() == [1, 1, 0, 0]
    assert route.counts.tolist() == [2, 0, 0, 1]


def test_no_tokens() -> None:
    for capacity in (None, 1.25):
        route = Route(torch.empty(0, 2, dtype=torch.int64), 4, 2, capacity=capacity)
        route.arrive(torch.zeros(2, 2, dtype=torch.int64))
        rows = route.group(route.gather(torch.empty(0, H), torch.empty(0, 2)))
        assert rows.shape == (0, H)
        assert route.gather_backward(route.ungroup(rows))[0].shape == (0, H)


def test_one_rank_needs_no_host() -> None:
    """The counts are not read: sizes follow from the number of tokens."""
    route = Route(torch.tensor([[0, 2], [1, 2]]), 3, 1)
    counts = route.counts.view(1, -1)
    route.arrive(counts)
    assert (route.send, route.receive) == ([4], [4])
    assert route.expert_rows._host is None
    assert list(route.expert_rows) == [1, 1, 2]
    assert route.expert_rows.ends.tolist() == [1, 2, 4]


def test_a_slot_that_the_device_counted_for_no_expert_is_refused() -> None:
    """On a GPU nothing looks at the indices before the counts are on the host."""
    route = Route(torch.tensor([[0, 1], [2, 3]]), experts=4, ranks=2)
    route.counts = torch.tensor([1, 1, 1, 0])
    with pytest.raises(ValueError, match="indices name an expert that is none; allowed: 0 to 3"):
        route.arrive(torch.tensor([[1, 1], [0, 0]]))
