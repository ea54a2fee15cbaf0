"""A step with modules that run whole: by plain autograd, and by the modules' own function for pairs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from overlap1f1b.engine.run.microbatch import OptionalTensors, Tensors, tensors
from overlap1f1b.integrations.dualpipe.batch import Batch, Ended
from overlap1f1b.plan import BlockShape, Node, NodeCosts, Op, Plan, check, check_rendezvous, compile, with_rendezvous
from overlap1f1b.schedule import Kind, Pair, Placement, Program, Slot, actions_of, forwards_of
from overlap1f1b.transport import streams
from overlap1f1b.transport.boundary import Boundary
from overlap1f1b.transport.lanes import Flight
from overlap1f1b.transport.limits import DRAIN_S
from overlap1f1b.transport.mesh import Mesh

T = TypeVar("T")
_Run = tuple[int, int]
"""Stage and microbatch."""
_Chain = tuple[Kind, int, int]
"""F or I, stage and microbatch."""


class WeightStore(Protocol):
    """A queue of deferred weight gradients, like the ``WeightGradStore`` of DualPipe."""

    enabled: bool

    def flush(self) -> None:
        """Close the group of weight gradients that were deferred since the last call."""

    def pop(self) -> None:
        """Compute the oldest group."""

    def clear(self) -> None:
        """Drop all groups."""


class WholeModules:
    """The modules, by the number of their stage, the links between ranks and the plans, which stay from step to step.

    Args:
        overlapped: Whether pairs are given to ``type(module).overlapped_forward_backward``.
        weight_store: Queue to which the modules defer weight gradients, for the program's W.
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
        self.modules, self.mesh = dict(modules), mesh
        self.overlapped, self.weight_store = overlapped, weight_store
        parameter = next((p for module in modules.values() for p in module.parameters()), None)
        self.failures = mesh.failures
        self.boundary = Boundary(
            mesh,
            placement,
            device=torch.device("cpu") if parameter is None else parameter.device,
            timeout=timedelta(seconds=timeout),
            failures=self.failures,
            background=mesh.on_gloo,
            dynamic=dynamic_shapes,
        )
        if streams.is_queued(self.boundary.device):
            mesh.warm_up(self.boundary.device)
        self._failed = False
        self._remembered: Program | None = None
        self._plans: dict[tuple[int, bool], Plan] = {}

    def run(self, program: Program, batch: Batch, *, grad: bool) -> Ended:
        """Play a step, or its forwards alone.

        Raises:
            ValueError: Inputs, labels or the criterion are missing.
            RuntimeError: Another rank failed, or did not answer within the limit; or an earlier step has failed.
        """
        if self._failed:
            raise RuntimeError("a step of this pipeline failed before; allowed: a new one, on all ranks")
        if grad and self._remembered is not program:  # other microbatches, other sizes
            self.boundary.forget()
            self._remembered = program
        walk = _Walk(self, self._plan(program, grad=grad), batch, grad=grad)
        with self._guarded(walk):
            walk.play()
        return walk.ended()

    def _plan(self, program: Program, *, grad: bool) -> Plan:
        """Return the actions one after another; a stage is one block, with separate weight gradients if possible."""
        key = (program.microbatches, grad)
        if key not in self._plans:
            played = program if grad else forwards_of(program)
            plan = compile(played, (BlockShape(seams=0),), NodeCosts(), "serial")
            meets = self.mesh.several and not self.boundary.posts_ahead
            ranks = tuple(
                _members_in_turn(*both, backward_first=meets) for both in zip(played.ranks, plan.ranks, strict=True)
            )
            plan = replace(plan, ranks=ranks)
            if meets:
                plan = with_rendezvous(plan, NodeCosts())
                check_rendezvous(plan)
            check(plan)
            self._plans[key] = plan
        return self._plans[key]

    @contextmanager
    def _guarded(self, walk: _Walk) -> Iterator[None]:
        """Tell the other ranks of a failure inside the context."""
        try:
            yield
        except BaseException as error:
            walk.drain()
            self.failures.tell(error, f"{self.mesh.label} failed at {walk.position}")
            self._failed = self.mesh.several
            if self._failed:
                self.mesh.abort()
            self.failures.explain(error)
            if self.weight_store is not None:
                self.weight_store.enabled = False
                self.weight_store.clear()
            raise


@dataclass
class _Forward:
    """One microbatch on one stage, between its forward and its backward.

    Outputs keep their values until their backward, since a module may start it in its own way.
    """

    inputs: list[Tensor]
    labels: OptionalTensors = ()
    outputs: list[Tensor] = field(default_factory=list)
    differentiable: tuple[bool, ...] = ()
    loss: Tensor | None = None


