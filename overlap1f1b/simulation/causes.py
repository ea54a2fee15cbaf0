"""Why an exchange is exposed: every moment without compute has one cause. docs/profiling/causes.md defines the five.

    compute   ████              ████        between two compute nodes the rank awaits the transfer of the next one:
    exchange     ░░░░░░░░░░░░░░░              posted, waits for the last rank, moves, has arrived
                 └─ order ─┴─late─┘└ host    what it is late by comes last; the rest was open by the plan's own times

Lateness of an exchange is what it waited for the last rank to post it (that rank's host, else imbalance), what more
rows than the mean took (imbalance), what the rest took beyond the plan's time (link), and what an exchange before it on
the same link has passed on.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate
from math import inf
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple, Self

from overlap1f1b.plan import RECOMPUTES, Node, NodeCosts, Op, Resource, Span
from overlap1f1b.plan.node import OF_PARAMETERS, awaited_by
from overlap1f1b.schedule import Kind

CAUSES = ("order", "imbalance", "host", "link", "pipeline")
_LINKS = (Resource.EXCHANGE, Resource.CONTROL)
_OTHER = {Op.DISPATCH: Op.COMBINE, Op.COMBINE: Op.DISPATCH}
"""The exchange that brings the same rows back."""
_NEAR = 0.1
"""Part of an exchange's time within which it follows another at once."""
_NOTICED = 2
"""Times as late may the end of the other be noticed: a thread has to wake up."""


class Flown(NamedTuple):
    """An exchange as one rank saw it.

    Args:
        time: In flight.
        sent: Bytes that left the rank.
        received: Bytes that were there at its end, those of its own rows included.
        host: By how much the rank's host has been late before it, over the step.
    """

    time: float
    sent: float = 0.0
    received: float = 0.0
    host: float = 0.0


class Idle(NamedTuple):
    """A time without compute, and its cause: one of :data:`CAUSES`."""

    start: float
    end: float
    cause: str


class Gap(NamedTuple):
    """A time between two compute nodes, the transfer that the second awaits, if there is one, and when it was launched.

    Where the host computes by itself it launches nothing before.
    """

    start: float
    end: float
    awaited: Span | None
    launched: float = inf


Late = Mapping[str, float]
"""By how much a transfer is late, by cause."""


