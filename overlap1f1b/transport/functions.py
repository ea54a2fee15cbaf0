"""Calls of this package's own autograd Functions without torch's checks in Python, which take microseconds a call.

This file calls private functions of torch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=type[torch.autograd.Function])

plain_apply: Callable[[type], Callable[..., Any]] = partial(torch._C._FunctionBase.__dict__["apply"].__get__, None)
"""Returns ``apply`` of a Function as C++ has it; no transform of ``torch.func`` must be active in a call of it."""


def quick_apply(function: type[torch.autograd.Function], *, one: bool = False) -> Callable[..., Any]:
    """Return ``function.apply`` that calls C++ at once where no function mode and no transform is in force.

    As torch's own it unwraps tensors that a transform of ``torch.func`` has left behind, which C++ sees no graph on;
    if there may be ``one`` alone, as the first argument.
    """
    plain, unwrapped = plain_apply(function), torch._C._functorch.unwrap_if_dead

    def apply(*args: Any) -> Any:
        if torch._C._len_torch_function_stack() or torch._C._are_functorch_transforms_active():
            return function.apply(*args)
        return plain(*[unwrapped(arg) if isinstance(arg, Tensor) else arg for arg in args])

    def apply_to(first: Tensor, *args: Any) -> Any:
        if torch._C._len_torch_function_stack() or torch._C._are_functorch_transforms_active():
            return function.apply(first, *args)
        return plain(unwrapped(first), *args)

    return apply_to if one else apply


def direct(function: F) -> F:
    """Have autograd call the backward of a Function at once, not by torch's search for it in Python."""
    backward_class: Any = function._backward_cls
    backward_class.apply = function.backward
    return function
