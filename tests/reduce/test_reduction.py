"""Gradients of earlier steps are set aside, and added in the memory that an optimizer has given them."""

from __future__ import annotations

import torch
from torch import nn

from overlap1f1b.reduce.reduction import GradientsAside


def test_earlier_gradients_come_back_in_their_own_memory() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    buffer = torch.tensor([1.0, 2.0])
    parameters[0].grad, parameters[1].grad = buffer[:], torch.tensor([5.0, 6.0])
    aside = GradientsAside()
    aside.take(parameters)
    assert [p.grad for p in parameters] == [None] * 3
    parameters[0].grad, parameters[2].grad = torch.tensor([10.0, 20.0]), torch.tensor([7.0, 8.0])
    aside.add_back(parameters[:1])
    assert buffer.tolist() == [11.0, 22.0]
    assert parameters[0].grad.data_ptr() == buffer.data_ptr()
    assert parameters[1].grad is None
    aside.add_back()
    aside.add_back()  # nothing is left
    grads = [p.grad.tolist() for p in parameters if p.grad is not None]
    assert grads == [[11.0, 22.0], [5.0, 6.0], [7.0, 8.0]]
