"""Write ranges: torch.profiler's records, or NVTX for nsys."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class RangeWriter(Protocol):
    """Writes ranges, named as :mod:`overlap1f1b.plan.ranges` names them."""

    def push(self, name: str) -> None:
        """Open a range inside the open ranges of this thread."""

    def pop(self) -> None:
        """Close the range that this thread opened last."""

    def start(self, name: str) -> Any:
        """Open a range that nests in no other, and return a handle by which any thread may close it."""

    def end(self, handle: Any) -> None:
        """Close a range of :meth:`start`."""


class TorchRanges:
    """Writes ranges for torch.profiler, which has none that overlap without nesting: :class:`Profile` adds those."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def push(self, name: str) -> None:
        # The C class behind record_function, a private name: 0.6 instead of 12 µs, 3 instead of 45 under the profiler.
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
    """Writes ranges for nsys.

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
