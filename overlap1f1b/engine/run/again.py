"""A part of a suspended forward, exchanges included, whose activations are dropped and computed again.

The part keeps its arguments and what its exchanges have brought. The first use of anything else in the backward runs
the part a second time: exchanges are answered with what they brought, and only the tensors that autograd saves are
kept. The graph stays that of the first forward, so the engine cuts, orders and walks it as without.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from overlap1f1b.engine.run.replaced import replaced
from overlap1f1b.engine.run.stage import Stage
from overlap1f1b.transport.suspend import Forward, ThreadState


class Saved:
    """A tensor that autograd has saved, and that is there from the second forward on until its node is gone."""

    tensor: Tensor | None = None


class Again:
    """A part of a block's forward: ``function(*args)``.

    The context ``around`` is that of the second forward: random numbers as they were, counters that count once.
    """

    def __init__(
        self,
        stage: Stage,
        block: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        around: AbstractContextManager[None],
    ) -> None:
        self._function, self._stage, self._block, self._around = function, stage, block, around
        self._args = tuple([_leaf(arg) for arg in args])
        self._state = ThreadState.capture(stage.device)
        self._buffers = stage.buffers[block].copies()
        self._weights = {p.untyped_storage().data_ptr() for p in stage.blocks[block].parameters()}
        self._saved: list[weakref.ref[Saved]] = []
        self._brought: list[tuple[Any, ...]] = []

    def run(self, args: tuple[Any, ...], forward: Forward) -> Any:
        """Run the part for the first time, as a part of a forward."""
        self._inner = forward.again  # of parts inside
        outer, forward.brought = forward.brought, self._brought
        try:
            with saved_tensors_hooks(self._drop, self._again):
                return self._function(*args)
        finally:
            forward.brought = outer
            if outer is not None:
                outer += self._brought
            self._brought = [tuple(map(_leaf, brought)) for brought in self._brought]
            self._stage.buffers[self._block].ended(self._buffers)

    def _drop(self, tensor: Tensor) -> Saved | Tensor:
        if self._is_kept(tensor):
            return tensor
        saved = Saved()
        self._saved.append(weakref.ref(saved))
        return saved

    def _is_kept(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a weight, which is there anyway, with attributes that backwards look at."""
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in self._weights

    def _again(self, saved: Saved | Tensor) -> Tensor:
        if isinstance(saved, Saved) and saved.tensor is None:
            self._compute()
        found = saved if isinstance(saved, Tensor) else saved.tensor
        assert found is not None
        return found

    def _compute(self) -> None:
        name, device, left = self._stage.names[self._block], self._stage.device, iter(self._saved)

        def save(tensor: Any) -> Any:
            if self._is_kept(tensor):
                return
            place = next(left, None)
            if place is None:
                raise self._differs()
            if (saved := place()) is not None:
                saved.tensor = tensor.detach()

        def run(*args: Any) -> None:
            with saved_tensors_hooks(save, save):  # its graph is not walked
                self._function(*args)

        second, carried = Forward(run, name, device, []), self._stage.state_of(self._block)
        second.hides, second.again = lambda *_: True, self._inner
        if carried is not None:
            carried.begin(0)
        state = self._state._replace(function_modes=(), hooks=())
        with state.applied(name, device), self._around, replaced(self._buffers):
            reached = second.start(self._args, ThreadState.capture(device), grad=True)
            for brought in self._brought:
                if reached is None:
                    break
                reached = second.resume(brought, ThreadState.capture(device))
        if carried is not None:
            carried.leave(ended=True)
        if reached is not None or next(left, None) is not None:
            second.stop()
            raise self._differs()
        self._args, self._brought, self._buffers = (), [], []

    def _differs(self) -> ValueError:
        return ValueError(
            f"{self._stage.names[self._block]} computes something else when a part of it is computed again; "
            "allowed: a forward that repeats itself"
        )


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
