"""Where rows go, on one rank that plays all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.moe import GroupedExperts, MoEConfig
from overlap1f1b.moe.experts import Aggregate, Gather, WeightsIn
from overlap1f1b.moe.route import Route, WeightedRoute
from overlap1f1b.transport.exchange import EqualSplits

H = 3
TORCH = Kernels("torch")


def exchanged(routes: list[Route], rows: list[Tensor], *, back: bool) -> list[Tensor]:
    """What each rank receives."""
    parts = [r.split(route.receive if back else route.send) for r, route in zip(rows, routes, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(routes))]


def played(
    indices: list[Tensor], experts: int, capacity: float | None, kind: type[Route] = Route
) -> tuple[list[Route], list[Tensor]]:
    """The rows that every expert receives, and the routes."""
    ranks = len(indices)
    routes = [kind(index, experts, ranks, TORCH, capacity=capacity) for index in indices]
    for rank, route in enumerate(routes):
        route.arrive(torch.stack([other.told.view(ranks, -1)[rank] for other in routes]))
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
    route = Route(torch.tensor([[0], [0], [0], [1], [3]]), 4, 2, TORCH, capacity=0.8)
    assert route.send == [2, 2]
    assert route.dropped is not None
    assert route.dropped.tolist() == [1, 1, 0, 0]
    assert route.counts.tolist() == [2, 0, 0, 1]


def test_no_tokens() -> None:
    for capacity in (None, 1.25):
        route = Route(torch.empty(0, 2, dtype=torch.int64), 4, 2, TORCH, capacity=capacity)
        route.arrive(torch.zeros_like(route.told).view(2, -1))
        rows = route.group(route.gather(torch.empty(0, H), torch.empty(0, 2)))
        assert rows.shape == (0, H)
        assert route.gather_backward(route.ungroup(rows))[0].shape == (0, H)


def test_one_rank_needs_no_host() -> None:
    """The counts are not read: sizes follow from the number of tokens."""
    route = Route(torch.tensor([[0, 2], [1, 2]]), 3, 1, TORCH)
    counts = route.counts.view(1, -1)
    route.arrive(counts)
    assert (route.send, route.receive) == ([4], [4])
    assert route.expert_rows._host is None
    assert list(route.expert_rows) == [1, 1, 2]
    assert route.expert_rows.ends.tolist() == [1, 2, 4]


def test_a_slot_that_the_device_counted_for_no_expert_is_refused() -> None:
    """On a GPU nothing looks at the indices before the counts are on the host."""
    route = Route(torch.tensor([[0, 1], [2, 3]]), 4, 2, TORCH)
    route.counts = torch.tensor([1, 1, 1, 0])
    with pytest.raises(ValueError, match="indices name an expert that is none; allowed: 0 to 3"):
        route.arrive(torch.tensor([[1, 1], [0, 0]]))


E, H, I, K = 7, 6, 5, 3  # noqa: E741  the letters of the legend


def both(dtype: torch.dtype, choices: Tensor, wide: torch.dtype | None = None) -> list[tuple[Tensor, ...]]:
    """Outputs and gradients by tokens, weights and parameters of both kinds."""
    found = []
    for weights_in in ("combine", "activation"):
        torch.manual_seed(0)
        experts = GroupedExperts(E, H, I, weights_in=weights_in, dtype=dtype)  # type: ignore[arg-type]
        experts.reset_parameters(std=1.0)
        tokens = torch.randn(len(choices), H, dtype=dtype, requires_grad=True)
        weights = torch.rand(choices.shape, dtype=wide or dtype, requires_grad=True)
        y = experts(tokens, choices, weights)
        grad = torch.randn_like(y)
        found.append((y.detach(), *torch.autograd.grad(y, (tokens, weights, *experts.parameters()), grad)))
    return found


CHOICES = [
    torch.tensor([[0, 2, 5], [2, 0, 3], [5, 2, 0], [6, 5, 2]]),  # experts 1 and 4 have no token
    torch.tensor([[4, 1, 0]]),
    torch.empty(0, 3, dtype=torch.int64),
]


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize(
    ("dtype", "wide", "limit"),
    [
        (torch.float64, None, 1e-12),
        (torch.float32, None, 1e-5),
        (torch.float32, torch.bfloat16, 1e-2),  # the weight's gradient is rounded
        (torch.bfloat16, None, 3e-2),
        (torch.bfloat16, torch.float32, 3e-2),
    ],
)
def test_equal_weights_in_the_sum(choices: Tensor, dtype: torch.dtype, wide: torch.dtype | None, limit: float) -> None:
    for outside, inside in zip(*both(dtype, choices, wide), strict=True):
        assert outside.dtype == inside.dtype
        assert float((outside - inside).double().norm()) <= limit * float(outside.double().norm())


@pytest.mark.parametrize("weights_in", ["combine", "activation"])
def test_gradients_are_those_of_finite_differences(weights_in: WeightsIn) -> None:
    """Through the plain path: permutation, product, activation, sum."""
    experts = GroupedExperts(E, H, I, weights_in=weights_in, dtype=torch.float64)
    experts.reset_parameters(std=1.0)
    tokens = torch.randn(4, H, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, K, dtype=torch.float64, requires_grad=True)
    parameters = tuple(p.detach().clone().requires_grad_() for p in experts.parameters())

    def call(tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        given = {"gate_up": gate_up, "down": down}
        return torch.func.functional_call(experts, given, (tokens, CHOICES[0], weights))

    assert torch.autograd.gradcheck(call, (tokens, weights, *parameters))


@pytest.mark.parametrize("kind", [Route, WeightedRoute])
def test_gradients_under_a_capacity(kind: type[Route]) -> None:
    """Of rows in padded room, some of which are left out."""
    route = kind(CHOICES[0], 8, 2, TORCH, capacity=0.75)
    assert route.dropped is not None
    assert route.dropped.any()
    tokens = torch.randn(4, H, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, K, dtype=torch.float64, requires_grad=True)

    def call(tokens: Tensor, weights: Tensor) -> Tensor:
        rows = Gather.apply(tokens, weights, route)
        if isinstance(route, WeightedRoute):
            rows, factors = route.opened(rows)
            rows = rows * factors.unsqueeze(1)
        return Aggregate.apply(rows * rows.sin(), weights, route, None)

    assert torch.autograd.gradcheck(call, (tokens, weights))


def test_autocast() -> None:
    """The products are computed in bfloat16, as with weights in the sum; gradients come in the parameters' dtype."""
    torch.manual_seed(0)
    x, weights, choices = torch.randn(9, H), torch.rand(9, K), torch.rand(9, E).topk(K).indices
    found = []
    for where, low in (("combine", True), ("activation", True), ("activation", False)):
        torch.manual_seed(0)
        experts = GroupedExperts(E, H, I, weights_in=where)  # type: ignore[arg-type]
        experts.reset_parameters(std=1.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = experts(x, choices, weights)
        assert y.dtype == torch.float32
        found.append((y.detach(), *torch.autograd.grad(y.sum(), experts.parameters())))
    for outside, inside, exact in zip(*found, strict=True):
        assert inside.dtype == torch.float32
        assert 1e-4 < float((inside - exact).norm() / exact.norm()) < 3e-2
        assert float((inside - outside).norm() / outside.norm()) < 3e-2


def test_refused() -> None:
    class Own(GroupedExperts):
        def compute(self, rows: Tensor, *_: object) -> Tensor:
            return rows

    with pytest.raises(
        ValueError, match=r"^weights_in='activation' of Own, which computes itself; allowed: 'combine'$"
    ):
        Own(E, H, I, weights_in="activation")
    wrong: WeightsIn = "input"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^weights_in='input'; allowed: 'combine', 'activation'$"):
        GroupedExperts(E, H, I, weights_in=wrong)
    with pytest.raises(ValueError, match=r"^weights_in='input'; allowed: 'combine', 'activation'$"):
        MoEConfig(weights_in=wrong)
