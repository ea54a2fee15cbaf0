"""The steps of a rank from a profiler's events: each kernel belongs to the range in which it was launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal

import numpy as np

from overlap1f1b.plan import Resource
from overlap1f1b.plan.intervals import clipped, difference, length
from overlap1f1b.plan.ranges import Label, NodeRange, StepRange, parse_range
from overlap1f1b.profiling.names import role_of, shortened
from overlap1f1b.profiling.recording import Capture, Column, Kernels, Recording, Spans, StepRecord, What, lane_of
from overlap1f1b.schedule.values import some

_KINDS = ("node", "flight", "wait")
_NEVER = np.iinfo(np.int64).min  # the number of no launch


def recording_of(capture: Capture) -> Recording:
    """Return the rank that a capture describes.

    Kernels launched for a compute node are compute, on any stream. Kernels and copies launched for an exchange or a
    transfer are its flight, except on the compute stream, where they pack and unpack; if all of them are there, they
    are the flight. Kernels launched outside all ranges are compute if they are on the compute stream. Without kernels,
    the ranges of nodes are the compute and the ``flight`` ranges are the exchange.

    If no kernel has a range, its name tells what it does: known exchanges are exchange, all other kernels are compute
    on any stream, and copies within a device or with its host are neither. If no name is known for an exchange, the
    kernels of unknown names that are not on the stream with most compute are exchange, with the copies beside them.
    """
    return _Builder(capture).recording()


class _Builder:
    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.notes: dict[str, None] = dict.fromkeys(capture.notes)
        self.labels: list[Label] = []
        self.index: dict[What, int] = {}
        self.ranges = self._ranges()
        nodes = self.ranges["node"]
        if not capture.kernels and not len(nodes):
            raise ValueError(
                f"{capture.path} has no ranges of overlap1f1b and no kernels; allowed: a file of overlap1f1b profile"
            )
        self.device = bool(capture.kernels)
        self.kernels, name = self._kernels()
        self.role = np.array([role_of(text) for text in capture.kernel_names], "U8")[name]
        on_compute = [lane_of(what) is Resource.COMPUTE for what in self.index]
        self.on_compute = np.array([*on_compute, False])  # -1, no node, is the last
        self.ran = np.maximum.accumulate(self.kernels.end)  # end of everything that was launched so far
        of_compute = self.on_compute[self.kernels.what]
        of_compute = of_compute if of_compute.any() else self.role == "compute"
        self.main = _most(self.kernels.place[of_compute] if of_compute.any() else self.kernels.place)
        """The stream with most kernels of compute nodes; without ranges with most kernels."""
        self.by: Literal["range", "name", "stream"] = "range"
        if self.device and not (self.kernels.what >= 0).any():
            self._judge(name, "no kernel was launched in a range" if len(nodes) else "no ranges")
        if len(capture.devices) > 1:
            devices = ", ".join(sorted(map(str, capture.devices)))
            self.notes[f"one process with kernels on devices {devices}: the figures take them for one device"] = None

    def _ranges(self) -> dict[str, Spans]:
        """Return the ranges of each kind; those of steps have their numbers in place of names."""
        path, index = self.capture.path, self.index
        parsed = [parse_range(text) for text in self.capture.names]
        self.labels = [found for found in parsed if isinstance(found, Label)]
        if len(ranks := {label.rank for label in self.labels}) > 1:
            raise ValueError(
                f"{path} has ranges of ranks {', '.join(map(str, sorted(ranks)))}; allowed: one file a rank"
            )
        # Of each name; the rows of the file have the indices of their names.
        kind, what = [""] * len(parsed), [-1] * len(parsed)
        for number, found in enumerate(parsed):
            if isinstance(found, NodeRange):
                kind[number], what[number] = found.kind, index.setdefault(found.node, len(index))
            elif isinstance(found, StepRange):
                if found.number >= 2**63:
                    raise ValueError(f"{path} has a step {found.number}; allowed: less than 2**63")
                kind[number], what[number] = "step", found.number
        name, thread, start, end = _columns(self.capture.ranges, 4)
        every = Spans(np.array(what, np.int64)[name], start, np.maximum(start, end), start, thread)
        kinds = np.array(kind, "U6")[name]
        return {one: every[kinds == one].ordered for one in (*_KINDS, "step")}

    def _kernels(self) -> tuple[Spans, Column]:
        """Return every kernel with the node for which it was launched, or -1, ordered by launch; and their names.

        The node is the innermost range around the launch on the launching thread. If that thread has no range, as
        autograd's has none, it is the range that is open on the issuing thread.
        """
        name, correlation, stream, start, end = _columns(self.capture.kernels, 5)
        number, thread, at = _columns(self.capture.launches or (_NEVER, -1, 0), 3)
        order = np.argsort(number, kind="stable")
        number, thread, at = number[order], thread[order], at[order]
        launch = np.minimum(np.searchsorted(number, correlation), len(number) - 1)
        found = number[launch] == correlation
        launched, threads = np.where(found, at[launch], start), np.where(found, thread[launch], -1)
        nodes, flights, waits = (self.ranges[kind] for kind in _KINDS)
        issuer = _most(nodes.place)
        around = nodes + flights[flights.place != issuer] + waits  # on the issuing thread flights lie across nodes
        owner = np.full(len(start), -1, np.int64)
        for each in np.unique(threads[found]):
            mine = found & (threads == each)
            owner[mine] = _innermost(around[around.place == each], launched[mine])
        lost = found & (owner < 0) & (threads != issuer)
        owner[lost] = _innermost(around[around.place == issuer], launched[lost])
        if self.index and (missing := int((~found).sum())):
            self.notes[f"{missing} of {len(start)} kernels have no launch in the file, so no range"] = None
        order = np.argsort(launched, kind="stable")
        return Spans(owner, start, np.maximum(start, end), launched, stream)[order], name[order]

    def _judge(self, name: Column, why: str) -> None:
        """Give every kernel a role and a name of its own, since no range does."""
        role, stream = self.role, self.kernels.place
        unknown, exchanges = role == "", role == "exchange"
        self.by, how = "name", "names of kernels tell what they do"
        if not exchanges.any() and (away := unknown & (stream != self.main)).any():
            self.by = "stream"
            how = f"stream {self.main}, which has most kernels, counts as compute and all others as exchange"
            exchanges = np.isin(stream, stream[away]) & (unknown | (role == "copy"))
        role[unknown], role[exchanges] = "compute", "exchange"
        what, texts = self._named(stream, "stream {}".format), [shortened(text) for text in self.capture.kernel_names]
        if self.by == "name":
            what[exchanges] = self._named(name[exchanges], texts.__getitem__)
        self.kernels = replace(self.kernels, what=what)
        self.notes[f"{why} of overlap1f1b: {how}"] = None
        for of in ("exchange", "compute", "copy") if self.by == "name" else ("copy",):
            if (mine := role == of).any() or of == "exchange":
                names = list(dict.fromkeys(texts[number] for number in np.unique(name[mine]).tolist()))
                title, time = "left out" if of == "copy" else of, length(self.kernels[mine].covered) / 1e6
                shown = some(names, 3) or "no name is known for it"
                self.notes[f"{title}: {mine.sum()} of {len(mine)} kernels and copies, {time:.3f} ms: {shown}"] = None

    def _named(self, numbers: Column, text: Callable[[int], str]) -> Column:
        """Return the index of each kernel without a range, by the text of its number."""
        found, place = np.unique(numbers, return_inverse=True)
        new = [self.index.setdefault(Kernels(text(number)), len(self.index)) for number in found.tolist()]
        return np.array(new, np.int64)[place]

    def recording(self) -> Recording:
        """Return the steps, and what was noted on the way."""
        capture = self.capture
        steps = tuple(self._steps())
        label = self.labels[0] if self.labels else None
        return Recording(
            path=capture.path,
            rank=capture.rank if label is None else label.rank,
            mesh={} if label is None else label.mesh,
            world=capture.world if label is None else prod(size for _, size in label.mesh.values()),
            names=tuple(self.index),
            steps=steps,
            source=capture.source,
            device=self.device,
            by=self.by,
            notes=tuple(self.notes),
            about=capture.about,
        )

    def _steps(self) -> list[StepRecord]:
        """Return the steps by their ranges; without them the file is one step."""
        steps = self.ranges["step"]
        blind = self.device and not self.capture.launches  # the file does not say what a step launched
        if not len(steps) or blind:
            self.notes[f"no {'launches' if blind else 'ranges of steps'}: the whole file is taken for one step"] = None
            every = sum((self.ranges[kind] for kind in _KINDS), self.kernels)
            times = np.concatenate((every.start, every.end, every.launched))
            steps = Spans.of([0], [times.min()], [times.max() + 1])
        return [self._step(*step) for step in steps]

    def _step(self, number: int, begin: int, end: int) -> StepRecord:
        """Return a step: what was issued in it, and when kernels computed and moved rows."""
        issued, flights, waits = (_between(self.ranges[kind], begin, end) for kind in _KINDS)
        if not self.device:
            compute = _without(issued[self.on_compute[issued.what]], waits)
            return StepRecord(number, begin, end, issued, compute, flights, waits)
        first, last = np.searchsorted(self.kernels.launched, (begin, end)).tolist()
        compute, travelled = self._split(self.kernels[first:last], self.role[first:last])
        flights = travelled + flights[~np.isin(flights.what, travelled.what)]
        if last > first:  # from the end of the earlier launches' kernels to the end of this step's
            begin = max(begin, int(self.ran[first - 1]) if first else begin)
            begin = min(begin, int(self.kernels.start[first:last].min()))
            end = int(self.kernels.end[first:last].max())
        return StepRecord(number, begin, end, issued, compute, flights, waits)

    def _split(self, kernels: Spans, role: Column) -> tuple[Spans, Spans]:
        """Return the compute kernels of a step, and the kernels of its transfers.

        Each is of the node in whose range it was launched, if ranges tell (``by`` is "range"); else its name says it.
        """
        if self.by != "range":
            return kernels[role == "compute"].ordered, kernels[role == "exchange"].ordered
        owner, stream = kernels.what, kernels.place
        main, named = stream == self.main, owner >= 0
        travels = named & ~self.on_compute[owner]  # launched by a node that transfers
        elsewhere = np.isin(owner, owner[travels & ~main])  # of nodes that have kernels beside the main stream
        flying = travels & ~(main & elsewhere)  # what such a node launches on the main stream only packs rows
        computing = ~flying & (named | (main & (role != "exchange")))
        if len(lost := np.unique(stream[~flying & ~computing])):
            streams = ", ".join(map(str, lost))
            note = f"kernels launched outside all ranges on streams {streams} count neither as compute nor as exchange"
            self.notes[note] = None
        what = owner.copy()
        what[~named] = self._named(stream[~named], "stream {}".format)
        kernels = replace(kernels, what=what)
        return kernels[computing].ordered, kernels[flying].ordered


def _most(numbers: Column) -> int:
    """Return the most frequent number; -1 if there is none."""
    found, counts = np.unique(numbers, return_counts=True)
    return int(found[np.argmax(counts)]) if len(found) else -1


def _columns(rows: Sequence[Any], width: int) -> tuple[Column, ...]:
    """Return the columns of rows, which may follow each other without brackets."""
    return tuple(map(np.ascontiguousarray, np.array(rows, np.int64).reshape(-1, width).T))


def _between(spans: Spans, begin: int, end: int) -> Spans:
    """Return the spans that start between two times."""
    return spans[slice(*np.searchsorted(spans.start, (begin, end)).tolist())]


def _without(spans: Spans, waits: Spans) -> Spans:
    """Remove from spans the time in which the thread waits."""
    there, parts = waits.covered, []
    for what, start, end in spans:
        waited = clipped(there, start, end)
        left = difference([(start, end)], waited) if length(waited) else [(start, end)]
        parts += [(what, *part) for part in left]
    return Spans.of(*_columns(sorted(parts, key=lambda part: part[1]), 3))


def _innermost(ranges: Spans, times: Column) -> Column:
    """Return the node of the innermost range around each time, or -1; ranges of one thread are nested."""
    if not len(ranges) or not len(times):
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

    for what, start, end in ranges[order]:
        close(start)
        open_.append((end, what))
        edges.append(start)
        inside.append(what)
    close(float("inf"))
    at = np.searchsorted(np.maximum.accumulate(np.array(edges)), times, side="right")
    return np.asarray(np.concatenate(([-1], inside))[at])
