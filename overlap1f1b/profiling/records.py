"""Records of the engine: spans that it recorded without a profiler."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import prod
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from overlap1f1b.plan import Node, Resource
from overlap1f1b.plan.ranges import FORMAT, VERSION, parse_node
from overlap1f1b.profiling.recording import MOST_NAME, Recording, Spans, StepRecord
from overlap1f1b.schedule.values import quoted, shortened

_KINDS = {"node": 0, "flight": 1, "wait": 2, "device": 3}
_SECOND = 1e9
_LONGEST = 1e9  # seconds that fit into whole nanoseconds


class RecordedSteps:
    """The steps of a record, taken span by span; an error in a span is raised when the record is read."""

    def __init__(self) -> None:
        self._names = _Names()
        self._spans = _Columns()
        self._steps: list[StepRecord] = []
        self._wrong: Exception | None = None
        self._device = False  # whether nodes have times by a device's clock

    def take(self, element: Any) -> None:
        """Take a span ``[kind, node, start, end]``, times in seconds from the start of its step."""
        if self._wrong is None:
            try:
                kind, text, start, end = element
                self._spans.append(_KINDS[kind], self._names[text], start, end)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                self._wrong = error

    def end(self, others: Any) -> None:
        """End the step of the spans so far; ``others`` is an object with its number and its seconds, or malformed."""
        if self._wrong is None:
            try:
                begin = self._steps[-1].end if self._steps else 0
                self._steps.append(_step(others, self._spans, begin, self._names.what))
                self._device |= _KINDS["device"] in self._spans.kind
            except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
                self._wrong = error
        self._spans = _Columns()

    def record(self, path: Path, content: Mapping[str, Any]) -> Recording:
        """Return the rank of the file.

        Args:
            path: The file, for messages.
            content: Its other JSON: ``format``, ``version``, ``rank`` and ``mesh``.

        Raises:
            ValueError: The version is another one, or the content has another form.
        """
        if content.get("version") != VERSION:
            raise ValueError(f"{path}: version {quoted(content.get('version'))} of {FORMAT}; allowed: {VERSION}")
        try:
            if self._wrong is not None:
                raise self._wrong
            mesh = {str(name): (index(at), index(size)) for name, (at, size) in content["mesh"].items()}
            rank = index(content["rank"])
            if content["steps"] is not True:  # the reader passed on an array, and returned True for it
                raise TypeError("steps are not a list")
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            why = f"{type(error).__name__}: {shortened(str(error))}"
            raise ValueError(f"{path}: not a record of overlap1f1b profile ({why})") from None
        if not self._steps:
            raise ValueError(f"{path} has no steps; allowed: a record of one or more")
        world = prod(size for _, size in mesh.values())
        names, steps = tuple(self._names.what), tuple(self._steps)
        return Recording(path, rank, mesh, world, names, steps, "records", device=self._device)


class _Columns:
    """Spans of a step: 25 bytes each."""

    def __init__(self) -> None:
        self.kind, self.what, self.start, self.end = array("b"), array("q"), array("d"), array("d")

    def append(self, kind: int, what: int, start: float, end: float) -> None:
        self.start.append(start)  # raises if it is not a number, before the other columns grow
        self.end.append(end)
        self.kind.append(kind)
        self.what.append(what)


class _Names(dict[str, int]):
    """Number of each node, by its text."""

    def __init__(self) -> None:
        self.what: list[Node] = []

    def __missing__(self, text: str) -> int:
        node = parse_node(text) if isinstance(text, str) and len(text) <= MOST_NAME else None
        if node is None:
            raise ValueError(f"{quoted(text)} is not a node")
        self[text] = len(self.what)
        self.what.append(node)
        return self[text]


def _step(content: Mapping[str, Any], spans: _Columns, begin: int, names: Sequence[Node]) -> StepRecord:
    """Return one step; its clock starts at ``begin``."""
    if content.get("spans"):
        raise TypeError("spans are not a list")
    times, seconds = np.array([spans.start, spans.end], float), float(content["seconds"])
    number = index(content["step"])
    if not (0 <= seconds < _LONGEST and (np.abs(times) < _LONGEST).all() and (times[0] <= times[1]).all()):
        raise ValueError(f"step {quoted(number, plain=True)} has impossible times")  # nan too
    start, end = begin + np.rint(times * _SECOND).astype(np.int64)
    kind = np.array(spans.kind, np.int8)
    every = Spans.of(np.array(spans.what, np.int64), start, end)
    every, kind = every[order := np.argsort(start, kind="stable")], kind[order]
    issued, flights, waits, device = (every[kind == number] for number in _KINDS.values())
    computes = np.array([what.resource is Resource.COMPUTE for what in names], bool)
    compute = issued[computes[issued.what]]
    last = max((int(spans.end.max()) for spans in (issued, flights, waits, device) if len(spans)), default=begin)
    if len(device):
        device = _launched(device, issued)
        compute, travelled = (device[computes[device.what] == does] for does in (True, False))
        flights = travelled + flights[~np.isin(flights.what, travelled.what)]
        flights = flights[np.argsort(flights.start, kind="stable")]
    until = max(begin + round(seconds * _SECOND), last)
    return StepRecord(number, begin, until, issued, compute, flights, waits)


def _launched(device: Spans, issued: Spans) -> Spans:
    """Return the spans of a device, launched when the host began to issue their nodes."""
    begins = {what: start for what, start, _ in issued}
    launched = [begins.get(what, start) for what, start, _ in device]
    return Spans(device.what, device.start, device.end, np.array(launched, np.int64))
