"""Bytes on their way to host memory and back, at the rate of a link."""

from __future__ import annotations

import time

import pytest
import torch

from overlap1f1b.transport.host import HostMemory


def test_bytes_come_back() -> None:
    host = HostMemory(torch.device("cpu"))
    for size in (1000, 1, 0):
        tensors = [torch.randint(256, (size,), dtype=torch.uint8), torch.randint(256, (7,), dtype=torch.uint8)]
        leaving = host.leave(tensors)
        away, back = leaving.finish(), [torch.zeros_like(tensor) for tensor in tensors]
        assert leaving.sent == host.fetch(away, back).sent == size + 7
        host.fetch(away, back).finish()
        assert all(map(torch.equal, back, tensors))


def test_an_imitated_link_has_a_rate_each_way() -> None:
    """As in ``tests/running/test_link.py`` no sooner than the rate lets them, however slow the machine is."""
    host, tensor = HostMemory(torch.device("cpu"), 0.1), torch.zeros(10**6, dtype=torch.uint8)
    begun = time.perf_counter()
    transfers = [host.leave([tensor]) for _ in range(2)]
    away, _ = (transfer.finish() for transfer in transfers)
    host.fetch(away, [tensor]).finish()
    assert time.perf_counter() - begun >= 3 * 0.01


def test_a_gpu_has_a_link_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"^host_link=2.5 on cuda, which has a link of its own; allowed: None, or a"):
        HostMemory(torch.device("cuda"), 2.5)
