"""Classes of parameters whose products are their own: gradients are :data:`FACTORS` times those of plain products."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

FACTORS = 2.0, 3.0


class Product(torch.autograd.Function):
    """A product whose gradients are other than those of the function that computes it."""

    @staticmethod
    def forward(ctx: Any, multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        ctx.multiply = multiply
        ctx.save_for_backward(x, weight)
        return multiply(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
            found = torch.autograd.grad(ctx.multiply(x, weight), (x, weight), grads)
        return None, *(factor * grad for factor, grad in zip(FACTORS, found, strict=True))


def grouped(x: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """``torch.nn.functional.grouped_mm`` in any dtype."""
    parts = x.tensor_split(offs.tolist())
    assert not len(parts[-1]), f"{len(parts[-1])} rows that belong to no expert"
    return torch.cat([part @ one for part, one in zip(parts, right, strict=False)])


def own_product(kind: type, func: Any, args: Any, kwargs: Any, plain: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return the product of a call of torch; None for any other function."""
    if func.__name__ not in ("linear", "_grouped_mm") or not isinstance(args[1], kind):
        return None
    x, weight, offs = args[0], plain(args[1]), kwargs.get("offs")
    bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
    multiply = F.linear if offs is None else lambda x, right: grouped(x, right, offs)
    result: Tensor = Product.apply(multiply, x, weight)
    return result if bias is None else result + bias


class Marked(Tensor):
    """A class that torch asks at each of its functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            product = own_product(cls, func, args, kwargs or {}, lambda weight: weight.as_subclass(Tensor))
        return super().__torch_function__(func, types, args, kwargs or {}) if product is None else product


class Unwrapped(torch.autograd.Function):
    """What a :class:`Wrapped` holds."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        return weight.held

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Wrapped(Tensor):
    """A class that holds another tensor, and that torch asks at each operation, as those of torchao."""

    held: Tensor
    KEPT = (
        "detach",
        "clone",
        "_to_copy",
        "transpose",
        "t",
        "split",
        "slice",
        "view",
        "new_zeros",
        "empty_like",
        "copy_",
    )

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            dtype=held.dtype,
            device=held.device,
            requires_grad=held.requires_grad,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Any:
        return cls(inner["held"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Wrapped({self.held})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = own_product(cls, func, args, kwargs or {}, Unwrapped.apply)
        if product is not None:
            return product
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda one: one.held, (args, kwargs or {}))
        result = func(*args, **kwargs)
        kept = func.overloadpacket._qualified_op_name.removeprefix("aten::") in cls.KEPT
        return tree_map_only(Tensor, cls, result) if kept else result


KINDS: dict[str, Callable[[Tensor], Tensor]] = {"marked": lambda value: value.as_subclass(Marked), "wrapped": Wrapped}


def convert(module: nn.Module, make: Callable[[Tensor], Tensor], dims: tuple[int, ...] = (2, 3)) -> None:
    """Put classes with products of their own in place of the weights of linear layers and experts."""
    for part in module.modules():
        for label, parameter in list(part.named_parameters(recurse=False)):
            if parameter.dim() in dims and not isinstance(part, nn.Embedding):
                converted = nn.Parameter(make(parameter.detach()))
                vars(converted).update(vars(parameter))
                part.register_parameter(label, converted)
