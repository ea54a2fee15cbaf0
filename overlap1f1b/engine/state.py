"""The state that torch keeps for a thread, carried along when one thread switches between forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_autograd: Any = torch._C._autograd
_C: Any = torch._C


@dataclass(frozen=True)
class ThreadState:
    """Grad mode, autocast, saved-tensor hooks and modes, as they are now.

    A switch between greenlets leaves these where they are; without care a forward that is suspended inside
    ``no_grad`` or ``autocast`` would impose it on whatever runs next.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    hooks: tuple[tuple[Any, Any], ...]
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    fixed: tuple[tuple[str, object], ...]
    """What no call can set for a running forward, by the name of what sets it."""

    @classmethod
    def capture(cls, device: torch.device) -> ThreadState:
        """The state of this thread; ``device`` is that of the model."""
        kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        return cls(
            torch.is_grad_enabled(),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            torch.is_autocast_cache_enabled(),
            _saved_tensor_hooks(),
            tuple(_get_current_function_mode_stack()),
            tuple(_get_current_dispatch_mode_stack()),
            _fixed(device),
        )

    def restore(self, now: ThreadState, name: str) -> None:
        """Makes this the state of the thread, which at present is in the state ``now``.

        Raises:
            ValueError: The two differ in something that cannot be set; the message names the module ``name``.
        """
        if self == now:
            return
        for (what, mine), (_, other) in zip(self.fixed, now.fixed, strict=True):
            if mine != other:
                raise ValueError(
                    f"{name} calls its experts inside {what}, which cannot be carried over a suspended forward; "
                    "allowed around experts: no_grad, autocast, saved-tensor hooks, function and dispatch modes"
                )
        torch.set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        if self.hooks != now.hooks:
            for _ in now.hooks:
                _autograd._pop_saved_tensors_default_hooks()
            for pack, unpack in self.hooks:
                _autograd._push_saved_tensors_default_hooks(pack, unpack)
        _swap_modes(
            now.function_modes, self.function_modes, _C._pop_torch_function_stack, _C._push_on_torch_function_stack
        )
        _swap_modes(
            now.dispatch_modes,
            self.dispatch_modes,
            lambda: _C._pop_torch_dispatch_stack(None),
            _C._push_on_torch_dispatch_stack,
        )

    @contextmanager
    def applied(self, name: str, *, device: torch.device, grad: bool) -> Iterator[None]:
        """Runs its body in this state, but for the grad mode where ``grad`` is off."""
        outside = ThreadState.capture(device)
        inside = replace(self, grad=self.grad and grad)
        inside.restore(outside, name)
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:  # else casts of weights would outlive the weights' next change
                torch.clear_autocast_cache()
            outside.restore(inside, name)


def _saved_tensor_hooks() -> tuple[tuple[Any, Any], ...]:
    """The stack of (pack, unpack), outermost first; torch can only show its top."""
    stack = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        stack.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(stack):
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
    return tuple(reversed(stack))


def _fixed(device: torch.device) -> tuple[tuple[str, object], ...]:
    state: list[tuple[str, object]] = [
        ("inference_mode", torch.is_inference_mode_enabled()),
        ("a functorch transform", _C._functorch.peek_interpreter_stack() is not None),
        ("disable_saved_tensors_hooks", _autograd._saved_tensors_hooks_is_enabled()),
        ("DisableTorchFunctionSubclass", _C._is_torch_function_enabled()),
    ]
    if device.type == "cuda":
        state.append(("a CUDA stream", torch.cuda.current_stream(device)))
    return tuple(state)


def _swap_modes(now: tuple[Any, ...], wanted: tuple[Any, ...], pop: Any, push: Any) -> None:
    if all(a is b for a, b in zip(now, wanted, strict=False)) and len(now) == len(wanted):
        return
    for _ in now:
        pop()
    for mode in wanted:
        push(mode)
