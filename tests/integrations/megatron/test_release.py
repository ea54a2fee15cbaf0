"""Outputs whose values are freed, and their backward."""

import doctest

import pytest
import torch

from overlap1f1b.integrations.megatron import custom_backward, deallocate_output_tensor, release


def test_backward_through_a_released_output() -> None:
    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    grad = torch.randn(5, 4)
    expected = torch.autograd.grad((x @ weight).tanh() * 2, (x, weight), grad)
    out = (x @ weight).tanh() * 2
    storage = out.untyped_storage()
    deallocate_output_tensor(out)
    assert out.shape == (1,)
    assert out.untyped_storage().data_ptr() != storage.data_ptr()
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch.autograd.backward(out, grad)
    custom_backward(out, grad)
    assert torch.equal(x.grad, expected[0])  # type: ignore[arg-type]
    assert torch.equal(weight.grad, expected[1])  # type: ignore[arg-type]


def test_examples_of_released_outputs() -> None:
    assert doctest.testmod(release) == (0, 5)


def test_backward_of_a_scalar_needs_no_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    custom_backward((x * 2).sum(), None)
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


def test_lists_and_mappings_are_released() -> None:
    outs = [torch.ones(3) * i for i in range(4)]
    deallocate_output_tensor([outs[0], None, {"a": outs[1]}])
    deallocate_output_tensor(outs[2], False)
    deallocate_output_tensor(None)
    assert [len(out) for out in outs] == [1, 1, 3, 3]


def test_bad_releases_are_named() -> None:
    with pytest.raises(ValueError, match=r"an output of shape \(2,\) that is a view; allowed"):
        deallocate_output_tensor(torch.ones(3)[:2])
    with pytest.raises(ValueError, match="an output of type str; allowed"):
        deallocate_output_tensor("x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an output of 3 elements; allowed: one element"):
        custom_backward(torch.ones(3, requires_grad=True) * 2, torch.ones(3))
    with pytest.raises(ValueError, match=r"^grad_output=1; allowed: Tensor or None$"):
        custom_backward(torch.ones(1, requires_grad=True) * 2, 1)  # type: ignore[arg-type]
