"""Chrome's trace format, which Perfetto opens."""

import json
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from overlap1f1b.schedule.values import check_number
from overlap1f1b.simulation.drawing import stacked


class Event(NamedTuple):
    """A named span on a track of a process."""

    process: str
    track: str
    name: str
    start: float
    end: float


def write_trace(
    events: Iterable[Event], path: str | Path, *, unit_us: float = 1000.0, flows: Iterable[tuple[Event, Event]] = ()
) -> None:
    """Write the events as JSON; if spans of one track overlap, the later ones move to further tracks.

    Times are rounded to nanoseconds, the finest that viewers know, so that rounding makes no two spans overlap.
    Processes and threads are numbered from 1, since Perfetto takes 0 for the idle process.

    Args:
        events: The spans.
        unit_us: Microseconds in the trace for one unit of time.
        flows: Pairs of events; an arrow leads from the end of the first to the start of the second.

    Raises:
        ValueError: ``unit_us`` is not a finite number above 0.
    """
    check_number("unit_us", unit_us, above=True)
    tracks: dict[str, dict[str, list[Event]]] = {}
    for event in events:
        tracks.setdefault(event.process, {}).setdefault(event.track, []).append(event)
    records: list[dict[str, Any]] = []
    slices: dict[Event, dict[str, Any]] = {}
    threads = count(1)
    for pid, (process, of_process) in enumerate(tracks.items(), 1):
        records += _named("process", pid, 0, process)
        for track, of_track in of_process.items():
            for number, row in enumerate(stacked(of_track), 1):
                tid = next(threads)
                records += _named("thread", pid, tid, track if number == 1 else f"{track} ({number})")
                for event in row:
                    start, end = (round(time * unit_us * 1000) for time in (event.start, event.end))
                    times = {"ts": start / 1000, "dur": (end - start) / 1000}
                    slices[event] = {"ph": "X", "name": event.name, "cat": track, "pid": pid, "tid": tid, **times}
                    records.append(slices[event])
    for number, (source, target) in enumerate(flows, 1):
        records += _arrow(number, slices[source], slices[target])
    Path(path).write_text(json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}), encoding="utf-8")


def _named(what: str, pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a name and of its position in the order of the tracks."""
    for key, args in ((f"{what}_name", {"name": name}), (f"{what}_sort_index", {"sort_index": tid or pid})):
        yield {"ph": "M", "name": key, "pid": pid, "tid": tid, "args": args}


def _arrow(number: int, source: dict[str, Any], target: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield both ends of an arrow, each at a time inside its slice, as viewers need."""
    last = source["ts"] + max(0.0, source["dur"] - 0.001)
    begin = max(source["ts"], min(last, target["ts"]))
    for phase, at, slice_ in (("s", begin, source), ("f", target["ts"], target)):
        place = {"pid": slice_["pid"], "tid": slice_["tid"], "ts": round(at, 3)}
        yield {"ph": phase, "bp": "e", "id": number, "name": "consumed", "cat": "consumed", **place}
