"""Timed compute for code that is no engine's: every matrix product lasts as long as its operations take."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from overlap1f1b.cli.bench.hollow import HollowCompute

SHORTEST_S = 5e-4  # sleeping is no finer: shorter waits are gathered
ROWS, INNER, COLUMNS = 256, 256, 1024


def products_per_second() -> float:
    """Multiplications and additions a second in a matrix product of an expert's size, on one thread."""
    threads, seconds = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        a, b = torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS)
        for _ in range(50):
            start = time.perf_counter()
            a @ b
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 2 * ROWS * INNER * COLUMNS / median(seconds)


class TimedCompute(HollowCompute):
    """Products wait for the time of their operations instead of computing; ``total`` sums it, in seconds.

    Args:
        speed: Operations a second, from :func:`products_per_second`.
    """

    def __init__(self, speed: float) -> None:
        super().__init__()
        self.speed, self.total, self._owed = speed, 0.0, 0.0

    def _wait(self, operations: float) -> None:
        self.total += operations / self.speed
        self._owed += operations / self.speed
        if self._owed > SHORTEST_S:
            start = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - start

    def _mm(self, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        self._wait(2 * a.shape[0] * a.shape[1] * b.shape[1])
        return super()._mm(a, b)

    def _mm_out(self, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        self._wait(2 * a.shape[0] * a.shape[1] * b.shape[1])
        return super()._mm_out(a, b, out=out)

    def _bmm(self, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        self._wait(2 * a.numel() * b.shape[2])
        return super()._bmm(a, b)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self._wait(2 * q.numel() * k.shape[-2])  # two products, of which a causal mask leaves half
        return super()._attention(q, k, v)

    def _attention_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        self._wait(5 * q.numel() * k.shape[-2])  # half of five
        return super()._attention_backward(grad, q, k, v)
