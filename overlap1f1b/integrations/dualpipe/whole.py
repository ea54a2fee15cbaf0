"""A step whose modules run whole: those with an ``overlapped_forward_backward`` of their own."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.engine.boundary import Boundary
from overlap1f1b.engine.failures import Failures, headline
from overlap1f1b.engine.lanes import Flight
from overlap1f1b.engine.mesh import Mesh
from overlap1f1b.engine.microbatch import OptionalTensors, Tensors, tensors
from overlap1f1b.integrations.dualpipe.batch import Batch, Ended
from overlap1f1b.plan import Node, Op
from overlap1f1b.schedule import (
    Action,
    Command,
    Instruction,
    Kind,
    LoweredProgram,
    Pair,
    Placement,
    Program,
    Verb,
    forwards_of,
    lower,
)

T = TypeVar("T")
Place = tuple[int, int]
"""Stage and microbatch."""

_Way = tuple[bool, int, int]
"""Whether forward; stage that is passed something; microbatch."""


class WeightStore(Protocol):
    """Where modules leave weight gradients while it is enabled, as the ``WeightGradStore`` of DualPipe."""

    enabled: bool

    def flush(self) -> None:
        """What was left since the last call belongs together."""

    def pop(self) -> None:
        """Computes the oldest of what belongs together."""

    def clear(self) -> None:
        """Forgets everything."""


@dataclass
class _Run:
    """One microbatch on one stage, between its forward and its backward."""

    inputs: list[Tensor]
    labels: OptionalTensors = ()
    outputs: list[Tensor] = field(default_factory=list)
    differentiable: tuple[bool, ...] = ()
    loss: Tensor | None = None
    input_grads: Tensors = ()

    def passed(self, forward: bool) -> tuple[Tensors, tuple[bool, ...]]:
        """What the next stage is given, and which of it has a gradient to come."""
        passed = tuple(t.detach() for t in (self.outputs if forward else self.input_grads))
        return passed, self.differentiable if forward else (False,) * len(passed)


class WholeModules:
    """Walks a lowered program: a pair is one call of the module's own function, everything else plain autograd.

    Outputs keep their values until their backward, which a module may start in any way it likes.

    Args:
        modules: Those of this rank, by the number of their stage.
        placement: Which rank holds which stage.
        mesh: Its dimension "pp".
        overlapped: Whether pairs are given to ``type(module).overlapped_forward_backward``.
        weight_store: Where the modules leave weight gradients; then they are computed where the program has W.
        timeout: Limit in seconds of every wait for another rank.
        dynamic_shapes: Whether what passes between stages may change its sizes from step to step.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        placement: Placement,
        mesh: Mesh,
        *,
        overlapped: bool,
        weight_store: WeightStore | None,
        timeout: float,
        dynamic_shapes: bool,
    ) -> None:
        self.modules, self.placement, self.mesh = dict(modules), placement, mesh
        self.overlapped, self.weight_store = overlapped, weight_store
        self.rank, self.last = mesh.rank("pp"), placement.stages - 1
        parameter = next((p for module in modules.values() for p in module.parameters()), None)
        group = mesh.group("pp")
        self.failures = Failures(mesh.combined(uuid.uuid4().hex, lambda _, names: names[0]))
        self.boundary = Boundary(
            mesh,
            placement,
            device=torch.device("cpu") if parameter is None else parameter.device,
            timeout=timedelta(seconds=timeout),
            failures=self.failures,
            background=group is not None and dist.get_backend(group) == "gloo",
            dynamic=dynamic_shapes,
        )
        self._failed = False
        self._remembered: Program | None = None
        self._lowered: dict[tuple[int, bool], LoweredProgram] = {}

    def run(self, program: Program, batch: Batch, *, grad: bool) -> Ended:
        """Plays a step, or its forwards alone.

        Raises:
            ValueError: What is missing, or a step after one that failed.
            RuntimeError: Another rank failed, or did not answer within the limit.
        """
        if self._failed:
            raise ValueError("a step of this pipeline failed before; allowed: a new one, on all ranks")
        if grad and self._remembered is not program:  # other microbatches, other sizes
            self.boundary.forget()
            self._remembered = program
        key = (program.microbatches, grad)
        if key not in self._lowered:
            self._lowered[key] = lower(program if grad else forwards_of(program))
        step = _Step(self, program, batch, grad=grad)
        with self._guarded(step):
            step.play(self._lowered[key].ranks[self.rank])
        return step.ended()

    @contextmanager
    def _guarded(self, step: _Step) -> Iterator[None]:
        """A failure inside is told to the other ranks."""
        try:
            yield
        except BaseException as error:
            step.drain()
            message = f"pipeline rank {self.rank} failed at {step.position}"
            error.add_note(message)
            self.failures.post(f"{message}: {headline(error)}")
            self._failed = self.mesh.size("pp") > 1
            if self.weight_store is not None:
                self.weight_store.enabled = False
                self.weight_store.clear()
            raise


