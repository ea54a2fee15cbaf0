"""How gradients get to parameters, and where they enter a graph."""

import warnings

import pytest
import torch
from torch import nn

from overlap1f1b.play.gradients import Root, accumulate


def test_accumulating_fires_each_parameters_hooks_once_and_takes_a_first_gradient_as_it_is() -> None:
    weight, fired = nn.Parameter(torch.zeros(2)), []
    weight.register_post_accumulate_grad_hook(fired.append)
    accumulate({weight: torch.ones(2)})
    first = weight.grad
    accumulate({weight: torch.ones(2)})
    assert weight.grad is first
    assert weight.grad.tolist() == [2, 2]
    assert len(fired) == 2


def test_accumulating_goes_through_a_weight_that_is_computed_of_a_parameter() -> None:
    """As a parametrisation does; torch warns who reads the ``.grad`` of such a weight."""
    parameter = nn.Parameter(torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulate({parameter * 2: torch.ones(3)})  # type: ignore[dict-item]
    assert parameter.grad.tolist() == [2.0] * 3


def test_a_root_takes_gradients_of_its_shape_or_a_scalar() -> None:
    root = Root.at(torch.zeros(2, 3, requires_grad=True) * 2)
    assert root.checked(torch.tensor(4.0), "block 0").tolist() == [[4.0] * 3] * 2
    with pytest.raises(ValueError, match=r"a gradient of shape \(3, 2\) for an output of block 0; allowed: \(2, 3\)"):
        root.checked(torch.zeros(3, 2), "block 0")
    assert Root.at(torch.zeros(2)) is None
