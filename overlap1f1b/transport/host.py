"""Host memory for activations: buffers that are kept and used again, and a stream each way.

On a GPU the buffers are pinned, and the streams are the device's. On a CPU "host" is a second pool, whose bytes do not
count as those of a step. A thread copies each way, and may take as long as a link of some rate would.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap1f1b.transport import devices
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.streams import Mark, side_stream

ALIGNED = 512
"""Multiples in bytes at which tensors lie in a buffer."""
SPACING = 8
"""Sizes of buffers from one power of two to the next: rows are uneven, and a buffer serves for somewhat fewer, too."""


class Parcel(NamedTuple):
    """Bytes in host memory.

    Args:
        buffer: The storage that has them.
        sizes: Of the tensors in it, in bytes.
    """

    buffer: Any
    sizes: tuple[int, ...]

    def parts(self) -> list[Tensor]:
        """Return the bytes of each tensor, ``[sizes[i]]`` of uint8."""
        whole = bytes_of(self.buffer)
        starts = accumulate(map(_aligned, self.sizes), initial=0)
        return [whole[start : start + size] for start, size in zip(starts, self.sizes, strict=False)]


class HostMemory:
    """Carries bytes to host memory and back.

    Args:
        device: Where they come from.
        gbps: On a CPU the rate of an imitated link, each way, in gigabytes (1e9 bytes) per second; None for none.
        least: Size in bytes below which a storage stays.

    Raises:
        ValueError: A GPU without pinned memory, or one with a rate.
    """

    def __init__(self, device: torch.device, gbps: float | None = None, least: int = 0) -> None:
        self.device, self.least = device, least
        self._pins, self._seconds = devices.gpu_of(device) is not None, 0.0 if gbps is None else 1 / gbps / 1e9
        if self._pins and gbps is not None:
            raise ValueError(f"host_link={gbps} on {device}, which has a link of its own; allowed: None, or a CPU")
        try:
            self._free = [self._made(ALIGNED)]  # the smallest first
        except RuntimeError as error:
            raise ValueError(f"offload on {device} without pinned host memory; allowed: offload=False") from error
        self._out, self._back = side_stream(device, "offload"), side_stream(device, "fetch")
        self._fetched: Mark | None = None  # the last copy back

    def leave(self, tensors: Sequence[Tensor]) -> Transfer[Parcel]:
        """Start to copy bytes, each ``[N]`` of uint8, to the host, behind all that was computed so far."""
        sizes = tuple([len(tensor) for tensor in tensors])
        parcel = Parcel(self._taken(sum(map(_aligned, sizes))), sizes)

        def copy(*sources: Tensor) -> None:
            self._carry(sources, parcel.parts())

        return Transfer(parcel, source=tensors, mark=self._out.run(copy, *tensors), sent=sum(sizes))

    def fetch(self, parcel: Parcel, tensors: Sequence[Tensor]) -> Transfer[Sequence[Tensor]]:
        """Start to copy the bytes of a parcel back, into tensors ``[N]`` of uint8."""

        def copy(*targets: Tensor) -> None:
            self._carry(parcel.parts(), targets)

        self._fetched = self._back.run(copy, *tensors)
        return Transfer(tensors, mark=self._fetched, sent=sum(parcel.sizes))

    def keep(self, parcel: Parcel) -> None:
        """Keep the buffer of a parcel for others, once compute has waited for it to be fetched."""
        insort(self._free, parcel.buffer, key=_size)

    def _carry(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        due = time.perf_counter() + self._seconds * sum(map(len, sources))
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=self._pins)
        if self._seconds:
            time.sleep(max(0.0, due - time.perf_counter()))

    def _taken(self, size: int) -> Any:
        """Return a buffer of so many bytes or up to twice as many; for one that is made, the nearest leaves."""
        at = bisect_left(self._free, size, key=_size)
        if at < len(self._free) and _size(self._free[at]) <= 2 * max(size, ALIGNED):
            return self._free.pop(at)
        if self._free:
            if self._fetched is not None:  # a copy may still read it
                self._fetched.synchronize()
            self._free.pop(max(0, at - 1))
        step = max(ALIGNED, (1 << max(0, size - 1).bit_length()) // (2 * SPACING))
        return self._made(-(-size // step) * step)

    def _made(self, size: int) -> Any:
        if self._pins:
            like = torch.empty(1, dtype=torch.uint8, device=self.device).expand(size)
            return devices.in_host_memory(like).untyped_storage()
        return torch.UntypedStorage(size)  # no operator: what these allocate on a CPU is counted


def bytes_of(storage: Any) -> Tensor:
    """Return all bytes of a storage, ``[N]`` of uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _size(storage: Any) -> int:
    size: int = storage.nbytes()
    return size
