"""Why a rank computed nothing."""

from __future__ import annotations

import numpy as np

from overlap1f1b.plan import Resource
from overlap1f1b.profiling.intervals import Intervals, Times, difference, intersection, joined, length, union
from overlap1f1b.profiling.recording import Recording, Step

IDLE = ("exposed_exchange", "pipeline_bubble", "host_late")


def idle_time(
    recording: Recording, step: Step, window: tuple[int, int], compute: Intervals, exposed: Intervals
) -> dict[str, int]:
    """Nanoseconds of a step without compute, by reason; each counts for one reason.

    An exchange in flight comes first. Then the pipeline: the thread waits for another stage, or, on a device, the next
    kernel has been launched and a transfer is under way. What is left is the host's: it has not issued anything.

    Args:
        recording: The rank.
        step: One of its steps.
        window: Start and end of that step.
        compute: When something is computed.
        exposed: When something is exchanged and nothing computed.
    """
    idle = difference(np.array([window], np.int64), compute)
    rest = difference(idle, exposed)
    waiting = recording.on(step.waits, Resource.PEER).covered
    transfers = recording.transfers(step).covered
    if recording.device:
        waiting = joined(waiting, intersection(transfers, _blocked(idle, step.compute.start, step.compute.launched)))
    elif not len(step.waits):  # nobody noted waits
        waiting = transfers
    bubble = length(intersection(rest, waiting))
    parts = (length(idle) - length(rest), bubble, length(rest) - bubble)
    return dict(zip(IDLE, parts, strict=True))


def _blocked(idle: Intervals, start: Times, launched: Times) -> Intervals:
    """The parts of idle time in which the kernel that ends it has been launched already; all of it if none does."""
    order = np.argsort(start, kind="stable")
    start, launched = start[order], np.append(launched[order], np.iinfo(np.int64).min)
    after = np.searchsorted(start, idle[:, 1])
    return union(np.maximum(idle[:, 0], launched[after]), idle[:, 1])
