"""Exchanges around another: over an imitated link, recorded, answered at once, and replayed without compute."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap1f1b.transport import devices
from overlap1f1b.transport.exchange import Exchange, Transfer
from overlap1f1b.transport.streams import HostCopy, SideStream, side_stream


class PacedExchange:
    """Another exchange, over a link of a rate: a transfer lasts as long as the larger of what is sent and received.

    >>> engine = Engine(model, program, mesh=mesh, loss_fn=loss_fn, exchange=PacedExchange(own_exchange(group), 0.1))

    Threads sleep meanwhile, so the processor is free, as beside a network card. For gloo, on CPUs. ``gbps`` is the rate
    in each direction, in gigabytes (1e9 bytes) per second.
    """

    def __init__(self, real: Exchange, gbps: float) -> None:
        self.real, self.gbps, self.ranks, self.rank = real, gbps, real.ranks, real.rank
        self.background, self.sms, self.counts, self.abort = real.background, real.sms, real.counts, real.abort
        self.expect_rows, self.expect_counts = real.expect_rows, real.expect_counts
        self._free = 0.0  # when the link has carried everything before

    def rows(self, source: Tensor, send: Sequence[int], receive: Sequence[int], *others: Any) -> Transfer[Tensor]:
        transfer = self.real.rows(source, send, receive, *others)
        rows = max(sum(counts) - counts[self.rank] for counts in (send, receive))
        begun = max(time.perf_counter(), self._free)
        self._free = begun + rows * source[:1].nbytes / self.gbps / 1e9
        return replace(transfer, mark=_Due(begun, self._free))


class _Due:
    """Mark of a transfer that ends at a time, or when its rows have come, if that is later."""

    def __init__(self, begun: float, due: float) -> None:
        self.begun, self.ended = begun, due

    def wait(self, timeout: timedelta | None = None) -> None:
        time.sleep(max(0.0, self.ended - time.perf_counter()))
        self.ended = time.perf_counter()

    def synchronize(self, failures: Any = None) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.ended


CARRIED = 256  # bytes at the end of a row that are kept of a recorded step: rows to experts carry their choices there


class Sizes(NamedTuple):
    """One exchange of rows: the number of rows to and from each rank, and a row's shape and dtype."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    row: tuple[int, ...]
    dtype: torch.dtype

    def sent_bytes(self, rank: int | None) -> int:
        """Return the bytes that leave ``rank``; None counts also the rows that a rank sends to itself."""
        rows = sum(self.send) - (0 if rank is None else self.send[rank])
        return rows * self.dtype.itemsize * torch.Size(self.row).numel()


class RecordingExchange:
    """The real exchange, which also records the sizes and counts of a step by tag: lanes start them in any order."""

    def __init__(self, real: Exchange) -> None:
        self.real, self.ranks, self.rank, self.background = real, real.ranks, real.rank, real.background
        self.expect_rows, self.expect_counts, self.sms = real.expect_rows, real.expect_counts, real.sms
        self.abort = real.abort
        self.keeps = False
        """Whether a step's received rows are kept until the next."""
        self._received: dict[int, Tensor] = {}
        self.clear()

    @property
    def counts_received(self) -> dict[int, Tensor]:
        """The counts that the step received, by tag."""
        return {tag: transfer.result for tag, transfer in self._counts.items()}

    def carried(self) -> dict[int, Tensor]:
        """Return the end of the rows that the step received, by tag, and keep no rows any more."""
        rows, self.keeps = self._received, False
        self._received = {}
        return {tag: received[:, -CARRIED // received.element_size() :].clone() for tag, received in rows.items()}

    def clear(self) -> None:
        self.sizes: dict[int, Sizes] = {}
        self._received = {}
        self._counts: dict[int, Transfer[Tensor]] = {}

    def rows(
        self, source: Tensor, send: Sequence[int], receive: Sequence[int], tag: int = 0, *rest: Any
    ) -> Transfer[Tensor]:
        self.sizes[tag] = Sizes(tuple(send), tuple(receive), tuple(source.shape[1:]), source.dtype)
        transfer = self.real.rows(source, send, receive, tag, *rest)
        if self.keeps:
            self._received[tag] = transfer.result
        return transfer

    def counts(self, counts: Tensor, tag: int = 0, *rest: Any) -> Transfer[Tensor]:
        self._counts[tag] = self.real.counts(counts, tag, *rest)
        return self._counts[tag]


class AnsweringExchange(Exchange):
    """An exchange that answers at once, with as many rows as a recorded step received: zeros, and what they carried.

    From a device the host gets counts as in a real exchange, by a stream beside compute: else it would wait for all
    compute before them, and the device then for the host.
    """

    def __init__(
        self, ranks: int, rank: int, counts: Mapping[int, Tensor], carried: Mapping[int, Tensor] | None = None
    ) -> None:
        self.ranks, self.rank, self._counts, self._carried = ranks, rank, counts, carried or {}
        self._copying: SideStream | None = None

    def rows(
        self, source: Tensor, send: Sequence[int], receive: Sequence[int], tag: int = 0, *_: Any
    ) -> Transfer[Tensor]:
        rows = source.new_zeros((sum(receive), *source.shape[1:]))
        carried = self._carried.get(tag)
        if carried is not None and len(carried) == len(rows):  # behind zeros later layers choose, and get back, others
            rows[:, -carried.shape[1] :] = carried
        return Transfer(rows)

    def counts(self, counts: Tensor, tag: int = 0, expected: Any = None, read: bool = True) -> Transfer[Tensor]:
        received = self._counts[tag]
        if not read or devices.gpu_of(counts.device) is None:
            return Transfer(received)
        self._copying = self._copying or side_stream(counts.device, "counts")
        return Transfer(received, host=HostCopy.on(self._copying, counts.view(self.ranks, -1), received))


class Replay:
    """The exchanges of a recorded step without compute between them, ``depth`` in flight at once."""

    def __init__(self, real: Exchange, sizes: Sequence[Sizes], device: torch.device, depth: int = 4) -> None:
        self.real, self.sizes, self.device, self.depth = real, sizes, device, depth
        width = max((sum(s.send) for s in sizes), default=0)
        self._sources = {(s.row, s.dtype): torch.zeros((width, *s.row), dtype=s.dtype, device=device) for s in sizes}
        # Else compute of another thread would wait for the exchanges, and they for it.
        gpu = devices.gpu_of(device)
        self._aside = nullcontext if gpu is None else partial(gpu.stream, gpu.Stream(device))

    def run(self) -> float:
        """Return the seconds from the first launch to the last arrival."""
        start = time.perf_counter()
        flying: deque[Transfer[Tensor]] = deque()
        with self._aside():
            for size in self.sizes:
                if len(flying) == self.depth:
                    flying.popleft().finish()
                source = self._sources[size.row, size.dtype][: sum(size.send)]
                flying.append(self.real.rows(source, size.send, size.receive))
            for transfer in flying:
                transfer.finish()
        devices.settle(self.device)
        return time.perf_counter() - start

    def beside(self, compute: Callable[[], object]) -> None:
        """Run the exchanges in a thread beside the compute of this one, until both have ended."""
        thread = threading.Thread(target=self.run, name="overlap1f1b-replay", daemon=True)
        thread.start()
        compute()
        thread.join()
