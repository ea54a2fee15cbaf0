"""Devices on which a thread only queues work, GPUs for short: the one file that knows their kinds.

torch has a module for each kind, with the same names for streams, events, memory and random numbers: :func:`of` gives
it. What differs stands here, so another kind of device is a line of :data:`KINDS`, and an answer to the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

KINDS: Mapping[str, Any] = {"cuda": torch.cuda}  # AMD's GPUs, too
CONNECTIONS, VISIBLE = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES"
"""Variables of the environment: the number of hardware queues, and the GPUs that a process may use."""
GRAPHS = "triton.cudagraphs"
"""Option of torch.compile that captures kernels once: each replay overwrites the one before."""
PRECISIONS = ("cuda", "matmul"), ("mkldnn", "matmul")
"""Products of float32 whose precision is a setting."""
RANGES, CAPTURE = torch.cuda.nvtx, torch.cuda.profiler.profile
"""For nsys: functions that write ranges, and the context of the part that it records."""


def of(device: torch.device) -> Any:
    """Return torch's module for a GPU; None for a CPU, where the thread itself computes."""
    return KINDS.get(device.type)


def present() -> torch.device:
    """Return the kind of this machine's GPUs, without a number; the CPU if there are none."""
    return torch.device(next((kind for kind, gpu in KINDS.items() if gpu.is_available()), "cpu"))


def settle(device: torch.device) -> None:
    """Wait until a device has computed everything."""
    if (gpu := of(device)) is not None:
        gpu.synchronize(device)


def sleep(device: torch.device, cycles: int) -> None:
    """Let the current stream of a GPU do nothing for so many cycles of its clock."""
    gpu = of(device)
    with gpu.stream(gpu.current_stream(device)):  # else the thread's own device sleeps
        gpu._sleep(cycles)


def in_host_memory(like: Tensor) -> Tensor:
    """Return an empty tensor of the same shape and dtype that a device can copy to while the thread goes on."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=of(like.device) is not None)


def mapped(host: Tensor, device: torch.device) -> Tensor:
    """Return the memory of :func:`in_host_memory` as a GPU sees it: its kernels write there, without a copy."""
    seen = SimpleNamespace(kept=host, __cuda_array_interface__=host.numpy().__array_interface__)
    return torch.as_tensor(seen, device=device)
