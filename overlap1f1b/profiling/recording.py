"""The recording of one rank from one file: spans of its steps, in columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap1f1b.plan import About, CostKey, Node, NodeCosts, Op, Resource, cost_key, parse_node
from overlap1f1b.plan.intervals import Intervals, union

Column = NDArray[np.int64]


class Kernels(NamedTuple):
    """Kernels and copies without a range, of one stream or of one name."""

    name: str  # in tables, in place of a sub-op

    def __str__(self) -> str:
        return self.name


What = Node | Kernels
EXCHANGES = (Resource.EXCHANGE, Resource.CONTROL)
"""Lanes that count as exchange: as in :class:`overlap1f1b.simulation.Timeline`, counts and reductions included."""


@dataclass(frozen=True, eq=False)
class Spans:
    """Columns of spans, all ``[n]``; times in nanoseconds of the file's clock."""

    what: Column  # index of each span's name in the recording's ``names``
    start: Column  # start of each span
    end: Column  # end of each span
    launched: Column  # time at which the host launched it; for the host's own work its start
    place: Column  # thread of the host's work, stream of a device's

    @classmethod
    def of(cls, what: Sequence[int] | Column, start: Sequence[int] | Column, end: Sequence[int] | Column) -> Spans:
        """Return spans of the host, on one thread."""
        begin = np.asarray(start, np.int64)
        return cls(np.asarray(what, np.int64), begin, np.asarray(end, np.int64), begin, np.zeros_like(begin))

    def __len__(self) -> int:
        return len(self.what)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Index, start and end of each span."""
        return zip(self.what.tolist(), self.start.tolist(), self.end.tolist(), strict=True)

    def __getitem__(self, chosen: NDArray[np.bool_] | Column | slice) -> Spans:
        return Spans(*(column[chosen] for column in vars(self).values()))

    def __add__(self, other: Spans) -> Spans:
        return Spans(*map(np.concatenate, zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def ordered(self) -> Spans:
        """The spans by their starts."""
        return self[np.argsort(self.start, kind="stable")]

    @property
    def covered(self) -> Intervals:
        """The time that they cover."""
        return union(zip(self.start.tolist(), self.end.tolist(), strict=True))

    @property
    def whole(self) -> list[tuple[int, int, int]]:
        """Index, first start and last end of each name."""
        found: dict[int, tuple[int, int]] = {}
        for what, start, end in self:
            first, last = found.get(what, (start, end))
            found[what] = min(first, start), max(last, end)
        return [(what, *edges) for what, edges in sorted(found.items())]


@dataclass(frozen=True, eq=False)
class StepRecord:
    """The spans of one step of a rank."""

    number: int  # number in the step's range; counted from 0 if there is no range
    start: int  # start of the window in which idle time is counted
    end: int  # end of that window
    issued: Spans  # nodes on the issuing thread, in the order of issue
    compute: Spans  # compute: the same nodes, or their kernels
    flights: Spans  # exchanges and transfers in flight
    waits: Spans  # waits of the issuing thread


@dataclass(frozen=True, eq=False)
class Recording:
    """The steps of one rank."""

    path: Path
    rank: int | None  # number of the rank; None if the file does not say
    mesh: Mapping[str, tuple[int, int]]  # position and size of each dimension; empty if the file does not say
    world: int | None  # number of ranks; None if the file does not say
    names: tuple[What, ...]  # what the spans are, by index
    steps: tuple[StepRecord, ...]  # steps in order
    source: Literal["records", "torch.profiler", "nsys"]  # kind of file
    device: bool = False  # whether compute means a GPU's kernels, not the nodes of the issuing thread
    by: Literal["range", "name", "stream"] = "range"  # what tells compute from exchange
    notes: tuple[str, ...] = ()  # notes for the reader of the figures, one line each
    about: About = field(default_factory=About)  # what the engine said of the run

    def exchanges(self, spans: Spans) -> Spans:
        """Return those of the spans that are of exchanges; kernels without ranges count as such."""
        chosen = [lane_of(what) in EXCHANGES for what in self.names]
        return spans[np.array(chosen, bool)[spans.what]]

    def begun(self, step: StepRecord) -> dict[Node, int]:
        """Return when each node was issued, in this order; a node that was not launched counts from its departure."""
        late, found = step.flights[~np.isin(step.flights.what, step.issued.what)], dict[Node, int]()
        for what, start, _ in (step.issued + late).ordered:
            if isinstance(node := self.names[what], Node):
                found.setdefault(node, start)
        return found

    @property
    def measured(self) -> bool:
        """Whether the file shows what was exchanged: not if exchanges were issued and none was seen in flight.

        Nor does it if the engine says that exchanges stand inside nodes.
        """
        if self.about.standing:
            return False
        if any(len(self.exchanges(step.flights)) for step in self.steps):
            return True
        issued = any(len(self.exchanges(step.issued)) for step in self.steps)
        alone = bool(self.mesh) and self.mesh.get("ep", (0, 1))[1] == 1
        return self.by == "range" and (alone or not issued)

    @property
    def costs(self) -> NodeCosts | None:
        """Nanoseconds of the nodes by which the plan was made; None if nobody has said."""
        costs = {key: 1e9 * seconds for key, seconds in _by_key(self.about.costs).items()}
        return NodeCosts(by_node=costs) if costs else None

    @property
    def peak_bytes(self) -> float | None:
        """Most bytes at once in a step, beyond those before it; None if the engine has not counted them."""
        return max((size for step in self.steps for *_, size in self.held(step)), default=None)

    @property
    def offloaded_bytes(self) -> float | None:
        """Bytes that a step's activations took to host memory, a mean; None if none did."""
        sent = [size for of in self.about.bytes.values() for name, size in of.items() if name.startswith(Op.OFFLOAD)]
        return sum(sent) / len(self.about.bytes) if sent else None

    def held(self, step: StepRecord) -> list[tuple[int, int, float]]:
        """Return the bytes beyond those before a step, from the issue of each node until the next; empty if unknown."""
        costs = NodeCosts(bytes=_by_key(self.about.held))
        begun = self.begun(step) if costs.bytes else {}
        ends = [*begun.values(), step.end][1:]
        return list(zip(begun.values(), ends, costs.needs(begun), strict=True)) if begun else []


