"""Timed compute: every node lasts as long as it did when it was measured, without using the processor."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.moe.router import Router

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class HollowCompute:
    """While it is entered, matrix products, attention and SwiGLU return zeros at once; all else is real: tensors,
    autograd, exchanges.

    Together with an engine's ``pace`` this leaves the processor to the transport, as a GPU would. The kernels of those
    operators are replaced, for the whole process; unlike a dispatch mode this costs the others nothing.
    """

    def __init__(self) -> None:
        self._zeros: dict[torch.dtype, Tensor] = {}
        self._computes = False
        self._library: torch.library.Library | None = None
        self._stand_ins: dict[str, Callable[..., Any]] = {
            "mm": self._mm,
            "mm.out": self._mm_out,
            "addmm": self._addmm,
            "bmm": self._bmm,
            "_scaled_dot_product_flash_attention_for_cpu": self._attention,
            "_scaled_dot_product_flash_attention_for_cpu_backward": self._attention_backward,
            "silu": self._like,
            "silu_backward": self._like,
        }

    def __enter__(self) -> None:
        switches = {name: self._switch(name, stand_in) for name, stand_in in self._stand_ins.items()}
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # that kernels are replaced
            warnings.simplefilter("ignore")
            for name, switch in switches.items():
                self._library.impl(name, switch, "CPU", allow_override=True)

    def __exit__(self, *error: object) -> None:
        self._library = None  # which puts torch's kernels back

    def _switch(self, name: str, stand_in: Callable[..., Any]) -> Callable[..., Any]:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

        def call(*args: Any, **kwargs: Any) -> Any:
            return kernel.call_boxed(_CPU, *args, **kwargs) if self._computes else stand_in(*args, **kwargs)

        return call

    def real(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, computing as it would outside."""

        def call(*args: Any) -> Any:
            before, self._computes = self._computes, True
            try:
                return function(*args)
            finally:
                self._computes = before

        return call

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
def hollow(model: nn.Module, compute: HollowCompute | None = None, real: Sequence[nn.Module] = ()) -> Iterator[None]:
    """While it lasts, ``model`` computes hollowly, its routers apart, so that routing is as uneven as the text."""
    compute = compute or HollowCompute()
    routers = [*(m for m in model.modules() if isinstance(m, Router)), *real]
    for router in routers:
        router.__dict__["forward"] = compute.real(router.forward)
    try:
        with compute:
            yield
    finally:
        for router in routers:
            del router.__dict__["forward"]
