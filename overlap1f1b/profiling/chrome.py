"""Chrome traces of torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from overlap1f1b.plan.ranges import PREFIX
from overlap1f1b.profiling.capture import Capture
from overlap1f1b.profiling.stream import Event

_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime"})
_DEVICE_RANGES = "gpu_user_annotation"
MOST_NAME = 1000
"""Characters that the name of a range may have."""


def taker(capture: Capture) -> Callable[[Event], None]:
    """What notes an event: ranges of ours, kernels, copies, and the calls that launched them; the rest is passed over.

    Times in the file are microseconds.
    """
    threads: dict[tuple[Any, Any], int] = {}
    add_range, add_launch, add_kernel = capture.add_range, capture.launches.append, capture.kernels.append

    def take(event: Event) -> None:
        if type(event) is not dict or event.get("ph") != "X":
            return
        category, name = event.get("cat"), event.get("name", "")
        if category in _KERNELS:
            args = event["args"]
            start = round(event["ts"] * 1000)
            end = start + round(event["dur"] * 1000)
            add_kernel((args.get("correlation", -1), int(args.get("stream", 0)), start, end))
        elif category in _LAUNCHES:
            number = event.get("args", {}).get("correlation")
            if number is not None:
                thread = threads.setdefault((event["pid"], event["tid"]), len(threads))
                add_launch((number, thread, round(event["ts"] * 1000)))
        elif (
            category != _DEVICE_RANGES and isinstance(name, str) and name.startswith(PREFIX) and len(name) <= MOST_NAME
        ):
            thread = threads.setdefault((event["pid"], event["tid"]), len(threads))
            start = round(event["ts"] * 1000)
            add_range(name, thread, start, start + round(event.get("dur", 0) * 1000))

    return take


def add_place(capture: Capture, content: Mapping[str, Any]) -> None:
    """Notes the rank and the number of ranks, which torch.profiler writes where there is a process group."""
    place = content.get("distributedInfo")
    if isinstance(place, dict):
        capture.rank, capture.world = place.get("rank"), place.get("world_size")


def is_trace(content: Mapping[str, Any]) -> bool:
    """Whether a file's top level is that of a Chrome trace."""
    return "traceEvents" in content
