"""Replace what an earlier segment has made by what may enter the running segment, in all calls of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from overlap1f1b.engine.run.autograd import SplitGroupedMM, SplitLinear
from overlap1f1b.engine.run.segment import Enter
from overlap1f1b.transport.suspend import uncompiled

_GRAPH_PROPERTIES = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_OF_THE_TENSOR_ITSELF = {Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_, Tensor.backward}


class Replaces(Protocol):
    """A forward that decides what enters its running segment."""

    def entered(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or what enters the running segment in its place."""

    def changed(self, tensor: Tensor) -> None:
        """Note that a call changes a tensor in place."""


class CrossingMode(TorchFunctionMode):
    """Hands every tensor argument of torch's functions to a forward, which may replace it.

    ``autograd.Function.apply`` passes by torch's function modes: see :func:`functions_cross`.
    """

    def __init__(self, run: Replaces) -> None:
        super().__init__()
        self.run = run
        self.replaced = uncompiled(self._replaced)  # a compiled graph ends where something could enter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if (name == "__get__" and func not in _GRAPH_PROPERTIES) or func in _OF_THE_TENSOR_ITSELF:
            return func(*args, **kwargs)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if name[-1] == "_" and name[-2:] != "__" and args and isinstance(args[0], Tensor):
                self.run.changed(args[0])
            args, kwargs = self.replaced(args), self.replaced(kwargs)
        return func(*args, **kwargs)

    def _replaced(self, values: Any) -> Any:
        """Return arguments with the tensors that enter."""
        if isinstance(values, Tensor):
            return self.run.entered(values)
        kind = type(values)
        if kind is tuple or kind is list:
            return kind([self._replaced(value) for value in values]) if values else values
        if kind is dict:
            return {name: self._replaced(value) for name, value in values.items()} if values else values
        return values


def running_mode() -> CrossingMode | None:
    """Return the mode in force."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, CrossingMode):
            return mode
    return None


@contextmanager
def functions_cross() -> Iterator[None]:
    """Hand the arguments of ``autograd.Function.apply`` to the mode in force, inside the context."""
    function: Any = torch.autograd.Function
    plain = function.__dict__["apply"]
    call: Callable[..., Any] = plain.__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        mode = None if cls is Enter else running_mode()
        if mode is None or not torch.is_grad_enabled():
            return call(cls, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            if cls is SplitLinear or cls is SplitGroupedMM:  # it queues the gradient of its weight
                args = (*mode.replaced(args[:1]), args[1], *mode.replaced(args[2:]))
            else:
                args, kwargs = mode.replaced(args), mode.replaced(kwargs)
        return call(cls, *args, **kwargs)

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = plain
