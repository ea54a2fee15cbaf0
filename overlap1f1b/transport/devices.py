"""Devices on which a thread only queues work, GPUs for short: what differs between their kinds.

torch has a module for each kind, with the same names for streams, events, memory and random numbers: :func:`of` gives
it. What differs stands here, so another kind of device is a line of :data:`KINDS`, and an answer to the rest.
Beside this file, three places know one kind alone: ``kernels``, NCCL's options in ``groups``, and the report of
``doctor``.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

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
HOLD_CYCLES = 4_000_000
"""Cycles for which a measured node finds the device asleep: 2 to 3 ms, more than the host needs to launch it."""

RESERVE = 0.05
"""Part of a GPU's memory that is left for what the allocator does not count, and for gaps between tensors."""


def gpu_of(device: torch.device) -> Any:
    """Return torch's module for a GPU; None for a CPU, where the thread itself computes."""
    return KINDS.get(device.type)


def present() -> torch.device:
    """Return the kind of this machine's GPUs, without a number; the CPU if there are none."""
    return torch.device(next((kind for kind, gpu in KINDS.items() if gpu.is_available()), "cpu"))


def settle(device: torch.device) -> None:
    """Wait until a device has computed everything."""
    if (gpu := gpu_of(device)) is not None:
        gpu.synchronize(device)


def obtainable(device: torch.device) -> int:
    """Return the bytes that tensors of this process may take in all on a GPU: what is free, and what they have."""
    gpu = gpu_of(device)
    free, total = gpu.mem_get_info(device)
    return int(free + gpu.memory_reserved(device) - RESERVE * total)


def sleep(device: torch.device, cycles: int) -> None:
    """Let the current stream of a GPU do nothing for so many cycles of its clock."""
    gpu = gpu_of(device)
    with gpu.stream(gpu.current_stream(device)):  # else the thread's own device sleeps
        gpu._sleep(cycles)


class Stamp:
    """A mark that a stream of a GPU passes.

    Its event serves for another stamp when nobody refers to this one any more: to make one takes a host as long as to
    record it.
    """

    __slots__ = ("_free", "event")

    def __init__(self, event: Any, free: deque[Any]) -> None:
        self.event, self._free = event, free

    def __del__(self) -> None:
        self._free.append(self.event)


class Stamps:
    """Stamps on the streams of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._gpu, self._free = device, gpu_of(device), deque[Any]()

    def __call__(self, stream: Any = None) -> Stamp:
        """Stamp what a stream has been given so far; without one, the current stream."""
        try:
            event = self._free.pop()
        except IndexError:
            event = self._gpu.Event(enable_timing=True)
        event.record(self._gpu.current_stream(self.device) if stream is None else stream)
        return Stamp(event, self._free)


class Watch(NamedTuple):
    """The clock of a device on which the thread only queues work."""

    stamp: Callable[[], Any]  # records a mark behind the work that has been queued so far
    between: Callable[[Any, Any], float]  # seconds from one mark to another; the device has passed both
    settle: Callable[[], object]  # waits until the device has passed all marks
    # Lets the device rest, so that the thread gets ahead: the time of a node on an idle device is that of its launch.
    hold: Callable[[], object] = lambda: None


def watch_of(device: torch.device) -> Watch | None:
    """Return a clock of events on the current stream; None for a CPU, where the thread itself computes."""
    if gpu_of(device) is None:
        return None
    wait, hold = partial(settle, device), partial(sleep, device, HOLD_CYCLES)
    return Watch(Stamps(device), lambda a, b: a.event.elapsed_time(b.event) / 1e3, wait, hold)


def in_host_memory(like: Tensor) -> Tensor:
    """Return an empty tensor of the same shape and dtype that a device can copy to while the thread goes on."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=gpu_of(like.device) is not None)


def mapped(host: Tensor, device: torch.device) -> Tensor:
    """Return the memory of :func:`in_host_memory` as a GPU sees it: its kernels write there, without a copy."""
    seen = SimpleNamespace(kept=host, __cuda_array_interface__=host.numpy().__array_interface__)
    return torch.as_tensor(seen, device=device)