class Causes:
    """The causes of the idle times of a rank's step.

    Args:
        spans: Of the step; times in any unit, from its start.
        bytes: Bytes that left the rank in each exchange, and those that were there at its end.
        costs: Of the plan, in the same unit; None if it was not made by costs: no link is then slow.
        others: What the other ranks that share experts saw; without them no rank is late.
        launched: When the host had launched a compute node, by the node and its start, on a device that computes.

    Attributes:
        flown: What this rank saw, by exchange.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        bytes: Mapping[Node, tuple[float, float]],
        costs: NodeCosts | None = None,
        others: Sequence[Mapping[Node, Flown]] = (),
        launched: Mapping[tuple[Node, float], float] = MappingProxyType({}),
    ) -> None:
        self._costs, self._others = costs, others
        transfers: dict[Node, Span] = {}  # which may have several kernels, a reduction buffers
        for span in spans:
            if span.node.resource is not Resource.COMPUTE:
                other = transfers.get(span.node, span)
                transfers[span.node] = Span(span.node, min(span.start, other.start), max(span.end, other.end))
        self._flights = {node: span for node, span in transfers.items() if node.resource in _LINKS}
        self._behind = _queued(transfers.values())
        alone = [one for one in spans if one.node.resource is Resource.COMPUTE or one.node.op in OF_PARAMETERS]
        whole = [one for one in transfers.values() if one.node.op not in OF_PARAMETERS]
        self._gaps = list(gaps([*alone, *whole], launched))
        self._computed: dict[object, list[float]] = {}  # ends of compute nodes, by their chain
        for span in sorted(spans, key=lambda span: span.end):
            if span.node.resource is Resource.COMPUTE and span.node.kind is not Kind.W:
                self._computed.setdefault(span.node.chain, []).append(span.end)
        lost = [sum(end - start for start, end, cause in self._idle(gap, {}) if cause == "host") for gap in self._gaps]
        before, begins = [0.0, *accumulate(lost)], [gap.start for gap in self._gaps]
        self.flown: dict[Node, Flown] = {}
        for span in self._flights.values():
            number = bisect_right(begins, span.start)
            host = before[number]
            if number and span.start < self._gaps[number - 1].end:  # posted in a gap, perhaps late
                awaited = self._before(span)
                ready = max(begins[number - 1], begins[number - 1] if awaited is None else awaited.end)
                host = before[number - 1] + max(0.0, span.start - ready)
            self.flown[span.node] = Flown(span.end - span.start, *bytes.get(span.node, (0.0, 0.0)), host)

    def pooled(self, costs: NodeCosts | None, others: Sequence[Mapping[Node, Flown]]) -> Self:
        """Return the same by costs of the plan, and with what other ranks saw."""
        found = copy(self)
        found._costs, found._others = costs, others
        vars(found).pop("_flights_late", None)
        return found

    @property
    def moved(self) -> Mapping[Node, float]:
        """How long each exchange moved: without the waits for a last rank and for one before it on the link."""
        return self._flights_late[1]

    @property
    def idle(self) -> list[Idle]:
        """The times without compute in their order, each with its cause."""
        late, _ = self._flights_late
        return [piece for gap in self._gaps for piece in self._idle(gap, late)]

    @property
    def crowding(self) -> dict[tuple[int, int], float]:
        """The rows of the rank with most of them over the mean of ranks, by stage and block with experts."""
        rows: dict[tuple[int, int], list[float]] = {}
        tables = (self.flown, *self._others)
        for number, table in enumerate(tables):
            for node, flown in table.items():
                if node.op is Op.DISPATCH and node.kind is Kind.F:
                    rows.setdefault((node.stage, node.block), [0.0] * len(tables))[number] += flown.received
        return {place: max(of) / fmean(of) for place, of in sorted(rows.items()) if sum(of)}

    def _before(self, span: Span) -> Span | None:
        """Return what an exchange could not leave before: its counts, or one before it on the link."""
        node = span.node
        counted = node.op is Op.DISPATCH and node.kind is Kind.F
        counts = self._flights.get(node._replace(op=Op.COUNTS)) if counted else None
        return max(filter(None, (counts, self._behind.get(node))), key=lambda one: one.end, default=None)

    def _ready(self, span: Span) -> float:
        """Return when an exchange could have left: behind the last compute of its chain, and its counts."""
        ends = self._computed.get(span.node.chain, [])
        number = bisect_right(ends, span.start)
        counts = self._flights.get(span.node._replace(op=Op.COUNTS))
        ready = ends[number - 1] if number else 0.0
        return ready if counts is None or counts.end > span.start else max(ready, counts.end)

    def _idle(self, gap: Gap, late: Mapping[Node, Late]) -> Iterator[Idle]:
        """Yield the causes of a gap without compute, in order of time."""
        start, end, awaited, launched = gap
        if awaited is not None:
            posted, arrived = max(start, awaited.start), min(end, awaited.end)
            if start < posted < arrived:
                yield from self._idle(Gap(start, posted, self._before(awaited)), late)
            if posted < arrived and awaited.node.resource is Resource.PEER:
                yield Idle(posted, arrived, "pipeline")
            elif posted < arrived:
                yield from _split(posted, arrived, late.get(awaited.node, {}))
            start = max(start, arrived)
        if start < (idle := min(end, max(start, launched))):
            yield Idle(start, idle, "host")
        if idle < end:  # launched, and nothing that it needs was missing: the device ran one thing at a time
            yield Idle(idle, end, "order")

    @cached_property
    def _flights_late(self) -> tuple[dict[Node, Late], dict[Node, float]]:
        """Return by how much each exchange is late, by cause, and how long it moved."""
        found, moved = dict[Node, Late](), dict[Node, float]()
        before: dict[Resource, Span] = {}
        level = [0.0] * len(self._others)  # by how much each one's host was later than this one's, and waited for
        stalls: dict[Node, float] = {}
        for start, end, awaited, _ in self._gaps:
            if awaited is not None:
                stalls[awaited.node] = min(end, awaited.end) - max(start, awaited.start)
        for span in sorted(self._flights.values(), key=lambda span: span.end):
            node, mine = span.node, self.flown[span.node]
            there = [place for place, other in enumerate(self._others) if node in other]
            load, mean = self._loads(node, [self._others[place] for place in there])
            planned = None if self._costs is None else fmean(self._costs.links(node))
            # 1. It began to move when the last rank had posted it, which saw the shortest flight for its rows.
            rates = [self._others[place][node].time / share for place, share in zip(there, load[1:], strict=True)]
            moving = load[0] * min([mine.time / load[0], *rates])
            if planned is not None:  # rows that had been sent before may be there at once
                moving = min(mine.time, max(moving, planned * load[0] / mean))
            late = dict.fromkeys(CAUSES, 0.0)
            wait = mine.time - moving
            for place, rate in zip(there, rates, strict=True):
                lag = self._others[place][node].host - mine.host
                level[place] = min(level[place], lag)
                if wait > 0.0 and rate == min(rates):
                    late["host"] = min(wait, lag - level[place])
                    level[place] += min(late["host"], max(0.0, stalls.get(node, 0.0)))
            late["imbalance"] = wait - late["host"]
            # 2. What was late before it on the same link has held it up.
            begun, ahead, could = span.end - moving, before.get(node.resource), span.end - moving
            if (queued := self._behind.get(node)) is not None:
                ahead, could = queued, self._ready(span)
            if ahead is not None and ahead.end > could:
                passed = found.get(ahead.node, {})
                share = min(1.0, (ahead.end - could) / (sum(passed.values()) or 1.0))
                for cause, time in passed.items():
                    late[cause] += share * time
                begun = begun if queued is not None else ahead.end
            # 3. The rest is its own time: more rows than the mean, at the planned rate, and a link slower than planned.
            own = span.end - begun
            even = own * min(1.0, mean / load[0]) if planned is None else planned
            rows = min(max(0.0, own - even), even * max(0.0, load[0] / mean - 1.0))
            late["imbalance"] += rows
            late["link"] += max(0.0, own - even - rows)
            found[node], moved[node], before[node.resource] = late, own, span
        return found, moved

    def _loads(self, node: Node, others: Sequence[Mapping[Node, Flown]]) -> tuple[list[float], float]:
        """Return what this rank and each other one had to move, the larger of sent and received, and the mean of ranks.

        What a rank receives is what comes back from it later, or has left it before.
        """
        back = node._replace(op=_OTHER.get(node.op, node.op))
        sent = [table[node].sent for table in (self.flown, *others)]
        returned = [table[back].sent if back in table else 0.0 for table in (self.flown, *others)]
        if not sum(sent) or not sum(returned):
            return [1.0] * len(sent), 1.0
        scale = sum(sent) / sum(returned)
        return [max(out, scale * into) or 1.0 for out, into in zip(sent, returned, strict=True)], fmean(sent)


def _queued(flights: Iterable[Span]) -> dict[Node, Span]:
    """Return the exchange behind which each one has waited for the link: it began when that one ended."""
    found: dict[Node, Span] = {}
    of: dict[Resource, list[Span]] = {}
    for span in sorted(flights, key=lambda span: span.end):
        of.setdefault(span.node.resource, []).append(span)
    for these in of.values():
        ends = [span.end for span in these]
        for span in these:
            near = _NEAR * (span.end - span.start)
            number = bisect_right(ends, span.start + _NOTICED * near) - 1  # the last to end before, or noticed late
            before = these[number] if number >= 0 else None
            if before is None or before is span:
                continue
            if before.end >= span.start - near and before.start < span.start:
                found[span.node] = before
    return found


def _split(start: float, end: float, late: Late) -> Iterator[Idle]:
    """Yield the part of a wait that the plan left open, and behind it by cause what the transfer was late by."""
    total = sum(late.values())
    at = end - min(end - start, total)
    if start < at:
        yield Idle(start, at, "order")
    share, causes = (end - at) / (total or 1.0), [cause for cause, time in late.items() if time > 0.0]
    for cause in causes if at < end else ():
        until = end if cause is causes[-1] else at + share * late[cause]
        if at < until:
            yield Idle(at, until, cause)
        at = until


def gaps(spans: Iterable[Span], launched: Mapping[tuple[Node, float], float]) -> Iterator[Gap]:
    """Yield the times of a step in which nothing is computed, in order."""
    compute: list[Span] = []
    pending: dict[object, list[Span]] = {}  # by the chain, or the parameters of a block, that await them
    for span in spans:
        node = span.node
        if node.resource is Resource.COMPUTE:
            compute.append(span)
        elif node.op is not Op.SEND:
            of: object = (node.stage, node.block, node.op) if node.op in OF_PARAMETERS else node.chain
            of = node.resource if node.resource is Resource.HOST else of
            pending.setdefault(of, []).append(span)
    now = 0.0
    for span in sorted(compute, key=lambda span: span.start):
        awaited = _taken(span, pending)
        if span.start > now:
            last = max(awaited, key=lambda one: one.end, default=None)
            yield Gap(now, span.start, last, launched.get((span.node, span.start), inf))
        now = max(now, span.end)
    last = max((one for of in pending.values() for one in of), key=lambda one: one.end, default=None)
    if last is not None and last.end > now:
        yield Gap(now, last.end, last)


def _taken(span: Span, pending: dict[object, list[Span]]) -> list[Span]:
    """Take the transfers that a compute node awaits from those that are pending, and return them."""
    node, found = span.node, list[Span]()
    place = awaited_by(node)
    chained = node.kind is not Kind.W and node.op not in RECOMPUTES
    # Copies to host memory hold up whatever comes next: the thread waits until they have left, or are back.
    for key in (Resource.HOST, *((node.chain, (node.stage, node.block, Op.GATHER)) if chained else ())):
        left = list[Span]()
        for one in pending.get(key, ()):
            other_part = place is not None and one.node.op in _OTHER and one.node[3:6] != node[3:6]
            (left if other_part or one.end > span.start else found).append(one)
        if key in pending:
            pending[key] = left
    return found
