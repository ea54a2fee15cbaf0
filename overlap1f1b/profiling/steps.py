"""The steps of a rank from a profiler's events: each kernel belongs to the range in which it was launched."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap1f1b.plan import Resource
from overlap1f1b.plan.intervals import clipped, difference, length
from overlap1f1b.plan.ranges import Label, NodeRange, StepRange, parse_range
from overlap1f1b.profiling.recording import Capture, Recording, Spans, StepRecord, Stream, Times, What, lane_of


def recording_of(capture: Capture) -> Recording:
    """Return the rank that a capture describes.

    Kernels launched for a compute node are compute, on any stream. Kernels and copies launched for an exchange or a
    transfer are its flight, except on the compute stream, where they pack and unpack; if all of them are there, they
    are the flight. Kernels launched outside all ranges are compute if they are on the compute stream. Without kernels,
    the ranges of nodes are the compute and the ``flight`` ranges are the exchange.

    Raises:
        ValueError: The file has neither ranges nor kernels, or it has ranges of several ranks.
    """
    table = Table(capture)
    if not len(capture.kernels) and not len(table.nodes["node"].what):
        raise ValueError(
            f"{capture.path} has no ranges of overlap1f1b and no kernels; allowed: a file of overlap1f1b profile"
        )
    kernels, notes = owned(capture, table)
    return _Builder(capture, table, kernels, notes).recording()


class _Builder:
    def __init__(self, capture: Capture, table: Table, kernels: Kernels, notes: list[str]) -> None:
        self.capture, self.table, self.kernels, self.notes = capture, table, kernels, notes
        self.names = table.names
        self.device = bool(len(kernels.start))
        self.by_range = bool((kernels.owner >= 0).any()) if self.device else bool(len(table.nodes["node"].what))
        on_compute = [lane_of(what) is Resource.COMPUTE for what in self.names]
        self.on_compute = np.array([*on_compute, False])  # -1, no node, is the last
        self.host = {kind: ranges.spans for kind, ranges in table.nodes.items()}
        self.ran = np.maximum.accumulate(kernels.end)  # end of everything that was launched so far
        self.main = self._compute_stream()

    def _compute_stream(self) -> int:
        """Return the stream with most kernels of compute nodes; with most kernels if none has a range."""
        streams = self.kernels.stream
        if not len(streams):
            return -1
        of_compute = self.on_compute[self.kernels.owner]
        numbers, counts = np.unique(streams[of_compute] if of_compute.any() else streams, return_counts=True)
        return int(numbers[np.argmax(counts)])

    def recording(self) -> Recording:
        capture = self.capture
        if not self.by_range:
            why = "no kernel was launched in a range" if len(self.table.nodes["node"].what) else "no ranges"
            self.notes.append(
                f"{why} of overlap1f1b: stream {self.main}, which has most kernels, counts as compute and all "
                "others as exchange"
            )
        steps = tuple(self._steps())
        label = self.table.labels[0] if self.table.labels else None
        return Recording(
            path=capture.path,
            rank=capture.rank if label is None else label.rank,
            mesh={} if label is None else label.mesh,
            world=capture.world if label is None else prod(size for _, size in label.mesh.values()),
            names=tuple(self.names),
            steps=steps,
            source=capture.source,
            device=self.device,
            by="range" if self.by_range else "stream",
            notes=tuple(self.notes),
        )

    def _steps(self) -> list[StepRecord]:
        numbers, begins, ends = self.table.steps.what, self.table.steps.start, self.table.steps.end
        blind = self.device and not len(self.capture.launches)  # the file does not say what a step launched
        if not len(numbers) or blind:
            self.notes.append(f"no {'launches' if blind else 'ranges of steps'}: the whole file is taken for one step")
            columns = [column for spans in self.host.values() for column in (spans.start, spans.end)]
            times = np.concatenate([*columns, self.kernels.start, self.kernels.end, self.kernels.launched])
            numbers, begins, ends = np.array([0]), np.array([times.min()]), np.array([times.max() + 1])
        each = zip(numbers.tolist(), begins.tolist(), ends.tolist(), strict=True)
        return [self._step(number, begin, end) for number, begin, end in each]

    def _step(self, number: int, begin: int, end: int) -> StepRecord:
        host = {kind: _between(spans, begin, end) for kind, spans in self.host.items()}
        issued, flights, waits = host["node"], host["flight"], host["wait"]
        if not self.device:
            compute = _without(issued[self.on_compute[issued.what]], waits)
            return StepRecord(number, begin, end, issued, compute, flights, waits)
        first, last = np.searchsorted(self.kernels.launched, (begin, end)).tolist()
        compute, travelled = self._split(slice(first, last))
        flights = travelled + flights[~np.isin(flights.what, travelled.what)]
        if last > first:  # from the end of the earlier launches' kernels to the end of this step's
            begin = max(begin, int(self.ran[first - 1]) if first else begin)
            begin = min(begin, int(self.kernels.start[first:last].min()))
            end = int(self.kernels.end[first:last].max())
        return StepRecord(number, begin, end, issued, compute, flights, waits)

    def _split(self, here: slice) -> tuple[Spans, Spans]:
        """Return the compute kernels of a step, and the kernels of its transfers."""
        owner, stream, start, end, launched = (column[here] for column in self.kernels)
        main, named = stream == self.main, owner >= 0
        travels = named & ~self.on_compute[owner]
        elsewhere = np.isin(owner, owner[travels & ~main])
        flying = travels & ~(main & elsewhere) if self.by_range else ~main
        computing = ~flying & (named | main)
        self._note_lost(stream[~flying & ~computing])
        what = owner.copy()
        what[~named] = self._streams(stream[~named])
        spans = Spans(what, start, end, launched)
        order = np.argsort(start, kind="stable")
        return spans[order][computing[order]], spans[order][flying[order]]

    def _note_lost(self, stream: Index) -> None:
        if len(stream):
            streams = ", ".join(map(str, np.unique(stream)))
            note = f"kernels launched outside all ranges on streams {streams} count neither as compute nor as exchange"
            if note not in self.notes:
                self.notes.append(note)

    def _streams(self, stream: Index) -> NDArray[np.int64]:
        """Return the names of kernels without a range, as indices."""
        numbers, place = np.unique(stream, return_inverse=True)
        for number in numbers.tolist():
            if Stream(number) not in self.names:
                self.names.append(Stream(number))
        index = np.array([self.names.index(Stream(number)) for number in numbers.tolist()], np.int64)
        return index[place]


def _between(spans: Spans, begin: int, end: int) -> Spans:
    """Return the spans that start between two times."""
    first, last = np.searchsorted(spans.start, (begin, end)).tolist()
    return spans[np.arange(first, last)]


def _without(spans: Spans, waits: Spans) -> Spans:
    """Remove from spans the time in which the thread waits."""
    there, parts = waits.covered, []
    for what, start, end in spans:
        waited = clipped(there, start, end)
        left = difference([(start, end)], waited) if length(waited) else [(start, end)]
        parts += [(what, *part) for part in left]
    return Spans.of(*_columns(sorted(parts, key=lambda part: part[1]), 3))


Index = NDArray[np.int64]


def _columns(rows: Sequence[Any], width: int) -> tuple[Index, ...]:
    """Return the columns of rows, which may follow each other without brackets."""
    return tuple(map(np.ascontiguousarray, np.array(rows, np.int64).reshape(-1, width).T))


class Ranges(NamedTuple):
    """Ranges of one kind: index of the node, thread, start, end."""

    what: Index
    thread: Index
    start: Times
    end: Times

    def chosen(self, which: NDArray[np.bool_] | Index) -> Ranges:
        """Return some of the ranges."""
        return Ranges(*(column[which] for column in self))

    @property
    def spans(self) -> Spans:
        """The ranges as spans, ordered by start."""
        order = np.argsort(self.start, kind="stable")
        return Spans.of(self.what[order], self.start[order], self.end[order])


class Kernels(NamedTuple):
    """Kernels on the device, ordered by launch; ``owner`` is the node in whose range the launch was, or -1."""

    owner: Index
    stream: Index
    start: Times
    end: Times
    launched: Times


class Table:
    """The ranges of a capture, parsed."""

    def __init__(self, capture: Capture) -> None:
        name, thread, start, end = _columns(capture.ranges, 4)
        end = np.maximum(start, end)
        parsed = [parse_range(text) for text in capture.names]
        self.labels = [found for found in parsed if isinstance(found, Label)]
        if len({label.rank for label in self.labels}) > 1:
            ranks = ", ".join(str(rank) for rank in sorted({label.rank for label in self.labels}))
            raise ValueError(f"{capture.path} has ranges of ranks {ranks}; allowed: one file a rank")
        index: dict[What, int] = {}
        kind, what = np.full(len(parsed), -1), np.zeros(len(parsed), np.int64)
        kinds = ("node", "flight", "wait")
        for number, found in enumerate(parsed):
            if isinstance(found, NodeRange):
                kind[number], what[number] = kinds.index(found.kind), index.setdefault(found.node, len(index))
            elif isinstance(found, StepRange):
                if found.number >= 2**63:
                    raise ValueError(f"{capture.path} has a step {found.number}; allowed: less than 2**63")
                kind[number], what[number] = len(kinds), found.number
        self.names = list(index)
        every, of_kind = Ranges(what[name], thread, start, end), kind[name]
        self.nodes = {text: every.chosen(of_kind == code) for code, text in enumerate(kinds)}
        steps = every.chosen(of_kind == len(kinds))
        self.steps = steps.chosen(np.argsort(steps.start, kind="stable"))

    @property
    def issuer(self) -> int:
        """The thread that issues nodes."""
        threads, counts = np.unique(self.nodes["node"].thread, return_counts=True)
        return int(threads[np.argmax(counts)]) if len(threads) else -1


def owned(capture: Capture, table: Table) -> tuple[Kernels, list[str]]:
    """Return every kernel with the node for which it was launched, and notes for the reader.

    The node is the innermost range around the launch on the launching thread. If that thread has no range, as
    autograd's has none, it is the range that is open on the issuing thread.
    """
    correlation, stream, start, end = _columns(capture.kernels, 4)
    end = np.maximum(start, end)
    number, thread, at = _columns(capture.launches, 3)
    order = np.argsort(number, kind="stable")
    number, thread, at = number[order], thread[order], at[order]
    place = np.minimum(np.searchsorted(number, correlation), max(len(number) - 1, 0))
    found = number[place] == correlation if len(number) else np.zeros(len(correlation), bool)
    launched = np.where(found, at[place], start) if len(number) else start
    threads = np.where(found, thread[place], -1) if len(number) else np.full(len(start), -1)
    owner = np.full(len(start), -1, np.int64)
    issuer = table.issuer
    flights = table.nodes["flight"]  # on the issuing thread they lie across other nodes
    nested = table.nodes | {"flight": flights.chosen(flights.thread != issuer)}
    around = Ranges(*(np.concatenate(parts) for parts in zip(*nested.values(), strict=True)))
    for each in np.unique(threads[found]):
        mine = found & (threads == each)
        owner[mine] = _innermost(around.chosen(around.thread == each), launched[mine])
    lost = found & (owner < 0) & (threads != issuer)
    owner[lost] = _innermost(around.chosen(around.thread == issuer), launched[lost])
    notes = []
    if table.names and (missing := int((~found).sum())):
        notes.append(f"{missing} of {len(start)} kernels have no launch in the file, so no range")
    order = np.argsort(launched, kind="stable")
    return Kernels(*(column[order] for column in (owner, stream, start, end, launched))), notes


def _innermost(ranges: Ranges, times: Times) -> Index:
    """Return the node of the innermost range around each time, or -1; ranges of one thread are nested."""
    if not len(ranges.what) or not len(times):
        return np.full(len(times), -1, np.int64)
    order = np.lexsort((-ranges.end, ranges.start))
    edges: list[int] = []
    inside: list[int] = []
    open_: list[tuple[int, int]] = []

    def close(until: float) -> None:
        while open_ and open_[-1][0] <= until:
            ended, _ = open_.pop()
            edges.append(ended)
            inside.append(open_[-1][1] if open_ else -1)

    columns = (column[order].tolist() for column in (ranges.what, ranges.start, ranges.end))
    for what, start, end in zip(*columns, strict=True):
        close(start)
        open_.append((end, what))
        edges.append(start)
        inside.append(what)
    close(float("inf"))
    at = np.searchsorted(np.maximum.accumulate(np.array(edges)), times, side="right")
    return np.asarray(np.concatenate(([-1], inside))[at])