class _Step:
    """One step under way."""

    def __init__(self, pipeline: WholeModules, program: Program, batch: Batch, *, grad: bool) -> None:
        self.pipeline, self.program, self.batch, self.grad = pipeline, program, batch, grad
        self.position: Instruction | str = "its batch"
        self._parts: dict[int, Tensors] = {}
        self._labels: dict[int, OptionalTensors] = {}
        self._runs: dict[Place, _Run] = {}
        self._arriving: dict[_Way, Flight[Tensors]] = {}
        self._passed: dict[_Way, Tensors] = {}
        self._sends: deque[Flight[None]] = deque()
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensors] = {}
        self._input_grads: dict[int, Tensors] = {}

    def play(self, instructions: tuple[Instruction, ...]) -> None:
        """Walks the instructions of this rank."""
        for pipe, stage in self.program.placement.places(self.pipeline.rank):
            indices = self.program.microbatches_of(pipe)
            if stage == 0:
                self._parts.update(zip(indices, self.batch.parts(len(indices)), strict=True))
            if stage == self.pipeline.last:
                self._labels.update(zip(indices, self.batch.labels_of(len(indices)), strict=True))
        commands = [c for c in instructions if isinstance(c, Command) and c.verb is Verb.RECV]
        self.pipeline.boundary.begin(map(_node, commands), remember=self.grad)
        for self.position in instructions:
            match self.position:
                case Command() as command:
                    self._transfer(command)
                case Pair(forward, backward) if self.pipeline.overlapped:
                    self._pair(forward, backward)
                case Pair(forward, backward):
                    self._forward(forward)
                    self._backward(backward)
                case Action(kind=Kind.F) as action:
                    self._forward(action)
                case Action(kind=Kind.W):
                    if self.pipeline.weight_store is not None:
                        self.pipeline.weight_store.pop()
                case action:
                    self._backward(action)
        while self._sends:
            self._sends.popleft().wait()

    def ended(self) -> Ended:
        """What the step made at this rank's ends."""
        return Ended(_in_order(self._losses), _in_order(self._outputs), _in_order(self._input_grads))

    def drain(self) -> None:
        """Gives what is under way a second to end."""
        flights: list[Flight[Any]] = [*self._sends, *self._arriving.values()]
        for flight in flights:
            flight.drain(seconds=1.0)

    # ---------------------------------------------------------------------------------------------- between stages

    def _transfer(self, command: Command) -> None:
        boundary, stage, microbatch = self.pipeline.boundary, command.stage, command.microbatch
        forward = command.kind is Kind.F
        if command.verb is Verb.RECV:
            self._arriving[forward, stage, microbatch] = boundary.receive(_node(command))
        elif command.verb is Verb.SEND:
            while self._sends and self._sends[0].arrived:
                self._sends.popleft().wait()
            self._sends.append(boundary.send(_node(command), *self._runs[stage, microbatch].passed(forward)))
        elif command.verb is Verb.LOCAL_PASS:  # the fold of a V
            passed, differs = self._runs[stage, microbatch].passed(forward)
            leaves = tuple(t.requires_grad_(d) for t, d in zip(passed, differs, strict=True))
            self._passed[forward, stage + (1 if forward else -1), microbatch] = leaves
        elif command.verb is Verb.FREE:
            del self._runs[stage, microbatch]

    def _take(self, action: Action) -> Tensors:
        """What an action needs of the stage before it, or after it."""
        way = (action.kind is Kind.F, action.stage, action.microbatch)
        return self._passed.pop(way) if way in self._passed else self._arriving.pop(way).wait()

    # ---------------------------------------------------------------------------------------------- compute

    def _begin(self, action: Action) -> _Run:
        microbatch = action.microbatch
        inputs = self._parts.pop(microbatch) if action.stage == 0 else self._take(action)
        run = _Run(list(inputs), self._labels.pop(microbatch) if self._ends(action) else ())
        self._runs[action.stage, microbatch] = run
        return run

    def _ends(self, action: Action) -> bool:
        return action.stage == self.pipeline.last

    def _forward(self, action: Action) -> None:
        run, criterion = self._begin(action), self.batch.criterion
        outputs = tensors(self.pipeline.modules[action.stage](*run.inputs))
        loss = criterion(*outputs, *run.labels) if self._ends(action) and criterion is not None else None
        self._finish_forward(action, run, outputs, loss)

    def _finish_forward(self, action: Action, run: _Run, outputs: Any, loss: Tensor | None) -> None:
        if not outputs or not all(isinstance(t, Tensor) for t in outputs):
            name = type(self.pipeline.modules[action.stage]).__name__
            what = ", ".join(type(t).__name__ for t in outputs) or "nothing"
            raise ValueError(f"{name} returns {what}; allowed: a tensor or a tuple of tensors")
        run.differentiable = tuple(t.requires_grad for t in outputs)
        if not self._ends(action):
            run.outputs = list(outputs)
            return
        if self.batch.keep_outputs:
            self._outputs[action.microbatch] = tuple(t.detach() for t in outputs)
        if loss is not None:
            run.loss, self._losses[action.microbatch] = loss, loss.detach()

    def _backward(self, action: Action) -> None:
        run = self._runs[action.stage, action.microbatch]
        apart = self.pipeline.weight_store if action.kind is Kind.I else None
        loss, outputs, grads = self._roots(action, run)
        if apart is not None:
            apart.enabled = True
        if loss is not None:
            loss.backward()
        elif outputs:
            torch.autograd.backward(outputs, grads)
        if apart is not None:
            apart.enabled = False
            apart.flush()
        self._finish_backward(action, run)

    def _roots(self, action: Action, run: _Run) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """The loss, or the outputs that have a gradient to come, and those."""
        if self._ends(action):
            return run.loss, [], []
        outputs = [t for t, differs in zip(run.outputs, run.differentiable, strict=True) if differs]
        return None, outputs, list(self._take(action))

    def _finish_backward(self, action: Action, run: _Run) -> None:
        wanted = [t for t in run.inputs if t.requires_grad]
        run.input_grads = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in wanted)
        run.inputs, run.outputs, run.loss = [], [], None
        if action.stage == 0 and wanted:
            self._input_grads[action.microbatch] = run.input_grads

    def _pair(self, forward: Action, backward: Action) -> None:
        """Both at once, by the protocol of the module."""
        run0, run1 = self._begin(forward), self._runs[backward.stage, backward.microbatch]
        module0, module1 = (self.pipeline.modules[action.stage] for action in (forward, backward))
        criterion0 = self.batch.criterion if self._ends(forward) else None
        loss1, outputs1, grads1 = self._roots(backward, run1)
        outputs0, loss0 = type(module0).overlapped_forward_backward(  # type: ignore[attr-defined]  # the protocol's
            module0, run0.inputs, criterion0, list(run0.labels), module1, loss1, outputs1, grads1
        )
        self._finish_forward(forward, run0, tensors(outputs0), loss0)
        self._finish_backward(backward, run1)


def _in_order(made: Mapping[int, T]) -> list[T]:
    return [value for _, value in sorted(made.items())]


def _node(command: Command) -> Node:
    """The same transfer in the words of a plan."""
    op, kind = Op.RECEIVE if command.verb is Verb.RECV else Op.SEND, Kind.F if command.kind is Kind.F else Kind.I
    return Node(op, kind, command.microbatch, 0, stage=command.stage, pipe=command.pipe)
