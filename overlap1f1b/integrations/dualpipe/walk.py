"""A step of modules that run whole, instruction by instruction."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from overlap1f1b.engine.run.microbatch import OptionalTensors, Tensors, tensors
from overlap1f1b.integrations.dualpipe.batch import Batch, Ended
from overlap1f1b.plan import Node, Op
from overlap1f1b.schedule import Action, Command, Instruction, Kind, Pair, Program, Verb
from overlap1f1b.transport.boundary import Boundary
from overlap1f1b.transport.lanes import Flight
from overlap1f1b.transport.limits import DRAIN_S

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


class Walk:
    """One step under way: a pair is one call of the module's own function, everything else plain autograd.

    Outputs keep their values until their backward, which a module may start in any way it likes.

    Args:
        modules: Those of this rank, by the number of their stage.
        boundary: To other ranks.
        program: Of the step.
        batch: What this rank is given.
        overlapped: Whether pairs are given to ``type(module).overlapped_forward_backward``.
        weight_store: Where modules leave weight gradients.
        grad: Whether there are backwards.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        boundary: Boundary,
        program: Program,
        batch: Batch,
        *,
        overlapped: bool,
        weight_store: WeightStore | None,
        grad: bool,
    ) -> None:
        self.modules, self.boundary, self.program, self.batch = modules, boundary, program, batch
        self.overlapped, self.weight_store, self.grad = overlapped, weight_store, grad
        self.last = program.placement.stages - 1
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
        for pipe, stage in self.program.placement.places(self.boundary.rank):
            indices = self.program.microbatches_of(pipe)
            if stage == 0:
                self._parts.update(zip(indices, self.batch.parts(len(indices)), strict=True))
            if stage == self.last:
                self._labels.update(zip(indices, self.batch.labels_of(len(indices)), strict=True))
        commands = [c for c in instructions if isinstance(c, Command) and c.verb is Verb.RECV]
        self.boundary.begin(map(_node, commands), remember=self.grad)
        for self.position in instructions:
            match self.position:
                case Command() as command:
                    self._transfer(command)
                case Pair(forward, backward) if self.overlapped:
                    self._pair(forward, backward)
                case Pair(forward, backward):
                    self._forward(forward)
                    self._backward(backward)
                case Action(kind=Kind.F) as action:
                    self._forward(action)
                case Action(kind=Kind.W):
                    if self.weight_store is not None:
                        self.weight_store.pop()
                case action:
                    self._backward(action)
        while self._sends:
            self._sends.popleft().wait()

    def ended(self) -> Ended:
        """What the step made at this rank's ends."""
        return Ended(_in_order(self._losses), _in_order(self._outputs), _in_order(self._input_grads))

    def drain(self) -> None:
        """Gives what is under way a moment to end."""
        flights: list[Flight[Any]] = [*self._sends, *self._arriving.values()]
        for flight in flights:
            flight.drain(DRAIN_S)

    # ---------------------------------------------------------------------------------------------- between stages

    def _transfer(self, command: Command) -> None:
        stage, microbatch = command.stage, command.microbatch
        forward = command.kind is Kind.F
        if command.verb is Verb.RECV:
            self._arriving[forward, stage, microbatch] = self.boundary.receive(_node(command))
        elif command.verb is Verb.SEND:
            while self._sends and self._sends[0].arrived:
                self._sends.popleft().wait()
            self._sends.append(self.boundary.send(_node(command), *self._runs[stage, microbatch].passed(forward)))
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
        return action.stage == self.last

    def _forward(self, action: Action) -> None:
        run, criterion = self._begin(action), self.batch.criterion
        outputs = tensors(self.modules[action.stage](*run.inputs))
        loss = criterion(*outputs, *run.labels) if self._ends(action) and criterion is not None else None
        self._finish_forward(action, run, outputs, loss)

    def _finish_forward(self, action: Action, run: _Run, outputs: Any, loss: Tensor | None) -> None:
        if not outputs or not all(isinstance(t, Tensor) for t in outputs):
            name = type(self.modules[action.stage]).__name__
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
        apart = self.weight_store if action.kind is Kind.I else None
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

    def _roots(self, action: Action, run: _Run) -> tuple[Tensor | None, Tensors, Tensors]:
        """The loss, or the outputs that have a gradient to come, and those."""
        if self._ends(action):
            return run.loss, (), ()
        outputs = tuple(t for t, differs in zip(run.outputs, run.differentiable, strict=True) if differs)
        return None, outputs, self._take(action)

    def _finish_backward(self, action: Action, run: _Run) -> None:
        wanted = [t for t in run.inputs if t.requires_grad]
        run.input_grads = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in wanted)
        run.inputs, run.outputs, run.loss = [], [], None
        if action.stage == 0 and wanted:
            self._input_grads[action.microbatch] = run.input_grads

    def _pair(self, forward: Action, backward: Action) -> None:
        """Both at once, by the protocol of the module; tuples, as autograd's engine wants them when called directly."""
        run0, run1 = self._begin(forward), self._runs[backward.stage, backward.microbatch]
        module0, module1 = (self.modules[action.stage] for action in (forward, backward))
        criterion0 = self.batch.criterion if self._ends(forward) else None
        loss1, outputs1, grads1 = self._roots(backward, run1)
        outputs0, loss0 = type(module0).overlapped_forward_backward(  # type: ignore[attr-defined]  # the protocol's
            module0, run0.inputs, criterion0, run0.labels, module1, loss1, outputs1, grads1
        )
        self._finish_forward(forward, run0, tensors(outputs0), loss0)
        self._finish_backward(backward, run1)


def _in_order(made: Mapping[int, T]) -> list[T]:
    return [value for _, value in sorted(made.items())]


def _node(command: Command) -> Node:
    """The same transfer in the words of a plan."""
    op, kind = Op.RECEIVE if command.verb is Verb.RECV else Op.SEND, Kind.F if command.kind is Kind.F else Kind.I
    return Node(op, kind, command.microbatch, 0, stage=command.stage, pipe=command.pipe)
