"""Where rows go, on one rank that plays all of them."""

import pytest
import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.permute import Layout
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.moe.experts import Routed, Weigh, WeightsIn
from overlap1f1b.moe.route import Route
from overlap1f1b.transport.calls import ExchangedRows
from overlap1f1b.transport.exchange import LocalExchange, Transfer

H = 3
TORCH = Kernels("torch")


def exchanged(routes: list[Route], rows: list[Tensor], *, back: bool) -> list[Tensor]:
    """What each rank receives."""
    parts = [r.split(route.receive if back else route.send) for r, route in zip(rows, routes, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(routes))]


def played(
    indices: list[Tensor], experts: int, capacity: float | None
) -> tuple[list[Route], list[tuple[Tensor, Tensor]]]:
    """The rows and weights of every expert's choices, and the routes."""
    ranks = len(indices)
    routes = [Route(index, experts, ranks, TORCH, capacity=capacity) for index in indices]
    for rank, route in enumerate(routes):
        sent = [other.counts_to_send.view(ranks, -1)[rank] for other in routes]
        route.arrive(torch.stack(sent if ranks > 1 or capacity else [route.counts_to_send]))
    tokens = [torch.arange(len(index) * H).view(-1, H) + 1000.0 * (1 + rank) for rank, index in enumerate(indices)]
    weights = [torch.rand(index.shape) for index in indices]
    sent = [route.pack(*given) for route, *given in zip(routes, tokens, weights, strict=True)]
    received = exchanged(routes, sent, back=False)
    expanded = [route.expand(rows) for route, rows in zip(routes, received, strict=True)]
    # Every expert returns what it was given.
    each = list(zip(routes, expanded, strict=True))
    sums = exchanged(routes, [route.weigh(*pair) for route, pair in each], back=True)
    plain = exchanged(routes, [route.weigh(rows, None) for route, (rows, _) in each], back=True)
    grads = exchanged(routes, [route.expand_backward(*pair) for route, pair in each], back=True)

    for rank, route in enumerate(routes):
        total, of_slots = route.pack_backward(grads[rank])
        if route.dropped is None or not route.dropped.any():
            back, weighted = (rows[rank] if route.order is None else route.gather(rows[rank]) for rows in (plain, sums))
            assert torch.equal(back, tokens[rank] * route.top_k)
            torch.testing.assert_close(weighted, tokens[rank] * weights[rank].sum(1, keepdim=True))
            assert torch.equal(total, tokens[rank] * route.top_k)
            assert torch.equal(of_slots, weights[rank])
    counts = [sum(route.expert_rows) for route in routes]
    return routes, [(rows[:n], w[:n]) for n, (rows, w) in zip(counts, expanded, strict=True)]