def _by_key(table: Mapping[str, Any]) -> dict[CostKey, Any]:
    """Return what a table says of nodes, by the keys of their costs."""
    return {cost_key(node): value for text, value in table.items() if (node := parse_node(text)) is not None}


def lane_of(what: What) -> Resource:
    """Return the resource of a span in flight."""
    return what.resource if isinstance(what, Node) else Resource.EXCHANGE


_integers = partial(array, "q")


@dataclass(eq=False)
class Capture:
    """Events of one process, row by row; times in nanoseconds of its clock."""

    path: Path
    source: Literal["torch.profiler", "nsys"]  # program that wrote it
    names: dict[str, int] = field(default_factory=dict)  # names of ranges, by their index
    ranges: array[int] = field(default_factory=_integers)  # our ranges: rows of name, thread, start, end
    launches: array[int] = field(default_factory=_integers)  # of kernels: rows of correlation, thread, start
    kernels: array[int] = field(default_factory=_integers)  # rows of name, correlation, stream, start, end
    kernel_names: dict[str, int] = field(default_factory=dict)  # names of kernels and copies, by their index
    devices: set[Any] = field(default_factory=set)  # numbers of the devices on which they ran
    notes: list[str] = field(default_factory=list)  # notes for the reader of the figures, one line each
    rank: int | None = None  # number from the profiler, or None; a label among the ranges has precedence
    world: int | None = None  # number of ranks from the profiler, or None
    about: About = field(default_factory=About)  # what the engine said of the run

    def add_range(self, name: str, thread: int, start: int, end: int) -> None:
        """Note a range."""
        self.ranges.extend((self.names.setdefault(name, len(self.names)), thread, start, end))

    def add_kernel(self, name: str, device: Any, correlation: int, stream: int, start: int, end: int) -> None:
        """Note a kernel or a copy."""
        number = self.kernel_names.setdefault(name, len(self.kernel_names))
        self.kernels.extend((number, correlation, stream, start, end))
        self.devices |= {device} - {None}  # a copy between two devices has none
