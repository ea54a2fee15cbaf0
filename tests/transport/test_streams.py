"""Jobs in order, waits, and what happens to those who let go too early."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from overlap1f1b.transport import devices
from overlap1f1b.transport.failures import Failures
from overlap1f1b.transport.streams import DeviceStream, HostCopy, ThreadStream
from tests.lagging import Lagging


def within(seconds: float) -> Failures:
    return Failures(limit=timedelta(seconds=seconds))


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
        free.synchronize(within(0.02))
    hold.set()
    free.wait(timedelta(seconds=5))
    assert done == ["first", "second", "third"]
    assert slow.ended <= left.begun <= left.ended <= right.begun <= right.ended <= free.begun


def test_a_copy_to_the_host_is_read_late() -> None:
    copy = HostCopy.on(Lagging(lambda: 0.02), torch.tensor([1, 2]))
    assert not copy.mark.is_completed()
    assert copy.read(within(5))[0].tolist() == [1, 2]


def test_one_hardware_queue_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(Stream=lambda device, priority: priority)
    monkeypatch.setattr(devices, "gpu_of", lambda device: gpu)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.warns(UserWarning, match="unset it"):
        assert DeviceStream(torch.device("cuda", 0)).stream == -1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(0,), (1, 5), (3, 4)])
def test_a_kernel_writes_to_host_memory_as_a_gpu_sees_it(shape: tuple[int, ...]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    source = torch.arange(2 * torch.Size(shape).numel(), device=device)[::2].view(shape)
    host = devices.in_host_memory(source)
    assert devices.mapped(host, device).data_ptr() == host.data_ptr() or not source.numel()
    (copy,) = HostCopy.on(DeviceStream(device), source, by_kernel=True).read(within(10))
    assert copy.device.type == "cpu"
    assert torch.equal(copy, source.cpu())
