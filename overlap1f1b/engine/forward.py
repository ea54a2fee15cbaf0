"""A module's forward that stops wherever it calls its experts."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from overlap1f1b.engine.state import ThreadState


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


def seam(experts: nn.Module, plain: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
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
