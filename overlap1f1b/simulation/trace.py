"""Chrome's trace format, which Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Event(NamedTuple):
    """A named span on a track of a process."""

    process: str
    track: str
    name: str
    start: float
    end: float


def write_trace(events: Iterable[Event], path: str | Path, *, unit_us: float = 1000.0) -> None:
    """Writes the events as JSON; where spans of one track overlap, later ones move to further tracks beside it.

    Args:
        events: The spans.
        path: The file.
        unit_us: Microseconds that one unit of time is shown as.

    Raises:
        ValueError: A unit that is not a finite number above 0.
    """
    if not 0 < unit_us < float("inf"):
        raise ValueError(f"unit_us={unit_us}; allowed: a finite number > 0")
    processes: dict[str, int] = {}
    tracks: dict[tuple[str, str], list[tuple[int, float]]] = {}  # id and end of each row of a track
    count = 0
    records: list[dict[str, Any]] = []

    def named(what: str, pid: int, tid: int, name: str) -> None:
        records.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}})

    for event in sorted(events, key=lambda e: (e.start, e.end)):
        if event.process not in processes:
            processes[event.process] = len(processes)
            named("process_name", processes[event.process], 0, event.process)
        pid = processes[event.process]
        rows = tracks.setdefault((event.process, event.track), [])
        row = next((index for index, (_, end) in enumerate(rows) if end <= event.start), len(rows))
        if row == len(rows):
            rows.append((count, 0.0))
            named("thread_name", pid, count, event.track if row == 0 else f"{event.track} ({row + 1})")
            count += 1
        tid = rows[row][0]
        rows[row] = (tid, event.end)
        times = {"ts": event.start * unit_us, "dur": (event.end - event.start) * unit_us}
        records.append({"ph": "X", "name": event.name, "cat": event.track, "pid": pid, "tid": tid, **times})
    Path(path).write_text(json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}), encoding="utf-8")
