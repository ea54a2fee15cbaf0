"""Timed compute: every node lasts as long as it did when it was measured, without using the processor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from overlap1f1b.moe.router import Router

_aten = torch.ops.aten


class HollowCompute(TorchDispatchMode):
    """Matrix products, attention and SwiGLU return zeros at once; all else is real: tensors, autograd, exchanges.

    Together with an engine's ``pace`` this leaves the processor to the transport, as a GPU would. Routers stay real,
    so that routing is as uneven as the text.
    """

    def __init__(self) -> None:
        super().__init__()
        self._zeros: dict[torch.dtype, Tensor] = {}
        self._stand_ins: dict[Any, Callable[..., Any]] = {
            _aten.mm.default: self._mm,
            _aten.mm.out: self._mm_out,
            _aten.addmm.default: self._addmm,
            _aten.bmm.default: self._bmm,
            _aten._scaled_dot_product_flash_attention_for_cpu.default: self._attention,
            _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: self._attention_backward,
            _aten.silu.default: self._like,
            _aten.silu_backward.default: self._like,
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        stand_in = self._stand_ins.get(func)
        return func(*args, **(kwargs or {})) if stand_in is None else stand_in(*args, **(kwargs or {}))

    def _zero(self, like: Tensor, *shape: int) -> Tensor:
        """A part of one buffer of zeros, which nothing writes to: filling new ones would take the processor's time."""
        size = math.prod(shape)
        buffer = self._zeros.get(like.dtype)
        if buffer is None or buffer.numel() < size:
            buffer = self._zeros[like.dtype] = like.new_zeros(size)
        return buffer[:size].view(shape)

    def _mm(self, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        return self._zero(a, a.shape[0], b.shape[1])

    def _mm_out(self, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        return out.zero_()

    def _addmm(self, bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        return self._mm(a, b)

    def _bmm(self, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        return self._zero(a, a.shape[0], a.shape[1], b.shape[2])

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._zero(q, *q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1], dtype=torch.float32)

    def _attention_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        return self._like(q), self._like(k), self._like(v)

    def _like(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return self._zero(x, *x.shape)


@contextmanager
def hollow(model: nn.Module, compute: HollowCompute | None = None) -> Iterator[None]:
    """While it lasts, ``model`` computes hollowly, its routers apart."""
    routers = [m for m in model.modules() if isinstance(m, Router)]

    def real(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with _disable_current_modes():
                return forward(*args)

        return call

    for router in routers:
        router.__dict__["forward"] = real(router.forward)
    try:
        with compute or HollowCompute():
            yield
    finally:
        for router in routers:
            del router.__dict__["forward"]