class _Walk:
    """One step under way."""

    def __init__(self, whole: WholeModules, plan: Plan, batch: Batch, *, grad: bool) -> None:
        self.modules, self.boundary, self.batch, self.grad = whole.modules, whole.boundary, batch, grad
        self.weight_store, self.program = whole.weight_store, plan.program
        self.placement, self.rank = plan.program.placement, whole.boundary.rank
        self.nodes, self.last = plan.ranks[self.rank], self.placement.stages - 1
        self.position: Node | str = "its batch"
        pairs = [slot for slot in self.program.ranks[self.rank] if isinstance(slot, Pair)] if whole.overlapped else []
        self._forward_of: dict[_Run, _Run] = {
            (b.stage, b.microbatch): (f.stage, f.microbatch) for f, b in pairs
        }  # of a backward, the forward that runs it
        self._backward_of: dict[_Run, Node] = {
            self._forward_of[node.stage, node.microbatch]: node
            for node in self.nodes
            if node.kind is Kind.I and node.op is Op.DENSE and (node.stage, node.microbatch) in self._forward_of
        }
        self._split: set[_Run] = {(a.stage, a.microbatch) for a in self.program.actions(self.rank) if a.kind is Kind.I}
        self._forwards: dict[_Run, _Forward] = {}
        self._arriving: dict[_Chain, Flight[Tensors]] = {}
        self._folded: dict[_Chain, Tensors] = {}  # for the next stage on this rank, where a V turns
        self._leaving: dict[_Chain, tuple[Tensors, tuple[bool, ...]]] = {}
        self._sends: deque[Flight[None]] = deque()
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensors] = {}
        self._input_grads: dict[int, Tensors] = {}

    def play(self) -> None:
        """Play the nodes of this rank in order."""
        self._inputs, self._labels = self.batch.split(self.program, self.rank)
        self.boundary.begin(self.nodes, remember=self.grad)
        for node in self.nodes:
            self.position = node
            self._issue(node)
        while self._sends:
            self._sends.popleft().wait()
        left = [*self._forwards, *self._arriving, *self._folded, *self._leaving]
        assert not left, f"a step frees and passes on everything, but {left}"

    def ended(self) -> Ended:
        """Return the step's results at this rank's ends of the pipes, in the order of the microbatches."""
        return Ended(_in_order(self._losses), _in_order(self._outputs), _in_order(self._input_grads))

    def drain(self) -> None:
        """Give transfers under way a moment to end."""
        flights: list[Flight[Any]] = [*self._sends, *self._arriving.values()]
        for flight in flights:
            flight.drain(DRAIN_S)

    def _issue(self, node: Node) -> None:
        run = node.stage, node.microbatch
        if node.op is Op.RECEIVE:
            self._arriving[_chain(node)] = self.boundary.receive(node)
        elif node.op is Op.SEND:
            self._send(node)
        elif node.kind is Kind.W:
            if self.weight_store is not None and run in self._split:
                self.weight_store.pop()
        elif node.kind is Kind.I:
            if run not in self._forward_of:  # else it has run with its forward
                self._backward(node)
        elif run in self._backward_of:
            backward = self._backward_of[run]
            self.position = f"{node} with {backward}"
            self._pair(node, backward)
        else:
            self._forward(node)

    # ---------------------------------------------------------------------------------------------- between stages

    def _send(self, node: Node) -> None:
        while self._sends and self._sends[0].arrived:
            self._sends.popleft().wait()
        self._sends.append(self.boundary.send(node, *self._leaving.pop(_chain(node))))

    def _pass_on(self, node: Node, made: Tensors, differentiable: tuple[bool, ...]) -> None:
        """Keep a node's results for its SEND, or for the next stage if that is on this rank too."""
        stage, pipe = node.stage + (1 if node.kind is Kind.F else -1), self.placement.pipes[node.pipe]
        if not 0 <= stage < len(pipe):
            return
        made = tuple(t.detach() for t in made)
        if pipe[stage] == self.rank:
            leaves = tuple(t.requires_grad_(d) for t, d in zip(made, differentiable, strict=True))
            self._folded[node.kind, stage, node.microbatch] = leaves
        else:
            self._leaving[_chain(node)] = made, differentiable

    def _take(self, node: Node) -> Tensors:
        """Return a forward's tensors from the previous stage, or a backward's from the next stage."""
        chain = _chain(node)
        return self._folded.pop(chain) if chain in self._folded else self._arriving.pop(chain).wait()

    # ---------------------------------------------------------------------------------------------- compute

    def _begin(self, node: Node) -> _Forward:
        inputs = self._inputs.pop(node.microbatch) if node.stage == 0 else self._take(node)
        return _Forward(list(inputs), self._labels.pop(node.microbatch) if node.stage == self.last else ())

    def _forward(self, node: Node) -> None:
        run, criterion = self._begin(node), self.batch.criterion
        outputs = tensors(self.modules[node.stage](*run.inputs))
        loss = criterion(*outputs, *run.labels) if node.stage == self.last and criterion is not None else None
        self._finish_forward(node, run, outputs, loss)

    def _finish_forward(self, node: Node, run: _Forward, outputs: Any, loss: Tensor | None) -> None:
        if not outputs or not all(isinstance(t, Tensor) for t in outputs):
            name = type(self.modules[node.stage]).__name__
            what = ", ".join(type(t).__name__ for t in outputs) or "nothing"
            raise ValueError(f"{name} returns {what}; allowed: a tensor or a tuple of tensors")
        run.differentiable = tuple(t.requires_grad for t in outputs)
        if self.grad:
            self._forwards[node.stage, node.microbatch] = run
        if node.stage < self.last:
            run.outputs = list(outputs)
            self._pass_on(node, outputs, run.differentiable)
            return
        if self.batch.keep_outputs:
            self._outputs[node.microbatch] = tuple(t.detach() for t in outputs)
        if loss is not None:
            run.loss, self._losses[node.microbatch] = loss, loss.detach()

    def _backward(self, node: Node) -> None:
        run = self._forwards.pop((node.stage, node.microbatch))
        apart = self.weight_store if (node.stage, node.microbatch) in self._split else None
        loss, outputs, grads = self._roots(node, run)
        if apart is not None:
            apart.enabled = True
        if loss is not None:
            loss.backward()
        elif outputs:
            torch.autograd.backward(outputs, grads)
        if apart is not None:
            apart.enabled = False
            apart.flush()
        self._finish_backward(node, run)

    def _roots(self, node: Node, run: _Forward) -> tuple[Tensor | None, Tensors, Tensors]:
        """Return the loss, the outputs that need a gradient, and their gradients."""
        if node.stage == self.last:
            return run.loss, (), ()
        outputs = tuple(t for t, differs in zip(run.outputs, run.differentiable, strict=True) if differs)
        return None, outputs, self._take(node)

    def _finish_backward(self, node: Node, run: _Forward) -> None:
        wanted = [t for t in run.inputs if t.requires_grad]
        grads = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in wanted)
        self._pass_on(node, grads, (False,) * len(grads))
        if node.stage == 0 and wanted:
            self._input_grads[node.microbatch] = grads

    def _pair(self, forward: Node, backward: Node) -> None:
        """Run both members by the modules' own method, which takes tuples, as autograd's engine does."""
        run0, run1 = self._begin(forward), self._forwards.pop((backward.stage, backward.microbatch))
        module0, module1 = self.modules[forward.stage], self.modules[backward.stage]
        criterion0 = self.batch.criterion if forward.stage == self.last else None
        loss1, outputs1, grads1 = self._roots(backward, run1)
        outputs0, loss0 = type(module0).overlapped_forward_backward(  # type: ignore[attr-defined]  # the protocol's
            module0, run0.inputs, criterion0, run0.labels, module1, loss1, outputs1, grads1
        )
        self._finish_forward(forward, run0, tensors(outputs0), loss0)
        self._finish_backward(backward, run1)


