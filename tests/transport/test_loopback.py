"""Rows come back as they left, whatever their size, and a rate is kept to."""

import random
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap1f1b.transport import devices, loopback
from overlap1f1b.transport.failures import Failures
from overlap1f1b.transport.loopback import LoopbackExchange
from overlap1f1b.transport.streams import InlineStream
from tests import lagging

CPU = torch.device("cpu")


class Instant:
    """In place of streams and events of a GPU where every job has ended when it was queued."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait(self) -> None: ...

    record = wait


class Flipping(InlineStream):
    """The way back, on which a bit of each exchange changes."""

    def run(self, job: Any, *tensors: torch.Tensor, after: Any = None) -> Any:
        mark = super().run(job, *tensors, after=after)
        if len(tensors) == 1:  # else it compares
            tensors[0][5] ^= 1
        return mark


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("chunks", [False, True], ids=["whole", "chunks"])
def test_rows_come_back(monkeypatch: pytest.MonkeyPatch, chunks: bool, dtype: torch.dtype) -> None:
    """Several exchanges in flight, more than places: whole on streams that lag behind each other, or in chunks."""
    monkeypatch.setattr(loopback, "LEAST_BYTES", 64)
    noise = random.Random(1)
    if chunks:
        gpu = SimpleNamespace(Event=Instant, Stream=Instant, synchronize=lambda device: None)
        monkeypatch.setattr(devices, "gpu_of", lambda device: gpu)
        monkeypatch.setattr(devices, "in_host_memory", torch.empty_like)
        exchange = LoopbackExchange(CPU)
        exchange.out, exchange.back = InlineStream(), InlineStream()
    else:
        exchange = lagging.loopback(lambda: noise.random() * 5e-4)
    exchange.check = True
    sources = [torch.arange(rows * 3).view(rows, 3).to(dtype) for rows in (0, 1, 7, 100, 401)]
    flying = [exchange.rows(source, [len(source)], [len(source)]) for source in sources]
    for source, transfer in zip(sources, flying, strict=True):
        received = transfer.finish(timedelta(seconds=10))
        assert torch.equal(received, source)
        assert received.data_ptr() != source.data_ptr() or not len(source)
    assert exchange.mismatches() == 0
    assert exchange.bytes_sent == sum(s.numel() * s.element_size() for s in sources)


def test_counts_are_copied_to_the_host_on_the_way() -> None:
    exchange, counts = LoopbackExchange(CPU), torch.tensor([3, 0, 1])
    transfer = exchange.counts(counts)
    assert [copy.tolist() for copy in transfer.host.read(Failures(limit=timedelta(seconds=5)))] == [
        [[3, 0, 1]],
        [[3, 0, 1]],
    ]
    assert transfer.finish(timedelta(seconds=5)).tolist() == [[3, 0, 1]]


def test_bytes_that_changed_on_the_way_are_noticed() -> None:
    exchange = LoopbackExchange(CPU, check=True)
    exchange.out, exchange.back = InlineStream(), Flipping()
    exchange.rows(torch.randn(4, 4)).finish()
    exchange.rows(torch.randn(4, 4)).finish()
    assert exchange.mismatches() == 2
    assert exchange.mismatches() == 0


def test_a_rate_is_a_lower_limit_of_time() -> None:
    exchange = LoopbackExchange(CPU, gbps=1e-3)  # a byte a nanosecond, a thousand times slower
    source = torch.zeros(20_000, dtype=torch.uint8)
    start = time.perf_counter()
    exchange.rows(source).finish()
    assert time.perf_counter() - start >= 0.02
    with pytest.raises(ValueError, match=r"-1\.0 GB/s"):
        LoopbackExchange(CPU, gbps=-1.0)
