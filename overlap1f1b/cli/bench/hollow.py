"""Timed compute: every node lasts as long as it did when it was measured, without using the processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from overlap1f1b.moe.router import Router

_aten = torch.ops.aten


class HollowCompute(TorchDispatchMode):
    """Matrix products and attention return zeros at once; everything else is real: tensors, autograd, exchanges.

    Together with an engine's ``pace`` this leaves the processor to the transport, as a GPU would. Routers stay real,
    so that routing is as uneven as the text.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        stand_in = _STAND_INS.get(func)
        return func(*args, **(kwargs or {})) if stand_in is None else stand_in(*args, **(kwargs or {}))


def _mm(a: Tensor, b: Tensor, **_: Any) -> Tensor:
    return a.new_zeros(a.shape[0], b.shape[1])


def _mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    return out.zero_()


def _addmm(bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
    return _mm(a, b)


def _bmm(a: Tensor, b: Tensor, **_: Any) -> Tensor:
    return a.new_zeros(a.shape[0], a.shape[1], b.shape[2])


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1], dtype=torch.float32)


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


_STAND_INS: Mapping[Any, Callable[..., Any]] = {
    _aten.mm.default: _mm,
    _aten.mm.out: _mm_out,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}


@contextmanager
def hollow(model: nn.Module) -> Iterator[None]:
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
        with HollowCompute():
            yield
    finally:
        for router in routers:
            del router.__dict__["forward"]
