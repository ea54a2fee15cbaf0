"""The choice of experts by Triton, and the backward of the twin. (The twin's forward: tests/moe/test_router.py.)"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.routing import (
    RouteTokens,
    Rule,
    WideProduct,
    count_choices_,
    gate_logits,
    route_tokens,
    route_tokens_backward,
)
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
    check(route_tokens_backward, draw(*weights.shape), draw(E).expand(T, E), scores, indices, rule)
    check(route_tokens, logits, bias, rule, torch.bfloat16)
    check(route_tokens_backward, draw(*weights.shape, dtype=torch.bfloat16), None, scores, indices, rule)


@pytest.mark.triton
@pytest.mark.parametrize(("T", "K", "E"), [(0, 2, 3), (1, 1, 1), (5, 3, 300), (3000, 8, 65)])
def test_choices_are_counted(T: int, K: int, E: int) -> None:
    indices, before = torch.randint(-1, E, (T, K), device=DEVICE), torch.randint(2**40, (E,), device=DEVICE)
    expected = before + torch.bincount(indices.flatten() + 1, minlength=1 + E)[1:]  # −1 is none
    for choice in ("torch", "triton", "triton"):
        load, version = before.clone(), before.clone()._version
        assert Kernels(choice)(count_choices_, load, indices) is load
        assert torch.equal(load, expected)
        assert load._version > version or not T  # the engine looks for buffers that change


def error(found: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor) -> float:
    """The largest error beyond the rounding to the result's dtype, as a share of the sum of all summands' sizes."""
    rounding = exact.abs() * torch.finfo(found.dtype).eps / 2
    return float((((found.double() - exact).abs() - rounding) / sizes).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_16_bits_is_as_exact_as_one_of_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64: logits and gradients, and nothing wider than 16 bits is kept for the backward."""
    if DEVICE == "cpu":  # which has no such product; here the Function's backward and what it keeps is tried
        monkeypatch.setattr(torch, "mm", lambda a, b, *, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    tokens, weight = draw(300, 2048, dtype=dtype).requires_grad_(), draw(65, 2048, dtype=dtype).requires_grad_()
    grad, kept = draw(300, 65), list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = gate_logits(tokens, weight) if DEVICE == "cuda" else WideProduct.apply(tokens, weight)
    assert type(found.grad_fn).__name__ == "WideProductBackward"
    assert found.dtype == torch.float32
    assert {t.dtype for t in kept} == {dtype}
    x, w, g = tokens.detach().double(), weight.detach().double(), grad.double()
    logits = torch.nn.functional.linear(tokens.float(), weight.float())  # the way without it
    for result, *grads in ((y.detach(), *torch.autograd.grad(y, (tokens, weight), grad)) for y in (found, logits)):
        assert error(result, x @ w.t(), x.abs() @ w.t().abs()) < 1e-6
        assert error(grads[0], g @ w, g.abs() @ w.abs()) < 1e-6
        assert error(grads[1], g.t() @ x, g.t().abs() @ x.abs()) < 1e-6
        assert [grad.dtype for grad in grads] == [dtype, dtype]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_gates_of_other_dtypes_multiply_float32_copies_on_a_gpu() -> None:
    wide, narrow = draw(5, 32), draw(5, 32, dtype=torch.bfloat16)
    for tokens, weight in ((narrow, wide), (wide, narrow), (wide, wide), (wide.double(), wide.double())):
        assert gate_logits(tokens, weight).dtype == torch.promote_types(tokens.dtype, torch.float32)
    expected = torch.nn.functional.linear(narrow.float(), narrow.float())
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(gate_logits(narrow, narrow), expected)


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
