"""Record the nodes of an engine's steps, as ranges in a profiler's trace and as its own file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overlap1f1b.cut.bits import local_part
from overlap1f1b.engine.engine import Engine
from overlap1f1b.plan import OF_PARAMETERS, About, ActionRange, Label, Node, NodeRange, Op, Resource, Span, StepRange
from overlap1f1b.plan.ranges import FORMAT, VERSION
from overlap1f1b.play.player import Around, Issue
from overlap1f1b.schedule import Action, Kind, Program
from overlap1f1b.transport.lanes import Flight


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
    """A range with its times of ``time.perf_counter`` in seconds, and the lane of a flight.

    A flight has no lane if its times are only the host's, as on a GPU's streams.
    """

    range: NodeRange | ActionRange
    start: float
    end: float
    lane: str = ""


class RecordedStep(NamedTuple):
    """A step; ``begun`` is a time of ``time.perf_counter``.

    ``sent`` has the bytes that left the rank, by the transfer's node. ``device`` returns spans by the clock of a
    device, in seconds from ``played``, when the host began to play nodes.
    """

    number: int
    begun: float
    seconds: float
    spans: tuple[RecordedSpan, ...]
    played: float = 0.0
    sent: Mapping[str, int] = {}
    device: Callable[[], tuple[Span, ...]] | None = None


class Recorder:
    """Writes a range for every node, action, wait and step of an engine while it is open, and keeps their times.

    >>> with Recorder(engine, TorchRanges()) as recorder:
    ...     engine.step(inputs, target=labels)
    >>> recorder.save("rank0.json")

    An engine without a recorder writes nothing, and looks for one once a step and once a wait.

    Args:
        engine: The engine, played by the thread that opens the recorder.
        writer: Writes the ranges: :class:`TorchRanges`, or for nsys :data:`~overlap1f1b.transport.devices.RANGES`.
        first: Number of the first step.

    Raises:
        ValueError: The engine has a recorder already.
    """

    def __init__(self, engine: Engine, writer: Any, *, first: int = 1) -> None:
        self.engine, self.writer, self.next = engine, writer, first
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.mesh: dict[str, tuple[int, int]] = {
            name: (engine.mesh.rank(name), size) for name, size in engine.mesh.layout.items()
        }
        self.steps: list[RecordedStep] = []
        self._program = engine.program
        self._actions = _actions_of(self._program)
        self._thread = 0
        self._label: AbstractContextManager[object] = nullcontext()
        self._spans: list[RecordedSpan] = []
        self._open: dict[Action, tuple[Any, float]] = {}
        self._flying: dict[Flight[Any], Any] = {}

    def __enter__(self) -> Recorder:
        if self.engine.player.recorder is not None:
            raise ValueError("the engine is recorded already; allowed: one recorder at a time")
        self._thread = threading.get_ident()
        self._label = self.writer.range(str(Label(self.rank, self.mesh)))
        self._label.__enter__()
        self.engine.observe(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self.engine.observe(None)
        self._label.__exit__(*error)

    # ------------------------------------------------------------------------------------- called by the engine

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record a step; one that fails leaves no record."""
        if self.engine.program is not self._program:  # of another number of microbatches
            self._program = self.engine.program
            self._actions = _actions_of(self._program)
        self._spans, number, before = [], self.next, time.perf_counter()
        try:
            with self.writer.range(str(StepRange(number))):
                begun = (before + time.perf_counter()) / 2  # the range's own start, within a microsecond
                yield
                ended = time.perf_counter()
        finally:
            for handle, _ in self._open.values():
                self.writer.range_end(handle)
            self._open.clear()
        self.next += 1
        spans = sorted([*self._spans, *self._flights()], key=lambda span: (span.start, span.end))
        player = self.engine.player
        device = player.measured() if player.launches else None
        sent = {str(flight.node): flight.sent for flight in player.flights if flight.sent}
        self.steps.append(RecordedStep(number, begun, ended - begun, tuple(spans), player.begun, sent, device))

    def issuing(self, nodes: Sequence[Node], issue: Issue) -> Issue:
        """Return the function that plays each of these nodes in place of ``issue``, with its ranges."""
        begins: dict[Action, Node] = {}
        ends: dict[Action, Node] = {}
        for node in nodes:
            action = self._action(node)
            if action is not None:
                begins.setdefault(action, node)
                ends[action] = node

        def ranged(node: Node, microbatches: Mapping[Any, Any]) -> None:
            action = self._action(node)
            if action is not None and begins[action] is node:
                self._open[action] = self.writer.range_start(str(ActionRange(action))), time.perf_counter()
            with nullcontext() if node.resource is Resource.COMPUTE else self._ranged("node", node):
                issue(node, microbatches)
            if action is not None and ends[action] is node:
                handle, start = self._open.pop(action)
                self.writer.range_end(handle)
                self._spans.append(RecordedSpan(ActionRange(action), start, time.perf_counter()))

        return ranged

    def computing(self, around: Around | None) -> Around:
        """Return the context of a compute node behind its waits; the player's own ``around`` goes inside."""

        @contextmanager
        def ranged(node: Node) -> Iterator[None]:
            with self._ranged("node", node), nullcontext() if around is None else around(node):
                yield

        return ranged

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
        held = {
            str(Node(op, kind, 0, block, call, part, stage)): held
            for (op, kind, stage, block, call, part), held in engine.tuner.held.items()
            if stage in engine.stages
        }
        about = About(
            schedule=engine.plan.program.name,
            overlap=str(engine.options.overlap),
            choice=engine.tuner.choice,
            microbatches=engine.program.microbatches,
            model=f"{blocks} blocks, {sum(parameter.numel() for parameter in parameters):,} parameters a rank",
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            bytes={str(step.number): step.sent for step in self.steps},
            held=held,
            sharded=bool(engine.sharding.groups),
            parameters=sum(local_part(parameter).nbytes for parameter in parameters),
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

    def _flights(self) -> Iterator[RecordedSpan]:
        """Yield the flights of the step, without exchanges of a rank that shares its experts with no other."""
        alone, host = self.engine.exchange.ranks == 1, self.engine.boundary.device.type == "cpu"
        for flight in self.engine.player.flights:
            if flight.arrived_at and not (alone and flight.node.op in _EXCHANGED):
                found = NodeRange("flight", flight.node)
                lane = flight.lane.name if host or flight.lane.background else ""
                yield RecordedSpan(found, flight.departed_at, flight.arrived_at, lane)

    def _action(self, node: Node) -> Action | None:
        if node.op in OF_PARAMETERS:
            return None
        return self._actions.get((node.kind, node.stage, node.microbatch, node.pipe))


_EXCHANGED = frozenset((Op.COUNTS, Op.DISPATCH, Op.COMBINE))


def _actions_of(program: Program) -> dict[tuple[Kind, int, int, int], Action]:
    """Return actions by (kind, stage, microbatch, pipe) of their nodes; the nodes of a B are I and W."""
    return {
        (kind, *action[1:]): action
        for rank in range(program.placement.ranks)
        for action in program.actions(rank)
        for kind in ((Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,))
    }
