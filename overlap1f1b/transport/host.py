"""Host memory for activations, and a stream each way.

On a GPU torch's allocator keeps pinned memory for later copies, and the streams are the device's. On a CPU "host" is a
second pool, whose bytes do not count as those of a step. A thread copies each way, and may take as long as a link of
some rate would.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from overlap1f1b.transport import devices
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.streams import ThreadStream, side_stream


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
        self.device, self.least, self._seconds = device, least, 0.0 if gbps is None else 1 / gbps / 1e9
        if gbps is not None and devices.gpu_of(device) is not None:
            raise ValueError(f"host_link={gbps} on {device}, which has a link of its own; allowed: None, or a CPU")
        try:
            devices.in_host_memory(torch.empty(1, device=device))
        except RuntimeError as error:
            raise ValueError(f"offload on {device} without pinned host memory; allowed: offload=False") from error
        self._out, self._back = side_stream(device, "offload"), side_stream(device, "fetch")

    def leave(self, tensors: Sequence[Tensor]) -> Transfer[Sequence[Tensor]]:
        """Start to copy bytes, each ``[N]`` of uint8, to the host, behind all that was computed so far."""
        away: list[Tensor] = []

        def copy(*sources: Tensor) -> None:  # on a CPU in a thread, whose memory is not counted
            away.extend(map(devices.in_host_memory, sources))
            self._carry(sources, away)

        mark = self._out.run(copy, *tensors)
        return Transfer(away, source=tensors, mark=mark, sent=sum(map(len, tensors)))

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a storage is large enough, and its memory can be freed and taken again in place."""
        storage = tensor.untyped_storage()
        shared = devices.gpu_of(self.device) is None and storage.is_shared()  # with other processes, from a file
        free = storage.resizable() and not shared and not torch._C._is_cow_tensor(tensor)  # type: ignore[attr-defined]
        return free and storage.nbytes() >= max(1, self.least)

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """Return all bytes of a tensor's storage, ``[N]`` of uint8."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(tensor.untyped_storage())

    def fetch(self, away: Sequence[Tensor], tensors: Sequence[Tensor]) -> Transfer[Sequence[Tensor]]:
        """Start to copy what has left back, into tensors of the same sizes."""

        def copy(*targets: Tensor) -> None:
            self._carry(away, targets)

        return Transfer(tensors, mark=self._back.run(copy, *tensors), sent=sum(map(len, tensors)))

    def close(self) -> None:
        """End the threads of the copies."""
        for stream in (self._out, self._back):
            if isinstance(stream, ThreadStream):
                stream.close()

    def _carry(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        due = time.perf_counter() + self._seconds * sum(map(len, sources))
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        if self._seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
