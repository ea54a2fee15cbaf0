"""The state of a microbatch."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap1f1b.engine import Microbatch, Stage
from overlap1f1b.play.microbatch import Phase


def microbatch(**options: Any) -> Microbatch:
    return Microbatch(Stage([nn.Linear(2, 2)]), torch.randn(3, 2), **options)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda x: x, r"loss_fn returns shape \(2,\); allowed: one number"),
        (lambda x: 3, "loss_fn returns a value of int; allowed: one number"),
        (lambda x: x.sum() * 1j, "loss_fn returns a number of torch.complex64; allowed: a real one"),
        (lambda x: x.detach().sum(), "the loss of block 0's outputs requires no gradient"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused(loss_fn: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        microbatch(loss_fn=loss_fn).with_loss((torch.ones(2, requires_grad=True) * 3,), "block 0")


def test_stages_of_one_rank_pass_tensors_on_without_a_copy() -> None:
    first, second = microbatch(), Microbatch(Stage([nn.Linear(2, 2)], number=1))
    second.follow(first)
    passed = torch.ones(2)
    first.end_forward((passed,), (True,))
    (leaf,) = second.take_activations()
    assert leaf is passed
    assert leaf.requires_grad
    assert first.outputs is None
    second.gradients, second.phase = (torch.full((2,), 4.0),), Phase.WEIGHTS
    (grad,) = first.take_gradients()
    assert isinstance(grad, Tensor)
    assert grad.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stage": "x"}, "stage='x'; allowed: Stage"),
        ({"inputs": "x"}, "inputs='x'; allowed: a tensor or several"),
        ({"target": [3]}, "target=[3]; allowed: a tensor or several"),
        ({"loss_fn": nn.MSELoss}, "loss_fn=MSELoss, a class; allowed: a function, or an object such as MSELoss()"),
        ({"loss_grad": "1"}, "loss_grad='1'; allowed: a finite number"),
    ],
)
def test_values_of_another_kind(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Microbatch(**{"stage": Stage([nn.Linear(2, 2)]), "inputs": torch.randn(3, 2)} | given)
