"""In place of device graphs on a CPU: a tape of torch's operations, and their replay into the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Taping(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self.before.append((value.detach(), value.detach().clone()))
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result


class Tape:
    """A :class:`~overlap1f1b.transport.devices.GraphCapture` of a CPU."""

    bytes = 1

    def __init__(self, device: torch.device) -> None:
        self._taping: _Taping | None = None

    @contextmanager
    def around(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        self._taping = _Taping()
        self._taping.__enter__()

    def end(self) -> Callable[[], object]:
        taping, self._taping = self._taping, None
        assert taping is not None
        taping.__exit__(None, None, None)
        for memory, before in reversed(taping.before):  # a device would not have computed
            memory.copy_(before)

        @torch.no_grad()
        @torch.autocast("cpu", enabled=False)  # what was noted has its casts
        def replay() -> None:
            for func, args, kwargs, made in taping.operations:
                if not func._schema.is_mutable and all(out.alias_info for out in func._schema.returns):
                    continue  # a view
                found = func(*args, **kwargs)
                for memory, tensor in zip(*map(_several, (made, found)), strict=True):
                    if isinstance(memory, Tensor) and memory is not tensor:
                        memory.copy_(tensor)

        return replay

    def leave(self) -> None:
        if self._taping is not None:
            self.end()


def _several(value: Any) -> Any:
    return value if isinstance(value, tuple | list) else (value,)
