"""The choice of experts by Triton, and the backward of the twin. (The twin's forward: tests/moe/test_router.py.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.routing import RouteTokens, Rule, route_tokens, route_tokens_backward
from tests.kernels.against import DEVICE, check, draw

RULES = [
    (1, Rule(1)),
    (7, Rule(1, scaling=2.5)),
    (7, Rule(7, normalize=True)),
    (30, Rule(8, softmax=False, normalize=True, scaling=2.5)),
    (12, Rule(3, softmax=False, groups=4, top_groups=2)),
    (15, Rule(2, normalize=True, groups=3, top_groups=1)),
    (6, Rule(2, softmax=False, groups=6, top_groups=3)),
]


@pytest.mark.parametrize(("E", "rule"), RULES)
def test_gradients(E: int, rule: Rule) -> None:
    logits = torch.randn(9, E, dtype=torch.float64, requires_grad=True)
    bias = torch.rand(E, dtype=torch.float64)

    def weights_and_scores(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return RouteTokens.apply(x, bias, rule, Kernels("torch"))[1:]

    assert torch.autograd.gradcheck(weights_and_scores, logits)
    indices, *found = RouteTokens.apply(logits, bias, rule, Kernels("torch"))
    expected_indices, *expected = route_tokens(logits, bias, rule)
    assert torch.equal(indices, expected_indices)
    for own, torchs in zip(found, expected, strict=True):  # one of both may have no gradient
        grad = torch.randn_like(own)
        (a,), (b,) = (torch.autograd.grad(x, logits, grad, retain_graph=True) for x in (own, torchs))
        torch.testing.assert_close(a, b)


@pytest.mark.triton
@pytest.mark.parametrize("T", [0, 1, 1000])
@pytest.mark.parametrize(("E", "rule"), RULES)
def test_triton(E: int, rule: Rule, T: int) -> None:
    logits, bias = 3 * draw(T, E), torch.rand(E, device=DEVICE)
    # Scores differ by rounding; a draw in which that decides a choice would fail here, and none of these does.
    check(route_tokens, logits, bias, rule)
    indices, weights, scores = route_tokens(logits, bias, rule)
    check(route_tokens_backward, draw(*weights.shape), None, scores, indices, rule)
    check(route_tokens_backward, draw(*weights.shape), draw(*scores.shape), scores, indices, rule)


@pytest.mark.triton
def test_of_equal_scores_the_first_is_chosen() -> None:
    logits = torch.zeros(3, 10, device=DEVICE)
    for rule in (Rule(4), Rule(4, softmax=False, groups=5, top_groups=2)):
        indices, weights, _ = Kernels("triton")(route_tokens, logits, torch.zeros(10, device=DEVICE), rule)
        assert indices.tolist() == [[0, 1, 2, 3]] * 3
        assert (weights == weights[0, 0]).all()


@contextmanager
def comparing() -> Iterator[None]:
    """Let the interpreter find the largest as a GPU does, by comparisons, which are false for a NaN; numpy finds it."""
    from triton.language import int32, standard
    from triton.runtime.interpreter import ReduceOps

    plain = ReduceOps.apply_impl

    def apply(self: Any, input: Any) -> Any:
        if self.combine_fn != standard._argmax_combine_tie_break_left:
            return plain(self, input)
        values = input[0].handle.data
        best, place = values[:, 0], np.zeros(len(values), dtype=np.int32)
        for column in range(1, values.shape[1]):
            stays = best >= values[:, column]
            best, place = np.where(stays, best, values[:, column]), np.where(stays, place, column)
        return self.to_tensor(best, input[0].dtype), self.to_tensor(place.astype(np.int32), int32)

    with patch.object(ReduceOps, "apply_impl", apply):
        yield


@pytest.mark.triton
@pytest.mark.parametrize(("E", "rule"), RULES)
def test_a_token_whose_scores_are_no_numbers_has_experts(E: int, rule: Rule) -> None:
    logits = draw(3, E)
    logits[1], logits[2, E // 2] = float("nan"), float("nan")
    args = logits, torch.zeros(E, device=DEVICE), rule
    with comparing() if DEVICE == "cpu" else nullcontext():
        indices, weights, _ = Kernels("triton")(route_tokens, *args)
    expected, twins, _ = route_tokens(*args)
    assert torch.equal(indices, expected)
    assert torch.equal(weights.isnan(), twins.isnan())
