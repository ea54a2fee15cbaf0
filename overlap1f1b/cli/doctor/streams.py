"""Whether streams of a GPU run side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping

from overlap1f1b.cli.doctor.finding import Finding

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
CYCLES = 20_000_000  # of a GPU's clock, some ten milliseconds
MOST = 1.5  # times one stream's time that two may take side by side


def connections(environ: Mapping[str, str] = os.environ, *, gpu: bool) -> Finding:
    """With one connection every kernel waits for the one launched before it, on whichever stream."""
    text = environ.get(VARIABLE)
    if text is None:
        return Finding("connections", "ok", f"{VARIABLE} is not set; CUDA's default is 8")
    if not text.isdecimal() or not 1 <= int(text) <= 32:
        return Finding("connections", "warn", f"{VARIABLE}={text}", f"set {VARIABLE} to 8 to 32, or unset it")
    if int(text) == 1:
        advice = f"unset {VARIABLE}, or set it to 8 or more before CUDA starts: one connection serialises streams"
        return Finding("connections", "fail" if gpu else "warn", f"{VARIABLE}=1", advice)
    return Finding("connections", "ok", f"{VARIABLE}={text}")


def streams() -> Finding:
    """Two streams that wait on the GPU, measured beside one."""
    import torch

    if not torch.cuda.is_available():
        return Finding("streams", "ok", "no GPU: exchanges travel on threads")
    one, two = (_waiting(count) for count in (1, 2))
    value = f"two streams take {two / one:.2f} times as long as one"
    if two < MOST * one:
        return Finding("streams", "ok", value)
    advice = f"nothing can be hidden: unset {VARIABLE} and CUDA_LAUNCH_BLOCKING, and look for what else uses the GPU"
    return Finding("streams", "fail", value, advice)


def _waiting(count: int) -> float:
    """Milliseconds in which as many streams wait for the same number of cycles each."""
    import torch

    took = []
    for _ in range(3):  # the first contains CUDA's start
        main = torch.cuda.current_stream()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record(main)
        for _ in range(count):
            stream = torch.cuda.Stream()
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES)
            main.wait_stream(stream)
        end.record(main)
        end.synchronize()
        took.append(begin.elapsed_time(end))
    return min(took)
