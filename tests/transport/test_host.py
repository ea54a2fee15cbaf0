"""Bytes on their way to host memory and back, in buffers that are kept."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch

from overlap1f1b.transport.host import HostMemory, bytes_of


def test_buffers_are_used_again() -> None:
    """As many as are away at once, also if sizes differ from step to step."""
    host, made = HostMemory(torch.device("cpu")), []
    with patch.object(HostMemory, "_made", autospec=True, side_effect=HostMemory._made) as make_one:
        for size in (1000, 990, 960, 5000, 4990, 100):
            tensors = [torch.randint(256, (size,), dtype=torch.uint8), torch.randint(256, (7,), dtype=torch.uint8)]
            parcel = host.leave(tensors).finish()
            back = [torch.zeros_like(tensor) for tensor in tensors]
            host.fetch(parcel, back).finish()
            assert all(map(torch.equal, back, tensors))
            host.keep(parcel)
            made.append(make_one.call_count)
    assert made == [1, 1, 1, 2, 2, 3]  # the last is far smaller
    assert bytes_of(torch.ones(2).untyped_storage()).tolist() == [0, 0, 128, 63] * 2


def test_an_imitated_link_has_a_rate_each_way() -> None:
    """As in ``tests/running/test_link.py`` no sooner than the rate lets them, however slow the machine is."""
    host, tensor = HostMemory(torch.device("cpu"), 0.1), torch.zeros(10**6, dtype=torch.uint8)
    begun = time.perf_counter()
    transfers = [host.leave([tensor]) for _ in range(2)]
    parcel, _ = (transfer.finish() for transfer in transfers)
    host.fetch(parcel, [tensor]).finish()
    assert time.perf_counter() - begun >= 3 * 0.01


def test_a_gpu_has_a_link_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"^host_link=2.5 on cuda, which has a link of its own; allowed: None, or a"):
        HostMemory(torch.device("cuda"), 2.5)