@pytest.mark.parametrize(("ranks", "experts", "top_k"), [(1, 4, 2), (2, 2, 2), (2, 6, 3), (3, 9, 2), (2, 8, 8)])
@pytest.mark.parametrize("skewed", [False, True])
def test_equal_splits_bring_the_same_rows_to_the_same_experts(
    ranks: int, experts: int, top_k: int, skewed: bool
) -> None:
    generator = torch.Generator().manual_seed(ranks * experts)
    among = top_k if skewed else experts
    indices = [torch.rand(7, among, generator=generator).argsort(1)[:, :top_k] for _ in range(ranks)]
    torch.manual_seed(0)
    exact, wanted = played(indices, experts, None)
    torch.manual_seed(0)
    padded, found = played(indices, experts, float(ranks * top_k))  # room for every row
    for a, b, one, other in zip(exact, padded, wanted, found, strict=True):
        assert list(a.expert_rows) == list(b.expert_rows)
        assert all(map(torch.equal, one, other))
        assert not b.dropped.any()
        chosen = a.indices.div(experts // ranks, rounding_mode="floor")
        assert a.send == [int((chosen == rank).any(1).sum()) for rank in range(ranks)]  # once a token and rank
    assert sum(len(rows) for rows, _ in wanted) == ranks * 7 * top_k
    source = torch.cat([rows[:, 0] for rows, _ in wanted])  # (expert, source, token) order
    assert len(set(source.tolist())) <= ranks * 7


def test_what_finds_no_room_is_counted() -> None:
    """The room of rows is that of experts that are all equally likely, and later tokens are left out."""
    route = Route(torch.tensor([[0, 1], [0, 1], [0, 2], [1, 2], [3, 2]]), 4, 2, TORCH, capacity=0.8)
    assert route.send == [4, 4]  # 0.8 · 5 · 5 / 6, rounded up
    assert route.room == 4  # 0.8 · 10 / 2
    assert route.dropped.tolist() == [1, 1, 0, 0]
    assert route.counts.tolist() == [[4, 3, 3], [3, 3, 1]]
    assert route.spots.tolist() == [[0, 1], [2, 3], [-1, 8], [-1, 10], [12, 13]]


def test_no_tokens() -> None:
    for capacity in (None, 1.25):
        route = Route(torch.empty(0, 2, dtype=torch.int64), 4, 2, TORCH, capacity=capacity)
        route.arrive(torch.zeros_like(route.counts_to_send).view(2, -1))
        rows, weights = route.expand(route.pack(torch.empty(0, H), torch.empty(0, 2)))
        assert rows.shape == (0, H)
        assert route.gather(route.weigh(rows, weights)).shape == (0, H)
        assert route.pack_backward(route.expand_backward(rows, weights))[0].shape == (0, H)


def test_one_rank_needs_no_host() -> None:
    """The counts are not read: sizes follow from the number of tokens, whose rows they are."""
    route = Route(torch.tensor([[0, 2], [1, 2]]), 3, 1, TORCH)
    route.arrive(route.counts_to_send)
    assert (route.send, route.receive) == ([2], [2])
    route.expand(route.pack(torch.ones(2, H), torch.ones(2, 2)))
    assert route.expert_rows.host is None
    assert list(route.expert_rows) == [1, 1, 2]
    assert route.expert_rows.ends.tolist() == [1, 2, 4]


def test_a_slot_that_the_device_counted_for_no_expert_is_refused() -> None:
    """On a GPU the host does not look at the indices: if some have no row, the device looks whether they may."""
    route = Route(torch.tensor([[0, 1], [2, -1]]), 4, 2, TORCH)
    assert route.counts.tolist() == [[1, 1, 1], [1, 1, 0]]
    route.arrive(torch.tensor([[1, 1, 1], [0, 0, 0]]))
    route.indices = torch.tensor([[0, 1], [2, 4]])
    with pytest.raises(RuntimeError, match="indices name an expert that is none; allowed: -1 to 3"):
        route.arrive(torch.tensor([[1, 1, 1], [0, 0, 0]]))


def test_a_device_sends_what_was_counted_of_the_room_that_it_made() -> None:
    """Without a look at values it makes room for a row for each choice; gradients come back for it all."""
    route = Route(CHOICES[0], 8, 2, TORCH)
    sizes = route.counts[:, 0].tolist()
    route.partial, route.order = True, torch.cat([route.order, torch.full((8 - len(route.order),), -1)])
    tokens, weights = torch.randn(4, H, requires_grad=True), torch.rand(4, 3, requires_grad=True)
    packed = Routed.apply(route.pack, route.pack_backward, tokens, weights)
    sent = ExchangedRows.apply(packed, Bare(), sizes, sizes)
    assert len(packed) == 8
    assert len(sent) == sum(sizes) < 8
    layout = Layout.of(tokens, weights)
    (rows, carried, _), (of_rows, of_weights, _) = layout.opened(sent), layout.opened(grad := torch.rand_like(sent))
    found = torch.autograd.grad(sent, (tokens, weights), grad)
    for token in range(4):
        mine = route.order[: sum(sizes)] == token
        assert torch.equal(rows[mine], tokens[token].expand(int(mine.sum()), H))
        torch.testing.assert_close(found[0][token], of_rows[mine].sum(0))
    assert torch.equal(carried.reshape(-1)[route.spots], weights)
    assert torch.equal(found[1], of_weights.reshape(-1)[route.spots])


class Bare(LocalExchange):
    """An exchange of whatever rows with oneself."""

    def rows(self, source: Tensor, *_: object) -> Transfer[Tensor]:
        return Transfer(source.clone())


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
    experts = GroupedExperts(E, 2, 3, weights_in=weights_in, dtype=torch.float64)
    experts.reset_parameters(std=1.0)
    tokens = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, K, dtype=torch.float64, requires_grad=True)
    parameters = tuple(p.detach().clone().requires_grad_() for p in experts.parameters())

    def call(tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        given = {"gate_up": gate_up, "down": down}
        return torch.func.functional_call(experts, given, (tokens, CHOICES[0], weights))

    assert torch.autograd.gradcheck(call, (tokens, weights, *parameters))


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_under_a_capacity(weighted: bool) -> None:
    """Of rows in padded room, some of which are left out."""
    route = Route(CHOICES[0], 8, 2, TORCH, capacity=0.75)
    assert route.dropped.any()
    tokens = torch.randn(4, H, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, K, dtype=torch.float64, requires_grad=True)

    def call(tokens: Tensor, weights: Tensor) -> Tensor:
        packed = Routed.apply(route.pack, route.pack_backward, tokens, weights)
        rows, factors = Routed.apply(route.expand, route.expand_backward, packed)
        results = rows.sin() if weighted else rows.sin() * factors.unsqueeze(1)
        sums = Weigh.apply(results, factors if weighted else None, route)
        return Routed.apply(route.gather, route.gather_backward, sums)

    # Rows for the second rank stand for those of the first here: both have as much room.
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
    with pytest.raises(ValueError, match=r"^weights_in='input'; allowed: combine or activation$"):
        GroupedExperts(E, H, I, weights_in=wrong)
