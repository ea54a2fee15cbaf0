"""Events of a profiler, written as every kind of file that a report reads."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from overlap1f1b.plan import Resource, Span
from overlap1f1b.profiling import Recording, read_file

MAIN, AUTOGRAD, LANE = 11, 12, 13
"""Threads."""
COMPUTE, EXCHANGE, PEER = 7, 20, 24
"""Streams."""


class Range(NamedTuple):
    """A range of the host."""

    text: str
    start: int
    end: int
    thread: int = MAIN


def timed(text: str, thread: int = MAIN) -> list[Range]:
    """The ranges of ``"step 1: 0–100, dense.f[0] m0: 0–30"``, which does not say whose they are."""
    parts = [part.split(": ") for part in text.split(", ")]
    return [Range(f"o1 {name}", *map(int, times.split("–")), thread) for name, times in parts]


class Kernel(NamedTuple):
    """What ran on the device, and when and where it was launched; never, if ``launched`` is None."""

    stream: int
    start: int
    end: int
    launched: int | None
    thread: int = MAIN
    copy: bool = False
    name: str = "kernel"


@dataclass
class Events:
    """Of one process; times in nanoseconds."""

    ranges: list[Range] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)

    def shifted(self, by: int) -> Events:
        """On a clock that is ahead."""
        ranges = [r._replace(start=r.start + by, end=r.end + by) for r in self.ranges]
        kernels = [
            k._replace(start=k.start + by, end=k.end + by, launched=None if k.launched is None else k.launched + by)
            for k in self.kernels
        ]
        return Events(ranges, kernels)


def write_chrome(path: Path, events: Events, *, top: Mapping[str, Any] | None = None, pid: int = 4000) -> Path:
    """As torch.profiler does; gzipped where the name ends so."""
    records: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "x"}}]

    def add(category: str, name: str, pid: object, tid: object, start: int, end: int, **args: object) -> None:
        times = {"ts": start / 1000, "dur": (end - start) / 1000}
        records.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args})

    for text, start, end, thread in events.ranges:
        add("user_annotation", text, pid, thread, start, end)
        add("gpu_user_annotation", text, 0, COMPUTE, start, end)  # where kernels of the range ran: not the host's
    for number, kernel in enumerate(events.kernels, 1):
        category = "gpu_memcpy" if kernel.copy else "kernel"
        place = {"device": 0, "stream": kernel.stream, "correlation": number, "External id": number}
        add(category, kernel.name, 0, kernel.stream, kernel.start, kernel.end, **place)
        if kernel.launched is not None:
            add("cuda_runtime", "launch", pid, kernel.thread, kernel.launched, kernel.launched + 1, correlation=number)
            flow = {"ph": "s", "id": number, "pid": pid, "tid": kernel.thread, "ts": kernel.launched / 1000}
            records.append({**flow, "cat": "ac2g", "name": "ac2g"})
    head = {"schemaVersion": 1, "deviceProperties": [], **(top or {})}
    text = json.dumps({**head, "traceEvents": records, "traceName": str(path)}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def recorded(folder: Path, events: Events) -> Recording:
    """What is read of a trace with these events."""
    (recording,) = read_file(write_chrome(folder / "trace.json", events))
    return recording


def write_nsys(path: Path, processes: Mapping[int, Events]) -> Path:
    """As ``nsys export --type sqlite`` does, by the schema in the documentation of Nsight Systems."""
    with closing(sqlite3.connect(path)) as database, database:
        schema = (Path(__file__).parent / "files" / "nsys-2022.4.sql").read_text().partition("INSERT")[0]
        database.executescript(schema.replace(" NOT NULL", ""))
        for process, events in processes.items():
            _insert(database, process << 24, events)
    return path


def _insert(database: sqlite3.Connection, process: int, events: Events) -> None:
    def insert(table: str, **row: object) -> None:
        marks = ", ".join("?" * len(row))
        database.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))

    def string(text: str) -> int:
        database.execute("INSERT INTO StringIds (value) SELECT ? WHERE NOT EXISTS "
                         "(SELECT 1 FROM StringIds WHERE value = ?)", (text, text))  # fmt: skip
        return int(database.execute("SELECT id FROM StringIds WHERE value = ?", (text,)).fetchone()[0])

    for number, (text, start, end, thread) in enumerate(events.ranges):
        registered = number % 2  # torch's are not, others' may be
        kind = {"text": None, "textId": string(text)} if registered else {"text": text, "textId": None}
        event = 60 if text.startswith("o1 action") else 59
        insert("NVTX_EVENTS", start=start, end=end, eventType=event, globalTid=process + thread, domainId=0, **kind)
    insert("NVTX_EVENTS", start=1, end=None, eventType=59, globalTid=process + MAIN, text="o1 step 99", domainId=0)
    insert("NVTX_EVENTS", start=1, end=2, eventType=34, globalTid=process + MAIN, text="o1 step 98", domainId=0)
    for number, kernel in enumerate(events.kernels, 1):
        row = {"start": kernel.start, "end": kernel.end, "deviceId": 0, "contextId": 1, "streamId": kernel.stream}
        row |= {"correlationId": number, "globalPid": process}
        if kernel.copy:
            insert("CUPTI_ACTIVITY_KIND_MEMCPY", **row, bytes=1, copyKind=1)
        else:
            short = string(kernel.name.split("(")[0])
            insert("CUPTI_ACTIVITY_KIND_KERNEL", **row, demangledName=string(kernel.name), shortName=short)
        if kernel.launched is not None:
            call = {"start": kernel.launched, "end": kernel.launched + 1, "globalTid": process + kernel.thread}
            insert("CUPTI_ACTIVITY_KIND_RUNTIME", **call, correlationId=number, eventClass=0, nameId=0, returnValue=0)


def write_record(
    path: Path,
    steps: Sequence[Iterable[tuple[str, str, float, float]]],
    *,
    rank: int = 0,
    mesh: Mapping[str, tuple[int, int]] | None = None,
    seconds: float = 0.0,
) -> Path:
    """As ``overlap1f1b profile`` does; spans are kind, node, start and end in seconds."""
    content = {
        "format": "overlap1f1b-spans",
        "version": 1,
        "rank": rank,
        "mesh": {name: list(place) for name, place in (mesh or {"ep": (rank, 1 + rank)}).items()},
        "steps": [
            {"step": number, "seconds": seconds, "spans": [list(span) for span in spans]}
            for number, spans in enumerate(steps, 1)
        ],
    }
    path.write_text(json.dumps(content))
    return path


def spans_of(spans: Iterable[Span], unit: float = 1e-3) -> list[tuple[str, str, float, float]]:
    """Spans of a simulated rank, in the order of issue, as a record has them."""
    found, now = [], 0.0
    for node, start, end in spans:
        if node.resource is Resource.COMPUTE:
            found.append(("node", str(node), start * unit, end * unit))
            now = end
        else:
            found.append(("node", str(node), now * unit, now * unit))
            if end > start:
                found.append(("flight", str(node), start * unit, end * unit))
    return found
