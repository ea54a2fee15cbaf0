"""A GPU's own clock, and the multiprocessors that exchanges take from compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from overlap1f1b.plan import Node, Span
from overlap1f1b.transport import devices
from overlap1f1b.transport.lanes import Flight

HOLD_CYCLES = 4_000_000
"""Cycles for which a measured node finds the device asleep: 2 to 3 ms, more than the host needs to launch it."""


class Watch(NamedTuple):
    """The clock of a device on which the thread only queues work.

    Args:
        stamp: Record a mark behind the work that has been queued so far.
        between: Return the seconds from one mark to another; the device has passed both.
        settle: Wait until the device has passed all marks.
        hold: Let the device do nothing for a while, so that the thread gets ahead of it. Else the time of a node on an
            idle device would be that of its launch.
    """

    stamp: Callable[[], Any]
    between: Callable[[Any, Any], float]
    settle: Callable[[], object]
    hold: Callable[[], object] = lambda: None


def watch_of(device: torch.device) -> Watch | None:
    """Return a clock of events on the current stream; None for a CPU, where the thread itself computes."""
    gpu = devices.of(device)
    if gpu is None:
        return None

    def stamp() -> Any:
        event = gpu.Event(enable_timing=True)
        event.record(gpu.current_stream(device))
        return event

    return Watch(
        stamp,
        lambda a, b: a.elapsed_time(b) / 1e3,
        lambda: devices.settle(device),
        lambda: devices.sleep(device, HOLD_CYCLES),
    )


class StepTimes:
    """Marks around the compute nodes of a step."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.origin = watch, watch.stamp()
        self._computed: list[tuple[Node, Any, Any]] = []
        self.launches: list[Span] = []
        """Times in which the thread launched each node, without waits for counts; seconds of ``perf_counter``."""

    def first_pending(self) -> Node | None:
        """Return the first node that the device has not computed; None if it has computed all."""
        return next((node for node, _, ended in self._computed if not ended.query()), None)

    def computed(self, node: Node, begun: Any) -> None:
        """Note that a node has been queued since the mark ``begun``."""
        self._computed.append((node, begun, self.watch.stamp()))

    def spans(self, flights: Iterable[Flight[Any]]) -> tuple[Span, ...]:
        """Return the spans of the nodes and of these exchanges, in seconds from the start; waits for the device."""
        self.watch.settle()
        stamped = [(f.node, f.begun, f.ended) for f in flights if f.begun is not None and f.ended is not None]
        since = self.watch.between
        return tuple(
            Span(node, since(self.origin, begun), since(self.origin, ended))
            for node, begun, ended in (*self._computed, *stamped)
        )


@contextmanager
def carved_out(blocks: int) -> Iterator[None]:
    """Let torch's products leave multiprocessors alone that ``blocks`` of transfers may hold, where this torch can.

    A grouped product launches one block for each multiprocessor, in clusters of two. Beside a single block of a
    transfer it runs in two waves, 1.7 times as long; if two are left alone for each such block, 1.07 times (measured
    on an H200, with 8). Its sums, and those of other products, have the same bits.
    """
    put = getattr(torch._C, "_set_sm_carveout_experimental", None) if blocks else None
    if put is None:
        yield
        return
    before = torch._C._get_sm_carveout_experimental()
    put(2 * blocks)
    try:
        yield
    finally:
        put(before)
