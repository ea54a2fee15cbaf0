"""SwiGLU with the weight of a row inside, against torch's own ops and finite differences."""

import pytest
import torch
import torch.nn.functional as F

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.swiglu import WeightedSwiGLU, swiglu, swiglu_rows, swiglu_rows_backward
from tests.kernels.against import CASES, DEVICE, check, draw


def test_against_autograd() -> None:
    gate_up = torch.randn(5, 6, requires_grad=True)
    gate, up = gate_up.chunk(2, -1)
    expected = F.silu(gate) * up
    grad = torch.randn(5, 3)
    (expected_grad,) = torch.autograd.grad(expected, gate_up, grad)
    for y in (WeightedSwiGLU.apply(gate_up, None, None, Kernels("torch")), swiglu(gate_up, Kernels("torch"))):
        assert torch.equal(y, expected)
        assert torch.equal(torch.autograd.grad(y, gate_up, grad)[0], expected_grad)


def test_gradients() -> None:
    gate_up = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True)
    for count in (None, torch.tensor([3])):
        args = gate_up, weights, count, Kernels("torch")
        assert torch.autograd.gradcheck(WeightedSwiGLU.apply, args)


def test_rows_beyond_the_count_are_zeros_whatever_they_hold() -> None:
    gate_up, weights = torch.randn(4, 6), torch.rand(4)
    gate_up[2:], weights[2:] = torch.nan, torch.nan
    y = swiglu_rows(gate_up, weights, torch.tensor([2]))
    assert torch.equal(y[:2], swiglu_rows(gate_up[:2], weights[:2]))
    assert torch.equal(y[2:], torch.zeros(2, 3))


@pytest.mark.triton
@pytest.mark.parametrize(("T", "K", "E", "H", "dtype"), CASES)
def test_triton(T: int, K: int, E: int, H: int, dtype: torch.dtype) -> None:
    R = T * K
    gate_up, grad, weights = draw(R, 2 * H, dtype=dtype), draw(R, H, dtype=dtype), draw(R, dtype=dtype)
    half = torch.tensor([R // 2], device=DEVICE)
    few = R == 1000 or H == 1100  # slow in the interpreter
    for count, factors in ((half, weights), (None, weights.float()), (half, None))[: 1 if few else 3]:
        check(swiglu_rows, gate_up, factors, count)
        check(swiglu_rows_backward, grad, gate_up, factors, count)
