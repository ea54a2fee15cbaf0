"""The events of torch.profiler's Chrome traces: our ranges, kernels, copies and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Raw, Struct
from msgspec.json import Decoder

from overlap1f1b.plan.ranges import PREFIX
from overlap1f1b.profiling.recording import Capture

_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("_runtime", "_driver")
"""Endings of the categories of calls: cuda, hip, xpu, privateuse1."""
_DEVICE_RANGES = "gpu_user_annotation"


class _Event(Struct):
    ph: Any = None
    cat: Any = None
    name: Any = None


class _Call(Struct, frozen=True):
    correlation: Any = None
    stream: Any = None  # of a call on ROCm a text
    device: Any = None


class _Timed(Struct):
    ts: float
    dur: float = 0.0
    pid: Any = 0
    tid: Any = 0
    args: _Call = _Call()


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
    event_of, timed_of = Decoder(_Event).decode, Decoder(_Timed, strict=False).decode  # a time may be a text
    threads: dict[tuple[str, str], int] = {}
    texts: dict[str, int] = {}

    def number_of(value: Any) -> int:
        """Return a stream or a correlation as a number; a text, or what does not fit, gets one below -1."""
        fits = isinstance(value, int) and abs(value) < 2**63
        return value if fits else texts.setdefault(str(value), -2 - len(texts))

    for number, text in enumerate(events):
        if not number % (1 << 16):
            seen(number / len(events))
        event = event_of(text)
        category, name = event.cat, event.name if isinstance(event.name, str) else ""
        kernel, launch = category in _KERNELS, isinstance(category, str) and category.endswith(_LAUNCHES)
        ours = category != _DEVICE_RANGES and name.startswith(PREFIX)
        if event.ph != "X" or not (kernel or launch or ours):
            continue
        timed = timed_of(text)
        args, start, duration = timed.args, round(timed.ts * 1000), round(timed.dur * 1000)
        correlation = -1 if args.correlation is None else number_of(args.correlation)
        if kernel:
            copy = category != "kernel" and not name.startswith("Mem")
            stream = number_of(timed.tid if args.stream is None else args.stream)
            capture.add_kernel("Memcpy" if copy else name, args.device, correlation, stream, start, start + duration)
            continue
        thread = threads.setdefault((str(timed.pid), str(timed.tid)), len(threads))
        if not launch:
            capture.add_range(name, thread, start, start + duration)
        elif correlation != -1:
            capture.launches.extend((correlation, thread, start))
