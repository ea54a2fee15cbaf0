"""An exchange of one GPU with itself through host memory, in place of a network."""

import math
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from overlap1f1b.transport import devices
from overlap1f1b.transport.exchange import Exchange, Transfer
from overlap1f1b.transport.streams import HostCopy, Mark, copy_by_kernel, side_stream

LEAST_BYTES = 8 << 20
"""Bytes of a chunk: the bus needs large copies."""
CHUNKS = 16
"""Chunks of an exchange at most: the way back begins after the first, for which nobody would wait in a network."""
BUFFERS = 2
"""Exchanges that have a buffer in host memory at once."""


class LoopbackExchange(Exchange):
    """Rows go to pinned host memory by one copy engine and come back by the other, chunk by chunk, on a GPU.

    >>> engine = Engine(model, program, loss_fn=loss_fn, exchange=LoopbackExchange(device, gbps=25.0))

    The copies occupy no multiprocessor and take about as long as a network card of 400 Gbit/s would, or ``gbps`` (1e9
    bytes a second; ValueError unless above 0). To slow down, a GPU copies every chunk out several times, which occupies
    only the copy engine; on a CPU two threads copy, and sleep. The step depends on the bytes that come back, so a
    missing wait shows in its gradients; :meth:`mismatches` counts them if it is to ``check``.
    """

    ranks, rank = 1, 0

    def __init__(self, device: torch.device, gbps: float | None = None, *, check: bool = False) -> None:
        if gbps is not None and not 0 < gbps < math.inf:
            raise ValueError(f"a loopback of {gbps} GB/s; allowed: more than 0")
        self.device, self.gbps, self.check = device, gbps, check
        self.out, self.back, self.control = (side_stream(device, name) for name in ("out", "back", "counts"))
        queued = devices.gpu_of(device) is not None
        self._buffers = deque(_Buffer() for _ in range(BUFFERS if queued else 0))
        self._again = 0.0  # how many more times each chunk is copied out
        self._wrong: list[Tensor] = []
        self._copies: deque[HostCopy] = deque()  # that may still be written
        self.bytes_sent = 0
        if gbps is not None and queued:
            self._again = max(0.0, self.full_rate() / gbps - 1)

    def full_rate(self, size: int = 256 << 20) -> float:
        """Measure and return the full rate of the way out and back, in gigabytes per second, of ``size`` bytes."""
        again, self._again = self._again, 0.0
        gbps, self.gbps = self.gbps, None
        # Random bytes, since equal ones may be copied faster.
        source = torch.empty(size, 1, dtype=torch.uint8, device=self.device)
        source.random_(generator=torch.Generator(self.device))  # of its own: the model's random numbers stay
        seconds = math.inf
        for _ in range(3):
            devices.settle(self.device)
            start = time.perf_counter()
            transfer = self.rows(source)
            assert transfer.mark is not None
            transfer.mark.synchronize()
            seconds = min(seconds, time.perf_counter() - start)
        self._again, self.gbps = again, gbps
        self.bytes_sent -= 3 * source.numel()
        return source.numel() / seconds / 1e9

    def rows(
        self,
        source: Tensor,
        send: Sequence[int] = (),
        receive: Sequence[int] = (),
        tag: int = 0,
        expected: Any = None,
        ready: Mark | None = None,
    ) -> Transfer[Tensor]:
        """Copy rows out and back over the link that is imitated; the result are the rows."""
        if not source.is_contiguous():  # compute copies it
            source, ready = source.contiguous(), None
        result = torch.empty_like(source) if ready is None else self.back.empty(source, *source.shape)
        if not source.numel():
            return Transfer(result)
        self.bytes_sent += source.numel() * source.element_size()
        by_chunks = self._by_chunks if self._buffers else self._whole
        first, last = by_chunks(_bytes(source), _bytes(result), None if ready is None else (ready,))
        if self.check:
            last = self.back.run(self._compare, result, source, after=(last,))
        # Source and result outlive the copies: the transfer holds both, and its holder waits for the end first.
        return Transfer(result, source=source, mark=_Span(first, last))

    def _whole(self, source: Tensor, result: Tensor, after: tuple[Mark] | None) -> tuple[Mark, Mark]:
        memory = torch.empty_like(source)
        left = self.out.run(partial(self._leave, memory), source, after=after)
        return left, self.back.run(partial(_arrive, memory), result, after=(left,))

    def _by_chunks(self, source: Tensor, result: Tensor, after: tuple[Mark] | None) -> tuple[Mark, Mark]:
        """Copy out and back by chunks, so that both directions are busy at once."""
        # The first job starts after the rows are computed, and after the last use of the result's memory; events order
        # the chunks of the two streams.
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        buffer.fit(source)
        size = max(-(-len(source) // CHUNKS), LEAST_BYTES)
        memory = buffer.memory[: len(source)]
        chunks = list(zip(*(part.split(size) for part in (memory, source, result)), strict=True))
        event = devices.gpu_of(self.device).Event
        full = [event() for _ in chunks]

        def leave(*_: Tensor) -> None:
            if buffer.free is not None:
                buffer.free.wait()
            for event, (slot, leaving, _) in zip(full, chunks, strict=True):
                self._leave(slot, leaving)
                event.record()

        def arrive(*_: Tensor) -> None:
            for event, (slot, _, arriving) in zip(full, chunks, strict=True):
                event.wait()
                _arrive(slot, arriving)

        left = self.out.run(leave, after=after)
        buffer.free = back = self.back.run(arrive, after=())
        return left, back

    def counts(self, counts: Tensor, tag: int = 0, expected: Any = None, read: bool = True) -> Transfer[Tensor]:
        """Copy the counts; if they are read, to the host, too."""
        source = counts.view(1, -1)
        result = torch.empty_like(source)
        # Kernels copy the counts: the copy engines have rows of other exchanges to copy first.
        if not read:
            return Transfer(result, source=source, mark=self.control.run(copy_by_kernel, result, source))
        # The route keeps source and result until it has read the copies. After a failure nobody reads them.
        host = HostCopy.on(self.control, source, result, by_kernel=True, behind=lambda s, r: copy_by_kernel(r, s))
        while self._copies and self._copies[0].mark.is_completed():
            self._copies.popleft()
        self._copies.append(host)
        return Transfer(result, source=source, mark=host.mark, host=host)

    def _leave(self, slot: Tensor, chunk: Tensor) -> None:
        """Copy a chunk out, as long as the given rate takes."""
        start = time.perf_counter()
        slot.copy_(chunk, non_blocking=True)
        if not chunk.is_cpu:
            whole, rest = divmod(self._again, 1.0)
            for size in (*[len(chunk)] * int(whole), int(rest * len(chunk))):
                slot[:size].copy_(chunk[:size], non_blocking=True)
        elif self.gbps is not None:
            time.sleep(max(0.0, start + len(chunk) / self.gbps / 1e9 - time.perf_counter()))

    def _compare(self, result: Tensor, source: Tensor) -> None:
        self._wrong.append((_bytes(result) != _bytes(source)).any())

    def mismatches(self) -> int:
        """Wait for the device; return the number of transfers that came back changed since the last call."""
        devices.settle(self.device)
        wrong, self._wrong = self._wrong, []
        return sum(bool(flag) for flag in wrong)


class _Buffer:
    """Pinned host memory of an exchange."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.free: Mark | None = None
        """End of the exchange that was here last."""

    def fit(self, source: Tensor) -> None:
        """Make room for these bytes, and for some more, since sizes vary."""
        if len(self.memory) < len(source):
            self.memory = devices.in_host_memory(source[:1].expand(len(source) * 5 // 4))


class _Span:
    """Mark of a transfer: from the start of its first copy to the end of its last."""

    def __init__(self, first: Mark, last: Mark) -> None:
        self.first, self.last = first, last
        self.wait, self.synchronize, self.is_completed = last.wait, last.synchronize, last.is_completed

    @property
    def begun(self) -> Any:
        return self.first.begun

    @property
    def ended(self) -> Any:
        return self.last.ended


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _arrive(slot: Tensor, buffer: Tensor) -> None:
    buffer.copy_(slot, non_blocking=True)
