"""SQLite files that ``nsys export --type sqlite`` writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from overlap1f1b.plan.ranges import PREFIX
from overlap1f1b.profiling.recording import Capture
from overlap1f1b.schedule.values import shortened

MAGIC = b"SQLite format 3\0"
_PUSH_POP, _START_END = 59, 60  # types of NVTX events that are ranges
_KIND = "CUPTI_ACTIVITY_KIND_"
_DEVICE_TABLES = {
    f"{_KIND}KERNEL": "(SELECT value FROM StringIds WHERE id = t.demangledName)",
    f"{_KIND}MEMCPY": "CASE t.copyKind WHEN 10 THEN 'Memcpy PtoP' ELSE 'Memcpy' END",
    f"{_KIND}MEMSET": "'Memset'",
}
"""Tables of what runs on a device, with the name of a row."""
_RUNTIME, _GRAPHS = f"{_KIND}RUNTIME", f"{_KIND}GRAPH_TRACE"
_PROCESS = 1 << 24  # the lower 24 bits of a global thread number the thread within its process


def read_nsys(path: Path) -> list[Capture]:
    """Read the events of each process, in the order of their first range.

    nsys creates a table only if it has rows for it, so each table may be missing.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return _captures(path, database)
    except sqlite3.Error as error:
        raise ValueError(
            f"{path}: {shortened(str(error))}; allowed: a whole file of nsys export --type sqlite"
        ) from None
    except (TypeError, OverflowError) as error:  # SQLite keeps text in a column of numbers
        raise ValueError(
            f"{path}: a row is malformed ({shortened(str(error))}); allowed: a file of nsys export"
        ) from None


def _captures(path: Path, database: sqlite3.Connection) -> list[Capture]:
    """Return what each process of a file has recorded."""
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
    devices = [name for name in _DEVICE_TABLES if name in tables]
    if "NVTX_EVENTS" not in tables and not devices:
        raise ValueError(f"{path}: no NVTX_EVENTS and no kernels in it; allowed: a file of nsys export --type sqlite")
    captures: dict[int, Capture] = {}

    def capture_of(process: int) -> Capture:
        return captures.setdefault(process // _PROCESS, Capture(path, "nsys"))

    if "NVTX_EVENTS" in tables:
        for text, thread, start, end in _ranges(database, named="StringIds" in tables):
            capture_of(thread).add_range(text, thread, start, end)
    columns = ("globalPid", "deviceId", "correlationId", "streamId", "start", "end")
    for table in devices:
        for name, process, device, *kernel in _rows(database, table, columns, _DEVICE_TABLES[table]):
            capture_of(process).add_kernel(name or "", device, *kernel)
    if _RUNTIME in tables:
        for _, thread, number, start in _rows(database, _RUNTIME, ("globalTid", "correlationId", "start")):
            if (capture := captures.get(thread // _PROCESS)) is not None:
                capture.launches.extend((number, thread, start))
    if _GRAPHS in tables:
        for process, count in database.execute(f"SELECT globalPid, COUNT(*) FROM {_GRAPHS} GROUP BY globalPid"):
            capture_of(process).notes.append(
                f"{count} launches of graphs are in the file as a whole, and left out; nsys shows their kernels if it "
                "traces graphs by node"
            )
    # A launcher has neither ranges nor kernels.
    found = [capture for capture in captures.values() if capture.ranges or capture.kernels]
    return found or [Capture(path, "nsys")]


def _ranges(database: sqlite3.Connection, *, named: bool) -> Iterable[tuple[str, int, int, int]]:
    """Yield the ranges of overlap1f1b; their text is in the row or, if it was registered, in the table of strings.

    A range that was still open at the capture's end has no end; it is skipped unless it is a label.
    """
    text, strings = "e.text", ""
    if named:
        text, strings = "COALESCE(e.text, s.value)", "LEFT JOIN StringIds AS s ON e.textId = s.id"
    return database.execute(
        f'SELECT {text} AS name, e.globalTid, e.start, COALESCE(e."end", e.start) FROM NVTX_EVENTS AS e {strings} '
        "WHERE e.eventType IN (?, ?) AND e.globalTid IS NOT NULL AND substr(name, 1, ?) = ? "
        'AND (e."end" IS NOT NULL OR substr(name, ?, 5) = ?) ORDER BY e.start',
        (_PUSH_POP, _START_END, len(PREFIX), PREFIX, len(PREFIX) + 1, "rank "),
    )


def _rows(
    database: sqlite3.Connection, table: str, columns: Sequence[str], name: str = "NULL"
) -> Iterable[tuple[Any, ...]]:
    """Yield the name and the columns of rows in which none of them is missing."""
    wanted = [f't."{column}"' for column in columns]  # alone, a missing column would be a string
    known = " AND ".join(f"{column} IS NOT NULL" for column in wanted)
    return database.execute(f'SELECT {name}, {", ".join(wanted)} FROM "{table}" AS t WHERE {known}')
