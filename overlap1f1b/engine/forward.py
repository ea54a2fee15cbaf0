"""A module's forward that stops wherever it calls its experts."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from overlap1f1b.engine.state import ThreadState


class SeamCall(NamedTuple):
    """A call of experts that waits for its result ``[T, H]``."""

    experts: nn.Module
    tokens: Tensor  # [T, H]
    indices: Tensor  # [T, K] int64
    weights: Tensor  # [T, K]


class Forward(greenlet):
    """``function(*args)`` on a stack of its own, so that it can be left at a call of experts and taken up later.

    :meth:`start` and :meth:`resume` return the next :class:`SeamCall`, or what the function returns.
    """

    def __init__(self, function: Callable[..., Any], name: str, device: torch.device) -> None:
        super().__init__(self._main)
        self.function, self.name, self.device = function, name, device
        self.gr_context = contextvars.copy_context()
        self._outside = ThreadState.capture(device)

    def start(self, *args: Any) -> Any:
        """Runs the function up to its first call of experts."""
        return self._enter(args)

    def resume(self, result: Tensor) -> Any:
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

    def hand_out(self, call: SeamCall) -> Tensor:
        """Called inside: leaves the function here, and returns the result once it is resumed."""
        inside = ThreadState.capture(self.device)
        self._outside.restore(inside, self.name)
        assert self.parent is not None
        try:
            result = self.parent.switch(call)
        finally:  # the function's own context managers must find the state that they left, also when it is stopped
            inside.restore(ThreadState.capture(self.device), self.name)
        assert isinstance(result, Tensor)
        return result


def seam(experts: nn.Module, plain: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The callable that stands in for ``experts.forward``: inside a :class:`Forward` it suspends, else it is plain."""

    def call(tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        current = getcurrent()
        if isinstance(current, Forward):
            return current.hand_out(SeamCall(experts, tokens, indices, weights))
        return plain(tokens, indices, weights)

    return call
