"""Own Functions that go to C++ at once give what ``apply`` gives, also under modes and transforms."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from overlap1f1b.transport.functions import direct, quick_apply


@direct
class Square(torch.autograd.Function):
    generate_vmap_rule = True
    applied = 0

    @staticmethod
    def forward(x: Tensor, power: int) -> Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return 2 * ctx.saved_tensors[0] * grads[0], None

    @classmethod
    def apply(cls, *args: Any) -> Any:
        cls.applied += 1
        return super().apply(*args)


square = quick_apply(Square)


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_gradients_are_those_of_apply() -> None:
    x, y = (torch.arange(4.0, dtype=torch.float64).requires_grad_() for _ in range(2))
    before = Square.applied
    square(x, 2).sum().backward()
    assert Square.applied == before
    Square.apply(y, 2).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(x.grad, 2 * x.detach())


def test_a_tensor_that_a_transform_has_left_behind_has_its_graph() -> None:
    x = torch.arange(4.0, requires_grad=True)
    left: list[Tensor] = []

    def seen(value: Tensor) -> Tensor:
        left.append(value * 1)
        return value.sum()

    torch.func.grad(seen)(x.exp())
    square(left[0], 2).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().exp() * x.detach().exp())


def test_apply_is_called_under_modes_and_transforms() -> None:
    x = torch.arange(4.0)
    before = Square.applied
    with Watching():
        assert torch.equal(square(x, 2), x**2)
    assert Square.applied == before + 1
    assert torch.equal(torch.vmap(lambda row: square(row, 2))(x), x**2)
    assert torch.equal(torch.func.grad(lambda row: square(row, 2).sum())(x), 2 * x)
    assert Square.applied > before + 2  # a vmap applies what it makes of a Function, too
