"""What a GPU is asked for, and how its marks are used again; its own answers are in tests/nccl."""

from types import SimpleNamespace

import pytest
import torch

from overlap1f1b.transport import devices
from overlap1f1b.transport.devices import Stamps

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Event:
    """In place of an event of a GPU."""

    def __init__(self, enable_timing: bool) -> None:
        self.recorded: list[object] = []
        self.record = self.recorded.append


def test_an_event_serves_again_when_nobody_refers_to_its_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(Event=Event, current_stream=lambda device: device)
    monkeypatch.setattr(devices, "KINDS", {"cuda": gpu})
    stamps = Stamps(GPU)
    first, second = stamps(), stamps("side")
    assert first.event is not second.event
    assert (first.event.recorded, second.event.recorded) == ([GPU], ["side"])
    event = first.event
    del first
    assert stamps("again").event is event
    assert event.recorded == [GPU, "again"]


def test_memory_that_tensors_may_take_is_what_is_free_and_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(mem_get_info=lambda device: (30, 100), memory_reserved=lambda device: 20)
    monkeypatch.setattr(devices, "KINDS", {"cuda": gpu})
    assert devices.obtainable(GPU) == 30 + 20 - 5


def test_a_cpu_has_no_module_and_no_clock() -> None:
    assert devices.gpu_of(CPU) is None
    assert devices.watch_of(CPU) is None
    devices.settle(CPU)
    assert devices.in_host_memory(torch.empty(2, 3, dtype=torch.int64)).shape == (2, 3)
