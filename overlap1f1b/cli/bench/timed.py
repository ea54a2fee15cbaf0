"""Timed compute for code that is no engine's: every matrix product lasts as long as its operations take."""

from __future__ import annotations

import math
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.cli.bench.hollow import HollowCompute, hollow
from overlap1f1b.cli.workload import loss_fn

SHORTEST_S = 5e-4  # sleeping is no finer: shorter waits are gathered
PASSES = 3


def operations_per_second(model: nn.Module, inputs: Tensor, target: Tensor) -> float:
    """The speed at which a pass that waits for its products takes as long as one that computes them, on one thread.

    Args:
        model: Runs forward and backward, for real and hollowly: what is no product takes its time both ways.
        inputs: ``[B, S]``, one microbatch.
        target: ``[B, S]``.

    Raises:
        RuntimeError: What was measured makes no sense.
    """

    def took() -> float:
        start = time.perf_counter()
        loss_fn(model(inputs), target).backward()
        return time.perf_counter() - start

    threads, counting = torch.get_num_threads(), TimedCompute(math.inf)
    torch.set_num_threads(1)
    try:
        took()
        real = median(took() for _ in range(PASSES))
        with hollow(model, counting):
            took()
            counting.operations = 0.0
            rest = median(took() for _ in range(PASSES))
    finally:
        torch.set_num_threads(threads)
    return speed(counting.operations / PASSES, real, rest)


def speed(operations: float, real: float, rest: float) -> float:
    """Operations a second of a pass that took ``real`` seconds, and ``rest`` without them.

    Raises:
        RuntimeError: It took no longer with them.
    """
    if real <= rest:
        raise RuntimeError(
            f"a pass took {real:.4f} s, without its products {rest:.4f} s: measure larger blocks on a quieter machine"
        )
    return operations / (real - rest)


class TimedCompute(HollowCompute):
    """Products wait for the time of their operations, which are counted, instead of computing.

    Args:
        speed: Operations (multiplications and additions) a second.
    """

    def __init__(self, speed: float) -> None:
        super().__init__()
        self.speed, self.operations, self._owed = speed, 0.0, 0.0

    def _wait(self, operations: float) -> None:
        self.operations += operations
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
