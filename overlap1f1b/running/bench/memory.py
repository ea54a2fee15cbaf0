"""The peak memory of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overlap1f1b.transport import devices


def peak_bytes(device: torch.device, step: Callable[[], object]) -> int:
    """Return the most bytes of tensors at once during ``step``, beyond the bytes at its start.

    On a GPU the allocator counts. Elsewhere the arguments and results of this thread's operators are counted at the end
    of each: it does not matter which thread frees a tensor, or has received it from another rank.
    """
    gpu = devices.of(device)
    if gpu is not None:
        gpu.reset_peak_memory_stats(device)
        before: int = gpu.memory_allocated(device)
        step()
        devices.settle(device)
        return gpu.max_memory_allocated(device) - before
    with _Living() as living:
        step()
    return living.peak


class _Living(TorchDispatchMode):
    """Counts the storages that operators have used and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._here: dict[int, tuple[StorageWeakRef, int]] = {}
        gc.collect()
        for known in [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]:
            self._count(known.untyped_storage(), size=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._count(storage, size=storage.nbytes())
        if self.bytes > self.peak:  # perhaps a new peak: freed storages are not subtracted yet
            for key in [key for key, (storage, _) in self._here.items() if storage.expired()]:
                self.bytes -= self._here.pop(key)[1]
            self.peak = max(self.peak, self.bytes)
        return result

    def _count(self, storage: UntypedStorage, size: int) -> None:
        reference = StorageWeakRef(storage)  # while it is held, no other storage gets its address
        if reference.cdata not in self._here:
            self._here[reference.cdata] = reference, size
            self.bytes += size
