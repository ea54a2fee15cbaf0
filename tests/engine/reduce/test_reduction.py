"""Gradients of earlier steps, set aside."""

from __future__ import annotations

import torch
from torch import nn

from overlap1f1b.engine.reduce.reduction import GradientsAside


def test_a_steps_gradients_are_alone_and_the_earlier_ones_come_back() -> None:
    old, new, both = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    old.grad, both.grad = torch.ones(2), torch.ones(2)
    aside = GradientsAside()
    aside.take([old, new, both])
    assert (old.grad, new.grad, both.grad) == (None, None, None)
    new.grad, both.grad = torch.full((2,), 2.0), torch.full((2,), 2.0)
    aside.add_back()
    assert [p.grad.tolist() for p in (old, new, both) if p.grad is not None] == [[1, 1], [2, 2], [3, 3]]
    aside.add_back()  # they are added once
    assert both.grad.tolist() == [3, 3]
