"""The events of torch.profiler's Chrome traces: our ranges, kernels, copies and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Raw, Struct
from msgspec.json import Decoder

from overlap1f1b.plan.ranges import PREFIX
from overlap1f1b.profiling.recording import MOST_NAME, Capture

_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime")
_DEVICE_RANGES = "gpu_user_annotation"


class _Event(Struct):
    ph: Any = None
    cat: Any = None
    name: Any = None


class _Range(Struct):
    pid: int | str
    tid: int | str
    ts: float
    dur: float = 0.0


class _Call(Struct, frozen=True):
    correlation: int | None = None


class _Launch(Struct):
    pid: int | str
    tid: int | str
    ts: float
    args: _Call = _Call()


class _Place(Struct):
    correlation: int = -1
    stream: int = 0


class _Kernel(Struct):
    ts: float
    dur: float
    args: _Place


def add_events(capture: Capture, events: Sequence[Raw], seen: Callable[[float], None]) -> None:
    """Add the events that count to a capture; times in the file are microseconds.

    Args:
        capture: The process of the trace.
        events: JSON of the events.
        seen: Told from time to time which share of the events was read.

    Raises:
        DecodeError: An event has another form.
        UnicodeDecodeError: A name is not text.
        OverflowError: A time or a number does not fit into 64 bits.
    """
    event_of, range_of = Decoder(_Event).decode, Decoder(_Range).decode
    launch_of, kernel_of = Decoder(_Launch).decode, Decoder(_Kernel).decode
    threads: dict[tuple[int | str, int | str], int] = {}
    for number, text in enumerate(events):
        if not number % (1 << 16):
            seen(number / len(events))
        event = event_of(text)
        category, name = event.cat, event.name if isinstance(event.name, str) else ""
        if event.ph != "X":
            continue
        if category in _KERNELS:
            kernel = kernel_of(text)
            start, duration = round(kernel.ts * 1000), round(kernel.dur * 1000)
            capture.kernels.extend((kernel.args.correlation, kernel.args.stream, start, start + duration))
        elif category in _LAUNCHES:
            launch = launch_of(text)
            if launch.args.correlation is not None:
                thread = threads.setdefault((launch.pid, launch.tid), len(threads))
                capture.launches.extend((launch.args.correlation, thread, round(launch.ts * 1000)))
        elif category != _DEVICE_RANGES and name.startswith(PREFIX) and len(name) <= MOST_NAME:
            found = range_of(text)
            thread = threads.setdefault((found.pid, found.tid), len(threads))
            start, duration = round(found.ts * 1000), round(found.dur * 1000)
            capture.add_range(name, thread, start, start + duration)
