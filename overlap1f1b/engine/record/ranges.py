"""What ranges are written with: torch.profiler's records, or NVTX for nsys."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class RangeWriter(Protocol):
    """Writes named ranges; names are those of :mod:`overlap1f1b.plan.ranges`."""

    def push(self, name: str) -> None:
        """Opens a range inside those that are open on this thread."""

    def pop(self) -> None:
        """Closes the last that this thread opened."""

    def start(self, name: str) -> Any:
        """Opens a range that nests in no other; any thread may close it by what this returns."""

    def end(self, handle: Any) -> None:
        """Closes it."""


class TorchRanges:
    """For torch.profiler. It knows no ranges that overlap without nesting: :class:`Profile` adds them to its trace."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def push(self, name: str) -> None:
        # What `record_function` opens, in C: 0.6 instead of 12 µs, 3 instead of 45 under the profiler.
        opened = torch._C._profiler._RecordFunctionFast(name)
        opened.__enter__()
        self._open.append(opened)

    def pop(self) -> None:
        self._open.pop().__exit__(None, None, None)

    def start(self, name: str) -> None:
        return None

    def end(self, handle: None) -> None:
        return None


class NvtxRanges:
    """For nsys.

    Raises:
        ValueError: This torch was built without NVTX.
    """

    def __init__(self) -> None:
        try:
            torch.cuda.nvtx.mark("o1")
        except RuntimeError as error:
            raise ValueError(f"torch {torch.__version__} has no NVTX; allowed: a build for CUDA") from error

    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()

    def start(self, name: str) -> int:
        return torch.cuda.nvtx.range_start(name)

    def end(self, handle: int) -> None:
        torch.cuda.nvtx.range_end(handle)
