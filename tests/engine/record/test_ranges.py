"""Ranges reach the profiler as they were opened."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from overlap1f1b.engine.record.recorder import NvtxRanges, TorchRanges


def test_ranges_nest_under_torchs_profiler() -> None:
    writer = TorchRanges()
    with writer.nested("unseen"):
        pass
    with profile(activities=[ProfilerActivity.CPU]) as profiler, writer.nested("outer"):
        for name in ("first", "second"):
            with writer.nested(name):
                writer.end(writer.start("apart"))
    events = {event.name: event for event in profiler.events()}
    assert events.keys() == {"outer", "first", "second"}
    assert all(events[name].cpu_parent is events["outer"] for name in ("first", "second"))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_nvtx_needs_a_build_for_cuda() -> None:
    with pytest.raises(ValueError, match=r"^torch \S+ has no NVTX; allowed: a build with it$"):
        NvtxRanges()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nvtx() -> None:
    writer = NvtxRanges()
    with writer.nested("outer"):
        handle = writer.start("apart")
    writer.end(handle)
