"""An exchange of one GPU with itself through host memory, in place of a network."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from overlap1f1b.transport import streams as side
from overlap1f1b.transport.exchange import Exchange, Transfer
from overlap1f1b.transport.streams import HostCopy, Mark, SideStream, side_stream

LEAST_BYTES, MOST_BYTES = 8 << 20, 32 << 20  # of a chunk: the bus needs large copies, and host memory is short
CHUNKS = 8
"""Chunks of an exchange: the way back begins after the first, but each costs the host two copies and two events."""
SLOTS = 8
"""Chunks in host memory: as many as an exchange of 256 MiB has, so each is free when the next exchange fills it."""


class LoopbackExchange(Exchange):
    """Rows go to pinned host memory by one copy engine and come back by the other, chunk by chunk, on a GPU.

    >>> engine = Engine(model, program, loss_fn=loss_fn, exchange=LoopbackExchange(torch.device("cuda"), gbps=25.0))

    The copies occupy no multiprocessor and take about as long as a network card of 400 Gbit/s would. The step depends
    on the bytes that come back, so a missing wait shows in its gradients. On a CPU two threads copy.

    Args:
        device: Device of the rows.
        gbps: Rate of the slowed-down copies, in gigabytes (1e9 bytes) per second; by default they run at full rate. To
            slow down, a GPU copies every chunk out several times, which occupies only the copy engine; a thread sleeps.
        check: Whether to compare the returned rows with the sent rows, on the device; see :meth:`mismatches`.
        streams: Streams out, back and for counts; by default new ones of the device.

    Attributes:
        bytes_sent: Bytes of rows sent since construction.

    Raises:
        ValueError: ``gbps`` is not above 0.
    """

    ranks, rank = 1, 0

    def __init__(
        self,
        device: torch.device,
        gbps: float | None = None,
        *,
        check: bool = False,
        streams: tuple[SideStream, SideStream, SideStream] | None = None,
    ) -> None:
        if gbps is not None and not 0 < gbps < math.inf:
            raise ValueError(f"a loopback of {gbps} GB/s; allowed: more than 0")
        self.device, self.gbps, self.check = device, gbps, check
        self.out, self.back, self.control = streams or (
            side_stream(device, "out"),
            side_stream(device, "back"),
            side_stream(device, "counts"),
        )
        queued = side.is_queued(device)
        self._slots = [_Slot(device) for _ in range(SLOTS if queued else 0)]
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
            if source.is_cuda:
                torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            transfer = self.rows(source)
            assert transfer.mark is not None
            transfer.mark.synchronize()
            seconds = min(seconds, time.perf_counter() - start)
        self._again, self.gbps = again, gbps
        self.bytes_sent -= 3 * source.numel()
        return source.numel() / seconds / 1e9

    def rows(self, source: Tensor, *_: Any) -> Transfer[Tensor]:
        source = source.contiguous()
        result = torch.empty_like(source)
        if not source.numel():
            return Transfer(result)
        self.bytes_sent += source.numel() * source.element_size()
        first, last = (self._by_chunks if self._slots else self._whole)(_bytes(source), _bytes(result))
        if self.check:
            last = self.back.run(self._compare, result, source, after=(last,))
        # Source and result outlive the copies: the transfer holds both, and its holder waits for the end first.
        return Transfer(result, source=source, mark=_Span(first, last))

    def _whole(self, source: Tensor, result: Tensor) -> tuple[Mark, Mark]:
        memory = torch.empty_like(source)
        left = self.out.run(partial(self._leave, memory), source)
        return left, self.back.run(partial(_arrive, memory), result, after=(left,))

    def _by_chunks(self, source: Tensor, result: Tensor) -> tuple[Mark, Mark]:
        # Events order the chunks of the two streams. The first job starts after the rows are computed, and after the
        # last use of the result's memory.
        size = min(max(-(-len(source) // CHUNKS), LEAST_BYTES), MOST_BYTES)
        chunks = list(zip(source.split(size), result.split(size), strict=True))
        marks: list[tuple[Mark, Mark]] = []
        for at in range(0, len(chunks), SLOTS):
            some = [(slot, *chunk) for slot, chunk in zip(self._slots, chunks[at : at + SLOTS], strict=False)]
            left = self.out.run(partial(self._fill, some), after=() if marks else None)
            marks.append((left, self.back.run(partial(self._empty, some), after=())))
        return marks[0][0], marks[-1][1]

    def _fill(self, chunks: Sequence[tuple[_Slot, Tensor, Tensor]]) -> None:
        for slot, leaving, _ in chunks:
            slot.free.wait()
            self._leave(slot.memory[: len(leaving)], leaving)
            slot.full.record()

    def _empty(self, chunks: Sequence[tuple[_Slot, Tensor, Tensor]]) -> None:
        for slot, _, arriving in chunks:
            slot.full.wait()
            _arrive(slot.memory[: len(arriving)], arriving)
            slot.free.record()

    def counts(self, counts: Tensor, tag: int = 0, expected: Any = None, read: bool = True) -> Transfer[Tensor]:
        source = counts.view(1, -1)
        result = torch.empty_like(source)
        # Kernels copy the counts: the copy engines have rows of other exchanges to copy first.
        back = self.control.run(side.copy_by_kernel, result, source)
        if not read:
            return Transfer(result, source=source, mark=back)
        # The route keeps source and result until it has read the copies. After a failure nobody reads them.
        host = HostCopy.on(self.control, source, result, by_kernel=True)
        while self._copies and self._copies[0].ended:
            self._copies.popleft()
        self._copies.append(host)
        return Transfer(result, source=source, mark=back, host=host)

    def _leave(self, slot: Tensor, chunk: Tensor) -> None:
        start = time.perf_counter()
        slot.copy_(chunk, non_blocking=True)
        if chunk.is_cuda:
            whole, rest = divmod(self._again, 1.0)
            for size in (*[len(chunk)] * int(whole), int(rest * len(chunk))):
                slot[:size].copy_(chunk[:size], non_blocking=True)
        elif self.gbps is not None:
            time.sleep(max(0.0, start + len(chunk) / self.gbps / 1e9 - time.perf_counter()))

    def _compare(self, result: Tensor, source: Tensor) -> None:
        self._wrong.append((_bytes(result) != _bytes(source)).any())

    def mismatches(self) -> int:
        """Wait for the device; return the number of transfers that came back changed since the last call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        wrong, self._wrong = self._wrong, []
        return sum(bool(flag) for flag in wrong)


class _Slot:
    """Pinned host memory of a chunk. Events mark that it is full and may be read, and that it is free again."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(MOST_BYTES, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        self.full, self.free = torch.cuda.Event(), torch.cuda.Event()


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


def _arrive(slot: Tensor, place: Tensor) -> None:
    place.copy_(slot, non_blocking=True)
