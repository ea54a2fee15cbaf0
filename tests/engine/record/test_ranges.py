"""Ranges reach the profiler as they were opened."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from overlap1f1b.engine.record.recorder import TorchRanges
from overlap1f1b.transport import devices


def test_ranges_nest_under_torchs_profiler() -> None:
    writer = TorchRanges()
    with writer.range("unseen"):
        pass
    with profile(activities=[ProfilerActivity.CPU]) as profiler, writer.range("outer"):
        for name in ("first", "second"):
            with writer.range(name):
                writer.range_end(writer.range_start("apart"))
    events = {event.name: event for event in profiler.events()}
    assert events.keys() == {"outer", "first", "second"}
    assert all(events[name].cpu_parent is events["outer"] for name in ("first", "second"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nvtx() -> None:
    writer = devices.RANGES
    with writer.range("outer"):
        handle = writer.range_start("apart")
    writer.range_end(handle)
