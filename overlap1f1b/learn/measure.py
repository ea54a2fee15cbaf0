"""Measure node costs in a step, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from types import MappingProxyType
from typing import Any

from torch import Tensor

from overlap1f1b.plan import EXCHANGED, RESOURCE_OF, CostKey, Node, NodeCosts, Op, Place, Resource, Span, cost_key
from overlap1f1b.play.observers import Observer
from overlap1f1b.play.times import Times
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.exchange import Exchange, Transfer
from overlap1f1b.transport.mesh import Mesh
from overlap1f1b.transport.streams import Mark

LinkCosts = dict[CostKey, tuple[float, ...]]


class OneByOne(Observer):
    """Keeps nodes apart while they are measured, and ranks together, so that no transfer waits for another rank."""

    keeps_order = True

    def __init__(self, barrier: Callable[[], None]) -> None:
        self._barrier = barrier
        self._times: Times | None = None

    def begin(self, times: Times) -> None:
        self._times = times

    def before(self, node: Node) -> None:
        if node.op in EXCHANGED:
            self._barrier()

    def ready(self, node: Node, received: Mapping[Place, Any]) -> None:
        assert self._times is not None
        if self._times.watch is not None and node.resource is Resource.COMPUTE:
            self._times.watch.hold()

    def after(self, node: Node) -> None:
        assert self._times is not None
        if node.op is Op.COUNTS and self._times.watch is None:
            self._times.flights[-1].arrive()  # the dispatch that waits for them comes after a barrier of all ranks

    def end(self, *, failed: bool) -> None:
        self._times = None


class BackToBack:
    """An exchange that sends all rows twice, back to back: the second time shows how long they occupy the links.

    The time of a lone exchange contains its start-up, and a rested link may pass the first bytes faster; in a plan most
    exchanges travel behind another.
    """

    def __init__(self, real: Exchange) -> None:
        self.real, self.ranks, self.rank, self.background = real, real.ranks, real.rank, real.background
        self.sms = real.sms
        self.counts, self.abort = real.counts, real.abort
        self.expect_rows, self.expect_counts = real.expect_rows, real.expect_counts

    def rows(
        self,
        source: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        tag: int = 0,
        expected: Transfer[Tensor] | None = None,
        ready: Mark | None = None,
    ) -> Transfer[Tensor]:
        """Exchange the rows twice; the result is the second one's."""
        # Both receives are posted before anything is sent: a later announcement would wait behind the rows on the link.
        # Both carry the same rows, so either may fill the announced buffer.
        first = expected or self.real.expect_rows(source, receive, tag)
        second = self.real.expect_rows(source, receive, tag)
        ahead = self.real.rows(source, send, receive, tag, first, ready)
        return replace(self.real.rows(source, send, receive, tag, second, ready), ahead=ahead)


def measured_costs(
    nodes: Iterable[Node],
    spans: Iterable[Span],
    mesh: Mesh,
    *,
    shared_links: bool,
    launches: Iterable[Span] = (),
    transfers: Mapping[CostKey, float] = MappingProxyType({}),
) -> NodeCosts:
    """Return costs in seconds, the same on all ranks: of each node the median over microbatches and steps.

    So a single compilation or allocation does not count. A compute node costs the time of the slowest rank. An exchange
    has one cost for each rank that shares the experts, the time until that rank had received all its rows: links carry
    different numbers of rows. A transfer between stages costs what ``transfers`` of this rank say. A launch costs the
    median over blocks, too, on the slowest rank; ``launches`` has the times in which the thread launched nodes on a
    device.
    """
    took: dict[Node, list[float]] = {}
    for span in spans:
        took.setdefault(span.node, []).append(span.end - span.start)
    by_key: dict[CostKey, list[float]] = {}
    for node in nodes:
        if node.op not in (Op.SEND, Op.RECEIVE):
            by_key.setdefault(cost_key(node), []).extend(took.get(node, (0.0,)))
    mine: LinkCosts = {key: (median(times),) for key, times in by_key.items()}
    mine |= {key: (seconds,) for key, seconds in transfers.items()}
    by_op: dict[tuple[Op, Kind], list[float]] = {}
    for span in launches:
        by_op.setdefault(span.node[:2], []).append(span.end - span.start)
    # A launch belongs to no block; a tag keeps it apart from the time on the device.
    mine |= {(*place, *_LAUNCH): (median(times),) for place, times in by_op.items()}
    merged = slowest(mine, mesh)
    launch = {key[:2]: max(merged.pop(key)) for key in list(merged) if key[2:] == _LAUNCH}
    by_node = {key: links if len(links) > 1 else links[0] for key, links in merged.items()}
    return NodeCosts(by_node=by_node, shared_links=shared_links, launch=launch)


_LAUNCH = (-1, -1, -1, -1)


def slowest(mine: LinkCosts, mesh: Mesh) -> LinkCosts:
    """Merge the tables of all ranks: the slowest counts, and exchanges keep the link of each that shares experts."""
    return mesh.combined(mine, lambda dimension, every: _slowest(every, links=dimension in mesh.experts_over))


def _slowest(tables: list[LinkCosts], *, links: bool) -> LinkCosts:
    """Merge the tables of the ranks along a dimension."""
    merged: LinkCosts = {}
    for key in dict.fromkeys(key for table in tables for key in table):
        costs = [table[key] for table in tables if key in table]
        if links and RESOURCE_OF[key[0]] in (Resource.EXCHANGE, Resource.CONTROL):
            merged[key] = tuple(chain.from_iterable(costs))
        else:
            merged[key] = tuple(map(max, zip(*costs, strict=True)))
    return merged
