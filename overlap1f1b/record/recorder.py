"""Record the nodes of an engine's steps, as ranges in a profiler's trace and as its own file; profile some steps."""

from __future__ import annotations

import gzip
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.profiler import profile

from overlap1f1b.cut.bits import local_part
from overlap1f1b.engine.engine import Engine
from overlap1f1b.plan import EXCHANGED, MOVES, OF_PARAMETERS, CostKey, Node, Place, Resource, Span
from overlap1f1b.plan.ranges import FORMAT, VERSION, About, ActionRange, Label, NodeRange, StepRange
from overlap1f1b.play.observers import Observer
from overlap1f1b.play.times import Times
from overlap1f1b.schedule import Action, Kind, Program
from overlap1f1b.schedule.values import check_size, checked
from overlap1f1b.simulation.drawing import stacked
from overlap1f1b.transport import devices
from overlap1f1b.transport.lanes import Flight


@runtime_checkable
class RangeWriter(Protocol):
    """Writes ranges by their names, as :class:`TorchRanges` and torch's ``nvtx`` do."""

    range: Callable[[str], AbstractContextManager[object]]
    range_start: Callable[[str], Any]
    range_end: Callable[[Any], object]


class TorchRanges:
    """Writes ranges for torch.profiler, named as :mod:`overlap1f1b.plan.ranges` names them.

    Ranges that overlap without nesting are left out: :class:`Profile` adds them.
    """

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return the context of a range inside the open ranges of this thread."""
        # The C class behind record_function, a private name: 0.6 instead of 12 µs, 3 instead of 45 under the profiler.
        return torch._C._profiler._RecordFunctionFast(name)

    def range_start(self, name: str) -> Any:
        """Do nothing."""

    def range_end(self, handle: Any) -> None:
        """Do nothing."""


class RecordedSpan(NamedTuple):
    """A range with its times of ``time.perf_counter`` in seconds."""

    range: NodeRange | ActionRange
    start: float
    end: float
    lane: str = ""  # of a flight; none if its times are only the host's, as on a GPU's streams


class RecordedStep(NamedTuple):
    """A step, by ``time.perf_counter`` in seconds."""

    number: int
    begun: float
    seconds: float
    spans: tuple[RecordedSpan, ...]
    played: float = 0.0  # when the host began to play nodes
    sent: Mapping[str, int] = {}  # bytes that left the rank, by the transfer's node
    device: Callable[[], tuple[Span, ...]] | None = None  # returns spans by a device's clock, from ``played``


class Recorder(Observer):
    """Writes a range for every node, action, wait and step of an engine while it is open, and keeps their times.

    >>> with Recorder(engine, TorchRanges()) as recorder:
    ...     engine.step(inputs, target=labels)
    >>> recorder.save("rank0.record")

    An engine without a recorder writes nothing, and looks for one once a step and once a wait.

    Args:
        engine: The engine, played by the thread that opens the recorder.
        writer: Writes the ranges: :class:`TorchRanges`, or for nsys :data:`~overlap1f1b.transport.devices.RANGES`.
        first: Number of the first step.

    Raises:
        ValueError: The engine has a recorder already, or a value is of another kind.
    """

    @checked
    def __init__(self, engine: Engine, writer: RangeWriter, *, first: int = 1) -> None:
        check_size("first", first, 0)
        self.engine, self.writer, self.next = engine, writer, first
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.mesh: dict[str, tuple[int, int]] = {
            name: (engine.mesh.rank(name), size) for name, size in engine.mesh.layout.items()
        }
        self.steps: list[RecordedStep] = []
        self._actions: dict[tuple[Kind, int, int, int], Action] = {}
        self._thread = 0
        self._label: AbstractContextManager[object] = nullcontext()
        self._spans: list[RecordedSpan] = []
        self._open: dict[Action, tuple[Any, float]] = {}
        self._ends: dict[Action, Node] = {}  # last node of each action of the step
        self._step, self._begun = ExitStack(), 0.0
        self._node: AbstractContextManager[None] | None = None  # the range of the present node
        self._times: Times | None = None
        self._flying: dict[Flight[Any], Any] = {}

    def __enter__(self) -> Recorder:
        if any(isinstance(one, Recorder) for one in self.engine.observers):
            raise ValueError("the engine is recorded already; allowed: one recorder at a time")
        self._thread = threading.get_ident()
        self._label = self.writer.range(str(Label(self.rank, self.mesh)))
        self._label.__enter__()
        self.engine.observers.insert(0, self)
        return self

    def __exit__(self, *error: Any) -> None:
        self.engine.observers.remove(self)
        self._label.__exit__(*error)

    # ------------------------------------------------------------------------------------- called in a step

    def begin(self, times: Times) -> None:
        """Open the range of a step; one that fails leaves no record."""
        self._actions = _actions_of(self.engine.program)  # perhaps of another number of microbatches than before
        self._times, self._spans = times, []
        self._ends = {action: node for node in times.nodes if (action := self._action(node)) is not None}
        before = time.perf_counter()
        self._step = ExitStack()
        self._step.enter_context(self.writer.range(str(StepRange(self.next))))
        self._begun = (before + time.perf_counter()) / 2  # the range's own start, within a microsecond
        for lane in self.engine.connection.lanes:
            lane.report_to(self)

    def before(self, node: Node) -> None:
        """Open the range of an action at its first node, and of a node that does not compute."""
        action = self._action(node)
        if action is not None and action not in self._open and action in self._ends:
            self._open[action] = self.writer.range_start(str(ActionRange(action))), time.perf_counter()
        if node.resource is not Resource.COMPUTE:
            self._enter(node)

    def ready(self, node: Node, received: Mapping[Place, Any]) -> None:
        """Open the range of a compute node, behind its waits."""
        if node.resource is Resource.COMPUTE:
            self._enter(node)

    def after(self, node: Node) -> None:
        """Close the range of a node, and that of an action at its last one."""
        if self._node is None:  # a gather that has been taken
            return
        self._leave()
        action = self._action(node)
        if action is not None and self._ends.get(action) is node:
            handle, start = self._open.pop(action)
            self.writer.range_end(handle)
            self._spans.append(RecordedSpan(ActionRange(action), start, time.perf_counter()))

    def end(self, *, failed: bool) -> None:
        """Close what is open; keep the step unless it has failed."""
        ended = time.perf_counter()
        self._leave()
        self._step.close()
        for lane in self.engine.connection.lanes:
            lane.report_to(None)
        for handle, _ in self._open.values():
            self.writer.range_end(handle)
        self._open.clear()
        times, number, self._times = self._times, self.next, None
        if failed or times is None:
            return
        self.next += 1
        spans = sorted([*self._spans, *self._flights(times)], key=lambda span: (span.start, span.end))
        device = times.spans if times.launches else None
        sent = {str(flight.node): flight.sent for flight in times.flights if flight.sent}
        begun = self._begun
        self.steps.append(RecordedStep(number, begun, ended - begun, tuple(spans), times.begun, sent, device))

    def _enter(self, node: Node) -> None:
        self._node = self._ranged("node", node)
        self._node.__enter__()

    def _leave(self) -> None:
        if self._node is not None:
            self._node.__exit__(None, None, None)
            self._node = None

    def waiting(self, node: Node) -> AbstractContextManager[None]:
        """Record a wait of the issuing thread; other threads' waits are not recorded."""
        return self._ranged("wait", node) if threading.get_ident() == self._thread else nullcontext()

    def departed(self, flight: Flight[Any]) -> None:
        """Open the range of a flight, in the thread that started it."""
        self._flying[flight] = self.writer.range_start(str(NodeRange("flight", flight.node)))

    def arrived(self, flight: Flight[Any]) -> None:
        """Close the range of a flight, in the thread that saw its arrival."""
        if flight in self._flying:  # it departed under this recorder
            self.writer.range_end(self._flying.pop(flight))

    # ------------------------------------------------------------------------------------- results

    @checked
    def save(self, path: str | Path) -> None:
        """Write the steps as JSON; waits for a device.

        ``steps`` has for each step its number ``step``, its length ``seconds``, and ``spans``: arrays of kind, node,
        start and end, in seconds from the start of the step. Kinds are ``node`` (the host computes or launches it),
        ``flight`` and ``wait``, and on a GPU ``device``: the node's time by the device's clock, which begins when the
        host begins to play nodes, since no work of an earlier step is left then. ``about`` is :attr:`about`.
        """
        steps = []
        for step in self.steps:
            at = step.begun
            rows = [
                [span.range.kind, str(span.range.node), span.start - at, span.end - at]
                for span in step.spans
                if isinstance(span.range, NodeRange)
            ]
            for node, start, end in () if step.device is None else step.device():
                rows.append(["device", str(node), step.played + start - at, step.played + end - at])
            steps.append({"step": step.number, "seconds": step.seconds, "spans": rows})
        content = {"format": FORMAT, "version": VERSION, "rank": self.rank, "mesh": self.mesh, "steps": steps}
        Path(path).write_text(json.dumps(content | {"about": self.about}))

    @property
    def about(self) -> dict[str, Any]:
        """What the records say of the run: the JSON of :class:`~overlap1f1b.plan.About`."""
        engine, parameters = self.engine, list(self.engine.parameters())
        blocks = sum(map(len, engine.tuner.shapes))

        def named(table: Mapping[CostKey, Any]) -> dict[str, Any]:
            """Return what is known of this rank's nodes, by those of microbatch 0."""
            keys = (key for key in table if key[2] in engine.stages)
            return {str(Node(*key[:2], 0, *key[3:], key[2])): table[key] for key in keys}

        costs = {} if engine.costs is None else engine.costs.by_node
        about = About(
            schedule=engine.plan.program.name,
            overlap=str(engine.options.overlap),
            choice=engine.tuner.choice,
            microbatches=engine.program.microbatches,
            model=f"{blocks} blocks, {sum(parameter.numel() for parameter in parameters):,} parameters a rank",
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            bytes={str(step.number): step.sent for step in self.steps},
            held=named(engine.tuner.held),
            costs=named({key: fmean(cost) if isinstance(cost, tuple) else cost for key, cost in costs.items()}),
            parameters=sum(local_part(parameter).nbytes for parameter in parameters),
            standing=engine.tuner.standing,
        )
        return asdict(about)

    @contextmanager
    def _ranged(self, kind: Any, node: Node) -> Iterator[None]:
        found = NodeRange(kind, node)
        with self.writer.range(str(found)):
            start = time.perf_counter()
            yield
            end = time.perf_counter()
        self._spans.append(RecordedSpan(found, start, end))

    def _flights(self, times: Times) -> Iterator[RecordedSpan]:
        """Yield the flights of the step, without exchanges of a rank that shares its experts with no other."""
        alone, host = self.engine.connection.exchange.ranks == 1, self.engine.connection.device.type == "cpu"
        for flight in times.flights:
            if flight.arrived_at and not (alone and flight.node.op in EXCHANGED):
                found = NodeRange("flight", flight.node)
                lane = flight.lane.name if host or flight.lane.background else ""
                yield RecordedSpan(found, flight.departed_at, flight.arrived_at, lane)

    def _action(self, node: Node) -> Action | None:
        if node.op in OF_PARAMETERS or node.op in MOVES:
            return None
        return self._actions.get((node.kind, node.stage, node.microbatch, node.pipe))


def _actions_of(program: Program) -> dict[tuple[Kind, int, int, int], Action]:
    """Return actions by (kind, stage, microbatch, pipe) of their nodes; the nodes of a B are I and W."""
    return {
        (kind, *action[1:]): action
        for rank in range(program.placement.ranks)
        for action in program.actions(rank)
        for kind in ((Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,))
    }


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
