"""Rows that carry their weights to the experts: values and gradients are those of weights in the sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from overlap1f1b.moe import GroupedExperts, MoEConfig
from overlap1f1b.moe.experts import Aggregate, Gather, WeightsIn
from overlap1f1b.moe.route import Route, WeightedRoute

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
    route = kind(CHOICES[0], 8, 2, capacity=0.75)
    assert route.dropped is not None
    assert route.dropped.any()
    tokens = torch.randn(4, H, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, K, dtype=torch.float64, requires_grad=True)

    def call(tokens: Tensor, weights: Tensor) -> Tensor:
        rows = Gather.apply(tokens, weights, route)
        if isinstance(route, WeightedRoute):
            rows, factors = route.opened(rows)
            rows = rows * factors.unsqueeze(1)
        return Aggregate.apply(rows * rows.sin(), weights, route)

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
