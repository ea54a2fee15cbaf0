"""Timed compute: matrix products sleep for as long as they would compute, as if a GPU computed them."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.cut.replacement import replaced
from overlap1f1b.moe.router import Router

SHORTEST_S = 5e-4  # shorter sleeps are imprecise: shorter waits are added up
PASSES = 3

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class TimedCompute:
    """While it is entered, matrix products, attention and SwiGLU wait and return zeros; all other operators compute.

    This leaves the processor to the transport, as a GPU would. The CPU kernels of these operators are replaced for the
    whole process; unlike a dispatch mode, this adds no time to the other operators. ``speed`` has multiplications and
    additions per second; with None kernels compute, and ``operations`` and ``seconds`` add up.
    """

    def __init__(self, speed: float | None) -> None:
        self.speed, self.operations, self.seconds, self._owed = speed, 0.0, 0.0, 0.0
        self._zeros: dict[torch.dtype, Tensor] = {}
        self._computes = False
        self._library: torch.library.Library | None = None
        self._kernels: dict[str, tuple[Callable[..., float], Callable[..., Any]]] = {
            "mm": (_of_mm, lambda a, b, **_: self._zero(a, a.shape[0], b.shape[1])),
            "mm.out": (_of_mm, lambda a, b, *, out: out.zero_()),
            "addmm": (lambda bias, a, b, **_: _of_mm(a, b), lambda bias, a, b, **_: self._zero(a, len(a), b.shape[1])),
            "bmm": (
                lambda a, b, **_: 2 * a.numel() * b.shape[2],
                lambda a, b, **_: self._zero(a, *a.shape[:2], b.shape[2]),
            ),
            # Two products forward and five backward, of which a causal mask leaves half.
            "_scaled_dot_product_flash_attention_for_cpu": (
                lambda q, k, *_, **__: 2 * q.numel() * k.shape[-2],
                lambda q, k, v, *_, **__: (
                    self._zero(q, *q.shape[:-1], v.shape[-1]),
                    q.new_zeros(q.shape[:-1], dtype=torch.float32),
                ),
            ),
            "_scaled_dot_product_flash_attention_for_cpu_backward": (
                lambda grad, q, k, *_, **__: 5 * q.numel() * k.shape[-2],
                lambda grad, q, k, v, *_, **__: tuple(self._zero(x, *x.shape) for x in (q, k, v)),
            ),
            "silu": (lambda *_, **__: 0.0, lambda x, *_, **__: self._zero(x, *x.shape)),
            "silu_backward": (lambda *_, **__: 0.0, lambda grad, *_, **__: self._zero(grad, *grad.shape)),
        }
        """For each operator's name, functions of its arguments: the number of operations, and the result in zeros."""

    def __enter__(self) -> None:
        switches = {name: self._switch(name, *functions) for name, functions in self._kernels.items()}
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch warns that kernels are replaced
            warnings.simplefilter("ignore")
            for name, switch in switches.items():
                self._library.impl(name, switch, "CPU", allow_override=True)

    def __exit__(self, *error: object) -> None:
        self._library = None  # this puts torch's kernels back

    @contextmanager
    def entered(self, model: nn.Module, real: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Enter; the model's routers and ``real`` still compute, so that routing is as uneven as the text."""
        routers = [*(m for m in model.modules() if isinstance(m, Router)), *real]
        with replaced((vars(router), "forward", self.real(router.forward)) for router in routers), self:
            yield

    def real(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with torch's own kernels inside."""

        def call(*args: Any) -> Any:
            before, self._computes = self._computes, True
            try:
                return function(*args)
            finally:
                self._computes = before

        return call

    def _switch(self, name: str, count: Callable[..., float], zeros: Callable[..., Any]) -> Callable[..., Any]:
        """Return an op that is counted and timed, or waits as long as it would take."""
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._computes:
                return kernel.call_boxed(_CPU, *args, **kwargs)
            operations = count(*args, **kwargs)
            self.operations += operations
            start = time.perf_counter()
            if self.speed is not None:
                result = zeros(*args, **kwargs)
                self._wait(operations / self.speed - (time.perf_counter() - start))
                return result
            result = kernel.call_boxed(_CPU, *args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        return call

    def _wait(self, seconds: float) -> None:
        self._owed += seconds
        if self._owed > SHORTEST_S:
            start = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - start

    def _zero(self, like: Tensor, *shape: int) -> Tensor:
        """Return a view of one buffer of zeros that nothing writes to: new zeros would take time to fill."""
        size = math.prod(shape)
        buffer = self._zeros.get(like.dtype)
        if buffer is None or buffer.numel() < size:
            buffer = self._zeros[like.dtype] = like.new_zeros(size)
        return buffer[:size].view(shape)


def _of_mm(a: Tensor, b: Tensor, **_: Any) -> float:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def operations_per_second(model: nn.Module, loss: Callable[[], Tensor], real: Sequence[nn.Module] = ()) -> float:
    """Return the speed of the kernels that :class:`TimedCompute` replaces, measured on one thread.

    ``loss`` runs the model on one microbatch. ``real`` are modules that timed compute leaves alone beside the routers.
    """
    threads, found = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        loss().backward()
        for _ in range(PASSES):
            compute = TimedCompute(None)
            with compute.entered(model, real):
                loss().backward()
            found.append(compute.operations / compute.seconds)
    finally:
        torch.set_num_threads(threads)
    return median(found)