def _members_in_turn(slots: tuple[Slot, ...], nodes: tuple[Node, ...], *, backward_first: bool) -> tuple[Node, ...]:
    """Return a rank's serial order with the forward of each pair first, then its backward, then the sends of both.

    All ranks have this order, whether they overlap pairs or not; sends keep their order, so receives do too. On a
    device receives move, see :func:`with_rendezvous`. A pair runs at its forward, and needs what both members receive:
    with ``backward_first`` it is the later member.
    """
    slot_of: dict[tuple[Kind, int, int, int], int] = {}
    for index, slot in enumerate(slots):
        for action in actions_of(slot):
            for kind in (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,):
                slot_of[kind, action.stage, action.microbatch, action.pipe] = index
    parts: list[list[Node]] = [[] for _ in slots]
    receives: list[Node] = []  # they stay ahead of the node before which they stand, of any slot
    for node in nodes:
        receives.append(node)
        if node.op is not Op.RECEIVE:
            parts[slot_of[node.kind, node.stage, node.microbatch, node.pipe]] += receives
            receives.clear()

    def turn(node: Node) -> int:
        """Return where a node comes in its slot: receives, first member, second member, sends."""
        if node.op in (Op.RECEIVE, Op.SEND):
            return 0 if node.op is Op.RECEIVE else 3
        return 1 if (node.kind is Kind.F) != backward_first else 2

    return tuple(chain.from_iterable(sorted(part, key=turn) for part in parts))


def _in_order(made: Mapping[int, T]) -> list[T]:
    return [value for _, value in sorted(made.items())]


def _chain(node: Node) -> _Chain:
    return node.kind, node.stage, node.microbatch
