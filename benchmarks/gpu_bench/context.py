"""What every section is given: a device, sizes, a limit of time, and a way to time things."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class NoTimeError(RuntimeError):
    """A section's time is used up."""


@dataclass
class Context:
    """The surroundings of a section.

    Args:
        device: Where to measure.
        tiny: Sizes that a CPU takes in a second; figures mean nothing.
        quick: Fewer rounds.
        deadline: ``time.monotonic`` at which the section should have ended.
        results: What earlier sections have found, by their name.
        path: Of the results, without suffix.
        keep: Writes what a section has found so far, so that a run that is ended keeps it.
    """

    device: torch.device
    tiny: bool = False
    quick: bool = False
    deadline: float = float("inf")
    results: dict[str, Any] = field(default_factory=dict)
    path: str = ""
    keep: Callable[[dict[str, Any]], None] = lambda found: None

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Return the seconds that the section has left."""
        return self.deadline - time.monotonic()

    @property
    def clock(self) -> float:
        """MHz of the multiprocessors now; 0 where it cannot be read."""
        try:
            return float(torch.cuda.clock_rate(self.device)) if self.cuda else 0.0
        except (RuntimeError, ImportError, ModuleNotFoundError):
            return 0.0

    def say(self, line: str) -> None:
        """A line of progress."""
        print(f"    {line}", flush=True)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], T]) -> tuple[float, T]:
        """Return the time of one call, from an idle device to an idle device, and its result."""
        self.synchronize()
        start = time.perf_counter()
        result = function()
        self.synchronize()
        return time.perf_counter() - start, result

    def free(self) -> None:
        """Give memory back that nothing holds any more; engines and their stages hold each other."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def randn(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> torch.Tensor:
        """Return normal numbers: on zeros a product is faster, and an output that nobody wrote looks right."""
        generator = torch.Generator(self.device).manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        return drawn.to(dtype or self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of weights and activations."""
        return torch.float32 if self.tiny else torch.bfloat16

    def milliseconds(self, function: Callable[[], object], *, seconds: float = 0.4, rounds: int = 30) -> float:
        """Median time of one call on the device, after two that warm up.

        Calls are queued back to back between events, so that a call shorter than its launch is measured as long as its
        launch. Working sets of the sections are larger than the cache.
        """
        if self.left < 0:
            raise NoTimeError("no time left")
        for _ in range(2):
            function()
        self.synchronize()
        if not self.cuda:
            return 1e3 * median(self.seconds(function)[0] for _ in range(3))
        rounds = max(3, min(rounds // 3 if self.quick else rounds, int(seconds / self.seconds(function)[0])))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
        events[0].record()
        for event in events[1:]:
            function()
            event.record()
        self.synchronize()
        return median(a.elapsed_time(b) for a, b in pairwise(events))


def relative_error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """``‖found − wanted‖ / ‖wanted‖`` in float64, over all tensors; NaN where any is."""
    off = sum(float((f.double() - w.double()).square().sum()) for f, w in zip(found, wanted, strict=True))
    size = sum(float(w.double().square().sum()) for w in wanted)
    return (off / size) ** 0.5 if size else off**0.5


def tensors(value: Any) -> list[torch.Tensor]:
    """The floating tensors of a result."""
    values = value if isinstance(value, tuple) else (value,)
    return [t for t in values if isinstance(t, torch.Tensor)]
