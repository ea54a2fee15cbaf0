"""A link between local ranks, imitated: rows arrive when their bytes would have come over it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import Tensor

from overlap1f1b.transport.exchange import Exchange, Transfer


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
