"""Profile steps of an engine: a record and a trace of each rank."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import profile

from overlap1f1b.engine.engine import Engine
from overlap1f1b.plan import ActionRange, StepRange
from overlap1f1b.record.recorder import RecordedSpan, RecordedStep, Recorder, TorchRanges
from overlap1f1b.schedule.values import checked
from overlap1f1b.simulation.drawing import stacked
from overlap1f1b.transport import devices

Tool = Literal["torch", "nsys"]


class Profile:
    """Profiles the steps that an engine makes inside its block.

    >>> with Profile(engine, "profile") as profile:
    ...     for _ in range(3):
    ...         engine.step(inputs, target=labels)
    >>> profile.files
    (PosixPath('profile/rank0.record'), PosixPath('profile/rank0.trace.json.gz'))

    Each rank writes its record, JSON that no other tool takes for a trace. With torch.profiler it writes a Chrome trace
    as well, which Perfetto and Holistic Trace Analysis open. The trace has a range for every node on the thread that
    plays them. Flights and actions have tracks of their own, with times of the engine: torch.profiler has no range that
    begins on one thread and ends on another.

    Args:
        engine: An engine that has measured and chosen its plan: ``engine.tuner.settling`` is false.
        folder: Folder of the files; made if it does not exist.
        tool: ``"nsys"`` writes NVTX ranges, and opens and closes nsys's capture range; nsys writes the trace.
        first: Number of the first step.

    Raises:
        ValueError: ``tool`` is unknown, ``first`` is no number, the folder cannot be made, or nsys has no GPU to trace;
            at the end of the block: no step was made in it, or the folder has no room for the files.
    """

    @checked
    def __init__(self, engine: Engine, folder: str | Path, *, tool: Tool = "torch", first: int = 1) -> None:
        self.folder, self.tool = Path(folder), tool
        if tool == "nsys" and devices.gpu_of(devices.present()) is None:
            raise ValueError(f"nsys without a GPU that torch {torch.__version__} can use; allowed: torch.profiler")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{folder}: {error.strerror}; allowed: a folder that can be written") from error
        writer: Any = devices.RANGES if tool == "nsys" else TorchRanges()
        self.recorder = Recorder(engine, writer, first=first)
        self.files: tuple[Path, ...] = ()
        self._profiler: profile | None = None
        self._open = ExitStack()

    def __enter__(self) -> Profile:
        with ExitStack() as opening:
            opening.enter_context(self._traced())
            opening.enter_context(self.recorder)
            self._open = opening.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._open.close()
        if kind is not None:
            return
        if not self.recorder.steps:
            raise ValueError("a profile without a step; allowed: one engine.step or more inside its block")
        rank = self.recorder.rank
        self.files = self.folder / f"rank{rank}.record", self.folder / f"rank{rank}.trace.json.gz"
        try:
            self._save(*self.files)
        except OSError as failed:
            for path in self.files:
                path.unlink(missing_ok=True)
            why = failed.strerror or failed
            raise ValueError(f"{self.folder}: {why}; allowed: a folder with room for the files") from failed

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """Record the steps of the body, and nothing that was queued before them or is queued after."""
        device = devices.present()
        devices.settle(device)  # the work of earlier steps stays outside
        if self.tool == "torch":
            self._profiler = profile(acc_events=True)  # else torch 2.11 warns
        with self._profiler or devices.CAPTURE():
            yield
            devices.settle(device)  # the work of these steps is inside

    def _save(self, record: Path, trace: Path) -> None:
        """Write the record, and the trace with our steps beside the events of the profiler."""
        self.recorder.save(record)
        if self._profiler is None:
            self.files = (record,)
            return
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            content = json.loads(path.read_bytes())
        content["overlap1f1b"] = self.recorder.about
        content["traceEvents"] += added(content["traceEvents"], self.recorder.steps)
        with gzip.open(trace, "wt", compresslevel=4) as file:
            json.dump(content, file)


def added(events: Iterable[dict[str, Any]], steps: Iterable[RecordedStep]) -> Iterator[dict[str, Any]]:
    """Yield the events that a trace lacks: flights and actions, on tracks of their kinds, in microseconds.

    The ranges of steps, in trace and record, give the shift between the clocks. Flights without a lane are kernels
    there.
    """
    events = list(events)
    begins = {event["name"]: event for event in events if event.get("ph") == "X"}
    process, free = None, count(1 + max((e["tid"] for e in events if isinstance(e.get("tid"), int)), default=0))
    tracks: dict[str, list[RecordedSpan]] = {}
    for step in steps:
        begin = begins.get(str(StepRange(step.number)))
        if begin is None:
            continue
        process, shift = begin["pid"], begin["ts"] - 1e6 * step.begun
        for span in step.spans:
            track = "o1 actions" if isinstance(span.range, ActionRange) else f"o1 lane {span.lane}"
            if isinstance(span.range, ActionRange) or (span.range.kind == "flight" and span.lane):
                moved = span._replace(start=1e6 * span.start + shift, end=1e6 * span.end + shift)
                tracks.setdefault(track, []).append(moved)
    for track, spans in sorted(tracks.items()):
        for number, row in enumerate(stacked(spans), 1):
            place = {"pid": process, "tid": next(free)}
            name = track if number == 1 else f"{track} ({number})"
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": place["tid"]}}
            for span in row:
                times = {"ts": round(span.start, 3), "dur": round(span.end - span.start, 3)}
                yield {"ph": "X", "cat": "user_annotation", "name": str(span.range), **place, **times}
