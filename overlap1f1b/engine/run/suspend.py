"""A module's forward that stops wherever it calls its experts."""

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
    """A call of experts that waits for its result ``[T, H]``."""

    experts: nn.Module
    tokens: Tensor  # [T, H]
    indices: Tensor  # [T, K] int64
    weights: Tensor  # [T, K]
    state: ThreadState  # around the call: autocast and the like, in which the experts must run


class OnceHooks(TorchFunctionMode):
    """Tensor hooks that are registered behind a call of experts run once, though the engine walks that part twice.

    Both walks bring the same gradient, so the second gets what the hook made of it the first time.
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
    """``function(*args)`` on a stack of its own, so that it can be left at a call of experts and taken up later.

    :meth:`start` and :meth:`resume` return the next :class:`SeamCall`, or what the function returns.
    """

    def __init__(self, function: Callable[..., Any], name: str, device: torch.device) -> None:
        super().__init__(self._main)
        self._once_hooks = OnceHooks()
        self.function, self.name, self.device = function, name, device
        self.gr_context = contextvars.copy_context()
        self._outside = ThreadState.capture(device)

    def start(self, *args: Any) -> Any:
        """Runs the function up to its first call of experts."""
        return self._enter(args)

    def resume(self, result: Any) -> Any:
        """Hands the result of the call to the function and runs it up to the next."""
        return self._enter(result)

    def stop(self) -> None:
        """Unwinds a suspended function: its ``finally`` blocks and context managers run."""
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

    def hand_out(self, what: object, inside: ThreadState) -> Any:
        """Called inside, in the state ``inside``: leaves the function here, and returns what it is resumed with."""
        self._outside.restore(inside, self.name)
        assert self.parent is not None
        if self._once_hooks not in inside.function_modes:  # below the function's own modes, which it will leave itself
            own = len(self._outside.function_modes)
            modes = (*inside.function_modes[:own], self._once_hooks, *inside.function_modes[own:])
            inside = replace(inside, function_modes=modes)
        try:
            return self.parent.switch(what)
        finally:  # the function's own context managers must find the state that they left, also when it is stopped
            inside.restore(ThreadState.capture(self.device), self.name)


def suspending(experts: nn.Module, plain: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The callable that stands in for ``experts.forward``: inside a :class:`Forward` it suspends, else it is plain."""

    def call(tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        current = getcurrent()
        if isinstance(current, Forward):
            state = ThreadState.capture(current.device)
            result = current.hand_out(SeamCall(experts, tokens, indices, weights, state), state)
            assert isinstance(result, Tensor)
            return result
        return plain(tokens, indices, weights)

    return uncompiled(call)


OUTSIDE = "the engine goes on outside the compiled graph"


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called outside what ``torch.compile`` makes of its caller, which goes on behind it.

    To switch stacks and to queue weight gradients are no operations of a graph. What is compiled with
    ``fullgraph=True`` then raises, with :data:`OUTSIDE` in the message.
    """
    # Who has compiled anything has loaded the compiler, which takes seconds.
    return torch.compiler.disable(function, reason=OUTSIDE) if "torch._dynamo" in sys.modules else function


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
