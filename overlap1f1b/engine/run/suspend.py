"""Suspend a module's forward where it calls its experts.

This file reads private attributes of torch: no public function shows or sets the stacks of hooks and modes.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class SeamCall(NamedTuple):
    """A call of experts that is suspended until its result ``[T, H]`` is there."""

    experts: nn.Module
    tokens: Tensor  # [T, H]
    indices: Tensor  # [T, K] int64
    weights: Tensor  # [T, K]
    state: ThreadState  # at the call: the experts must run in it


class OnceHooks(TorchFunctionMode):
    """Makes a tensor hook behind a call of experts run once, although the engine walks that part of the graph twice.

    Both walks bring the same gradient, so the second walk gets the first result of the hook.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            tensor, hook = args
            return func(tensor, _once(hook))
        return func(*args, **(kwargs or {}))


def _once(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    made: list[Tensor | None] = []

    def call(grad: Tensor) -> Tensor | None:
        if not made:
            made.append(hook(grad))
        return made[0]

    return call


class Forward(greenlet):
    """``function(*args)`` on its own stack, which is suspended at every call of experts.

    :meth:`start` and :meth:`resume` return the next :class:`SeamCall`, or the function's own result.
    """

    def __init__(self, function: Callable[..., Any], name: str, device: torch.device) -> None:
        super().__init__(self._main)
        self._once_hooks = OnceHooks()
        self.function, self.name, self.device = function, name, device
        self.gr_context = contextvars.copy_context()
        self._outside = ThreadState.capture(device)

    def start(self, *args: Any) -> Any:
        """Run the function to its first call of experts."""
        return self._enter(args)

    def resume(self, result: Any) -> Any:
        """Return the call's result inside the function, and run it to the next call."""
        return self._enter(result)

    def stop(self) -> None:
        """Unwind a suspended function: its ``finally`` blocks and context managers run."""
        if not self.dead and self:
            self.throw(GreenletExit)

    def _enter(self, value: Any) -> Any:
        self.parent = getcurrent()
        self._outside = ThreadState.capture(self.device)
        return self.switch(value)

    def _main(self, args: tuple[Any, ...]) -> Any:
        try:
            return self.function(*args)
        finally:
            self._outside.restore(ThreadState.capture(self.device), self.name)

    def suspend(self, handed: object, inside: ThreadState) -> Any:
        """Leave the function here, in the state ``inside``; return the value that it is resumed with.

        Called on the function's own stack. Whoever has started or resumed it receives ``handed``.
        """
        self._outside.restore(inside, self.name)
        assert self.parent is not None
        if self._once_hooks not in inside.function_modes:  # below the function's own modes, which it leaves by itself
            own = len(self._outside.function_modes)
            modes = (*inside.function_modes[:own], self._once_hooks, *inside.function_modes[own:])
            inside = replace(inside, function_modes=modes)
        try:
            return self.parent.switch(handed)
        finally:  # the function's own context managers must find their state, also when it is stopped
            inside.restore(ThreadState.capture(self.device), self.name)


def suspending(experts: nn.Module, plain: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a stand-in for ``experts.forward`` that suspends inside a :class:`Forward`, and else calls ``plain``."""

    def call(tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        current = getcurrent()
        if isinstance(current, Forward):
            state = ThreadState.capture(current.device)
            result = current.suspend(SeamCall(experts, tokens, indices, weights, state), state)
            assert isinstance(result, Tensor)
            return result
        return plain(tokens, indices, weights)

    return uncompiled(call)


OUTSIDE = "the engine goes on outside the compiled graph"


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that ``torch.compile`` breaks the graph of its caller around it.

    A graph cannot switch stacks or queue weight gradients. A caller that is compiled with ``fullgraph=True`` raises,
    with :data:`OUTSIDE` in the message.
    """
    # Loading the compiler takes seconds; a process that has compiled anything has loaded it.
    return torch.compiler.disable(function, reason=OUTSIDE) if "torch._dynamo" in sys.modules else function


_autograd: Any = torch._C._autograd
_C: Any = torch._C


@dataclass(frozen=True)
class ThreadState:
    """Grad mode, autocast, saved-tensor hooks and modes of the thread.

    A switch between greenlets does not switch them: a forward that is suspended inside ``no_grad`` or ``autocast``
    would impose it on the code that runs next.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    hooks: tuple[tuple[Any, Any], ...]
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    fixed: tuple[tuple[str, object], ...]
    """State that cannot be changed inside a running forward, by the name of its context manager."""

    @classmethod
    def capture(cls, device: torch.device) -> ThreadState:
        """Return the present state; ``device`` is the model's."""
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
        """Set this state; ``now`` is the present one.

        Raises:
            ValueError: They differ in a state that cannot be set; ``name`` is the module's.
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
        """Run the body in this state, with gradients off if ``grad`` is."""
        outside = ThreadState.capture(device)
        inside = replace(self, grad=self.grad and grad)
        inside.restore(outside, name)
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:  # else cached casts of weights would outlive an update
                torch.clear_autocast_cache()
            outside.restore(inside, name)


def _saved_tensor_hooks() -> tuple[tuple[Any, Any], ...]:
    """Return the stack of (pack, unpack), outermost first; torch shows only its top."""
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
