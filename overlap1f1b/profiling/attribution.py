"""Kernels belong to the range in which they were launched."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap1f1b.plan import Node
from overlap1f1b.plan.ranges import Label, NodeRange, StepRange, parse_range
from overlap1f1b.profiling.capture import Capture
from overlap1f1b.profiling.intervals import Times
from overlap1f1b.profiling.recording import Spans, What

Index = NDArray[np.int64]


class Ranges(NamedTuple):
    """Ranges of one kind: index of the node, thread, start, end."""

    what: Index
    thread: Index
    start: Times
    end: Times

    def chosen(self, which: NDArray[np.bool_] | Index) -> Ranges:
        """Some of them."""
        return Ranges(*(column[which] for column in self))

    @property
    def spans(self) -> Spans:
        """The same by start."""
        order = np.argsort(self.start, kind="stable")
        return Spans.of(self.what[order], self.start[order], self.end[order])


class Kernels(NamedTuple):
    """What ran on the device, by launch, with the node in whose range that was, or -1."""

    owner: Index
    stream: Index
    start: Times
    end: Times
    launched: Times


class Table:
    """The ranges of a capture, parsed."""

    def __init__(self, capture: Capture) -> None:
        name, thread, start, end = capture.ranges.arrays
        end = np.maximum(start, end)
        parsed = [parse_range(text) for text in capture.names]
        self.labels = [found for found in parsed if isinstance(found, Label)]
        if len({label.rank for label in self.labels}) > 1:
            ranks = ", ".join(str(rank) for rank in sorted({label.rank for label in self.labels}))
            raise ValueError(f"{capture.path} has ranges of ranks {ranks}; allowed: one file a rank")
        self.names: list[What] = []
        index: dict[Node, int] = {}
        kind, what = np.full(len(parsed), -1), np.zeros(len(parsed), np.int64)
        kinds = ("node", "flight", "wait")
        for number, found in enumerate(parsed):
            if isinstance(found, NodeRange):
                if found.node not in index:
                    index[found.node] = len(self.names)
                    self.names.append(found.node)
                kind[number], what[number] = kinds.index(found.kind), index[found.node]
            elif isinstance(found, StepRange):
                kind[number], what[number] = len(kinds), found.number
        every = Ranges(what[name], thread, start, end) if len(name) else Ranges(name, thread, start, end)
        of_kind = kind[name] if len(name) else name
        self.nodes = {text: every.chosen(of_kind == code) for code, text in enumerate(kinds)}
        steps = every.chosen(of_kind == len(kinds))
        self.steps = steps.chosen(np.argsort(steps.start, kind="stable"))

    @property
    def issuer(self) -> int:
        """The thread that issues nodes."""
        threads, counts = np.unique(self.nodes["node"].thread, return_counts=True)
        return int(threads[np.argmax(counts)]) if len(threads) else -1


def owned(capture: Capture, table: Table) -> tuple[Kernels, list[str]]:
    """Every kernel with the node that it was launched for, and what is to be said of that.

    That is the innermost range around the launch on the thread that launched it; where that thread has none, as
    autograd's, the one that is open on the issuing thread.
    """
    correlation, stream, start, end = capture.kernels.arrays
    end = np.maximum(start, end)
    number, thread, at = capture.launches.arrays
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
    """The node of the innermost range around each time, or -1; ranges of one thread lie one inside another."""
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
