"""When nodes ran on the device, where the thread only sees when it queued them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from overlap1f1b.plan import Node, Span
from overlap1f1b.transport.lanes import Flight


class Watch(NamedTuple):
    """A clock of a device.

    Args:
        stamp: Notes now, behind what the thread has computed so far.
        between: Seconds from one stamp to another, both of which have been reached.
        settle: Waits until all stamps have been reached.
    """

    stamp: Callable[[], Any]
    between: Callable[[Any, Any], float]
    settle: Callable[[], object]


def cuda_watch(device: torch.device) -> Watch:
    """Events on the stream that computes."""

    def stamp() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return Watch(stamp, lambda a, b: a.elapsed_time(b) / 1e3, lambda: torch.cuda.synchronize(device))


class StepTimes:
    """Stamps around the compute nodes of a step, from its start.

    Args:
        watch: Of the device.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch, self.origin = watch, watch.stamp()
        self._computed: list[tuple[Node, Any, Any]] = []

    def computed(self, node: Node, begun: Any) -> None:
        """A node has been queued since that stamp."""
        self._computed.append((node, begun, self.watch.stamp()))

    def spans(self, flights: Iterable[Flight[Any]]) -> tuple[Span, ...]:
        """When the nodes and these exchanges ran, in seconds from the start; waits for the device."""
        self.watch.settle()
        stamped = [(f.node, f.begun, f.ended) for f in flights if f.begun is not None and f.ended is not None]
        since = self.watch.between
        return tuple(
            Span(node, since(self.origin, begun), since(self.origin, ended))
            for node, begun, ended in (*self._computed, *stamped)
        )
