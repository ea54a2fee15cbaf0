"""Jobs in order, waits, and what happens to those who let go too early."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap1f1b.transport import devices
from overlap1f1b.transport.streams import DeviceStream, HostCopy, ThreadStream
from tests.lagging import Lagging


def test_jobs_run_in_order_and_after_other_streams() -> None:
    hold, done = threading.Event(), []
    first, second = ThreadStream("first"), ThreadStream("second")
    slow = first.run(lambda: hold.wait(5.0))
    left = first.run(lambda: done.append("first"))
    right = second.run(lambda: done.append("second"), after=(left,))
    free = second.run(lambda: done.append("third"))
    assert not slow.is_completed()
    assert not free.is_completed()
    with pytest.raises(TimeoutError):
        free.synchronize(timedelta(milliseconds=20))
    hold.set()
    free.wait(timedelta(seconds=5))
    assert done == ["first", "second", "third"]
    assert slow.ended <= left.begun <= left.ended <= right.begun <= right.ended <= free.begun


def test_a_copy_to_the_host_is_read_late() -> None:
    counts = torch.tensor([1, 2])
    copy = HostCopy.on(Lagging(lambda: 0.02), counts)
    assert copy.mark is not None
    assert not copy.mark.is_completed()
    assert copy.read(timedelta(seconds=5))[0].tolist() == [1, 2]
    assert HostCopy([counts]).read()[0] is counts


class _Log(list[str]):
    """What a GPU is told."""

    def module(self) -> Any:
        log = self

        class Stream:
            def __init__(self, device: Any = None, priority: int = 0) -> None:
                self.name = f"side{priority}"

            def wait_stream(self, other: Any) -> None:
                log.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Any) -> None:
                log.append(f"{self.name} waits for event {event.number}")

            def __enter__(self) -> None:
                log.append(f"on {self.name}")

            def __exit__(self, *error: object) -> None:
                log.append("off")

        compute = Stream()
        compute.name = "compute"

        class Event:
            count = 0

            def __init__(self, enable_timing: bool = False) -> None:
                Event.count += 1
                self.number, self.asked = Event.count, 0

            def record(self, stream: Any) -> None:
                log.append(f"{stream.name} records {self.number}")

            def query(self) -> bool:
                self.asked += 1
                return self.asked > 2

        return SimpleNamespace(
            Stream=Stream, Event=Event, current_stream=lambda device: compute, stream=lambda stream: stream
        )


def test_what_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job waits for what was computed or for the marks, lies between two events, and compute waits for the second."""
    log = _Log()
    monkeypatch.setattr(devices, "KINDS", {"cuda": log.module()})
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.warns(UserWarning, match="unset it"):
        DeviceStream(torch.device("cuda", 0))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    stream = DeviceStream(torch.device("cuda", 0))
    first = stream.run(lambda: log.append("copy"))
    stream.run(lambda: log.append("back"), after=(first,))
    first.wait(timedelta(seconds=1))
    assert log == [
        "side-1 waits for compute", "on side-1", "side-1 records 1", "copy", "side-1 records 2", "off",
        "side-1 waits for event 2", "on side-1", "side-1 records 3", "back", "side-1 records 4", "off",
        "compute waits for event 2",
    ]  # fmt: skip
    first.synchronize(timedelta(seconds=1))
    assert first.is_completed()
    never = stream.run(lambda: None)
    never.ended.event.query = lambda: False
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        never.synchronize(timedelta(milliseconds=10))
    assert time.monotonic() - start < 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(0,), (1, 5), (3, 4)])
def test_a_kernel_writes_to_host_memory_as_a_gpu_sees_it(shape: tuple[int, ...]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.arange(2 * torch.Size(shape).numel(), device=device)[::2].view(shape)
    host = devices.in_host_memory(source)
    assert devices.mapped(host, device).data_ptr() == host.data_ptr() or not source.numel()
    (copy,) = HostCopy.on(DeviceStream(device), source, by_kernel=True).read(timedelta(seconds=10))
    assert copy.device.type == "cpu"
    assert torch.equal(copy, source.cpu())
