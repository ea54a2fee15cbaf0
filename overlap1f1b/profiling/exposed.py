"""The longest times in which an exchange travelled and nothing was computed."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from typing import NamedTuple

import numpy as np

from overlap1f1b.profiling.figures import Lanes
from overlap1f1b.profiling.intervals import Times
from overlap1f1b.profiling.recording import Recording, Spans


class Exposed(NamedTuple):
    """One of them; times in nanoseconds, ``start`` from that of the step.

    ``in_flight`` is what travelled, longest first; ``waited_for`` the one that the rank waited for; ``next`` what was
    computed then.
    """

    rank: int
    step: int
    phase: str
    start: int
    duration: int
    in_flight: tuple[str, ...]
    waited_for: str
    next: str


def longest(ranks: Iterable[Recording], count: int = 10) -> list[Exposed]:
    """The longest over all steps of all ranks."""
    found = [(duration, lanes, place) for lanes in _all(ranks) for duration, place in _candidates(lanes, count)]
    return [_described(lanes, place) for _, lanes, place in nlargest(count, found, key=lambda one: one[0])]


def _all(ranks: Iterable[Recording]) -> list[Lanes]:
    return [Lanes(recording, step) for recording in ranks for step in recording.steps]


def _candidates(lanes: Lanes, count: int) -> list[tuple[int, int]]:
    durations = lanes.exposed[:, 1] - lanes.exposed[:, 0]
    return [(int(durations[place]), place) for place in np.argsort(-durations, kind="stable")[:count].tolist()]


def _described(lanes: Lanes, place: int) -> Exposed:
    start, end = lanes.exposed[place].tolist()
    recording, step = lanes.recording, lanes.step
    names = recording.names
    flights = recording.exchanges(step)
    flights = flights[_within(flights, start, end) > 0]
    beside = _within(flights, start, end)
    order = np.argsort(-beside, kind="stable")
    waits = step.waits[_within(step.waits, start, end) > 0]
    if len(waits):
        waited = waits.what[np.argmax(_within(waits, start, end))]
    else:  # the one whose arrival ended it
        waited = flights.what[np.argmin(np.abs(flights.end - end))]
    later = step.compute[step.compute.start >= end]
    phase = next((name for name, (first, last) in lanes.phases.items() if first <= start < last), "")
    return Exposed(
        rank=recording.rank or 0,
        step=step.number,
        phase=phase,
        start=start - lanes.window[0],
        duration=end - start,
        in_flight=tuple(dict.fromkeys(str(names[what]) for what in flights.what[order].tolist())),
        waited_for=str(names[int(waited)]),
        next=str(names[int(later.what[np.argmin(later.start)])]) if len(later) else "",
    )


def _within(spans: Spans, start: int, end: int) -> Times:
    """How much of the spans lies between two times; negative where nothing does."""
    return np.minimum(spans.end, end) - np.maximum(spans.start, start)
