"""Modules that run whole: by plain autograd, and by their own function for pairs; an engine plays everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from overlap1f1b.engine import Engine, MicrobatchBlock
from overlap1f1b.engine.graph.autograd import WeightQueue
from overlap1f1b.engine.play.player import MicrobatchKey, compute
from overlap1f1b.engine.run.microbatch import Microbatch, OptionalTensors, Tensors, tensors
from overlap1f1b.integrations.dualpipe.batch import Labelled
from overlap1f1b.plan import Node, NodeCosts, Op, Place, Plan, compile
from overlap1f1b.schedule import Kind, Pair, Program, Slot, actions_of


class WeightStore(Protocol):
    """A queue of deferred weight gradients, like the ``WeightGradStore`` of DualPipe."""

    enabled: bool

    def flush(self) -> None:
        """Close the group of weight gradients that were deferred since the last call."""

    def pop(self) -> object:
        """Compute the oldest group, and add its gradients."""

    def clear(self) -> None:
        """Drop all groups."""


class StandIn(MicrobatchBlock):
    """The block of a module that runs whole: its parameter tells the engine a device, and it has nothing to cut."""

    delays = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.empty(0, device=device))


@dataclass
class _Run:
    """One microbatch in one module, between its forward and its backward.

    Outputs keep their values until their backward, since a module may start it in its own way.
    """

    inputs: list[Tensor]
    outputs: Tensors  # that will get a gradient
    loss: Tensor | None

    def stop(self) -> None:
        """Do nothing: no forward is suspended."""


class WholeModules:
    """The compute nodes of modules that run whole, and the plan of an engine whose blocks are their stand-ins.

    Args:
        engine: Its stages are a :class:`StandIn` each.
        modules: The modules, by the number of their stage.
        overlapped: Whether pairs are given to ``type(module).overlapped_forward_backward``.
        weight_store: Queue to which the modules defer weight gradients, for the program's W.
    """

    def __init__(
        self, engine: Engine, modules: Mapping[int, nn.Module], *, overlapped: bool, weight_store: WeightStore | None
    ) -> None:
        self.modules, self.weight_store, self._engine, self._overlapped = modules, weight_store, engine, overlapped
        self._begun: dict[MicrobatchKey, Microbatch] = {}  # between forward and backward
        self._anchor = next(engine.parameters())
        engine.player.compute = self.compute
        engine.player.autocasts_backward = True  # modules may have backwards of their own, which products of them need

    def turn_to(self, program: Program) -> None:
        """Play this program of the engine's from the next step on."""
        rank = self._engine.rank
        pairs = [slot for slot in program.ranks[rank] if isinstance(slot, Pair)] if self._overlapped else []
        self._backward_of: dict[MicrobatchKey, MicrobatchKey] = {
            (f.stage, f.microbatch): (b.stage, b.microbatch) for f, b in pairs
        }  # of a forward, the backward that it runs
        self._paired = set(self._backward_of.values())
        self._split = {(a.stage, a.microbatch) for a in program.actions(rank) if a.kind is Kind.I}
        self._engine.plan = _plan(self._engine)

    def forget(self) -> None:
        """Drop the microbatches of a step that has failed, and what it has left in the store of weight gradients."""
        self._begun.clear()
        if self.weight_store is not None:
            self.weight_store.enabled = False
            self.weight_store.clear()

    def compute(self, node: Node, microbatch: Microbatch, received: Mapping[Place, Any]) -> None:
        """Carry out a compute node; the forward of an overlapped pair runs its backward, too."""
        key = node.stage, node.microbatch
        with torch.set_grad_enabled(microbatch.grad):
            if node.kind is Kind.W:
                compute(node, microbatch, received)
            elif node.kind is Kind.I:
                if key not in self._paired:
                    self._backward(node.stage, self._begun.pop(key))
            elif microbatch.grad and key in self._backward_of:
                backward = self._backward_of[key]
                self._pair(node.stage, microbatch, backward[0], self._begun.pop(backward))
            else:
                self._forward(node.stage, microbatch)
            if node.kind is Kind.F and microbatch.grad:
                self._begun[key] = microbatch

    def _forward(self, stage: int, microbatch: Microbatch) -> None:
        inputs, loss_fn = list(microbatch.take_activations()), microbatch.loss_fn
        outputs = tensors(self.modules[stage](*inputs))
        self._finish_forward(stage, microbatch, inputs, outputs, None if loss_fn is None else loss_fn(*outputs))

    def _finish_forward(
        self, stage: int, microbatch: Microbatch, inputs: list[Tensor], outputs: Any, loss: Tensor | None
    ) -> None:
        if not outputs or not all(isinstance(t, Tensor) for t in outputs):
            name = type(self.modules[stage]).__name__
            what = ", ".join(type(t).__name__ for t in outputs) or "nothing"
            raise ValueError(f"{name} returns {what}; allowed: a tensor or a tuple of tensors")
        if microbatch.return_outputs and loss is not None:
            microbatch.kept = tuple(t.detach() for t in outputs)
        microbatch.requires_grad = tuple(t.requires_grad for t in outputs)
        microbatch.outputs = tuple(t.detach() for t in (outputs if loss is None else (loss,)))
        microbatch.forwarded, microbatch.ended = True, not microbatch.grad
        if microbatch.grad:
            rooted = () if loss is not None else tuple(t for t in outputs if t.requires_grad)
            microbatch.runs[0] = _Run(inputs, rooted, loss)

    def _backward(self, stage: int, microbatch: Microbatch) -> None:
        run, grads = self._roots(microbatch)
        apart = self.weight_store if (stage, microbatch.index) in self._split else None
        if apart is not None:
            apart.enabled = True
        if run.loss is not None:
            run.loss.backward()
        elif run.outputs:
            torch.autograd.backward(run.outputs, grads)
        if apart is not None:
            apart.enabled = False
            apart.flush()
        self._finish_backward(microbatch, run, apart)

    def _roots(self, microbatch: Microbatch) -> tuple[_Run, Tensors]:
        """Return the run of a microbatch, and the gradients of the outputs that need one."""
        run: Any = microbatch.runs.pop(0)
        grads: OptionalTensors = () if run.loss is not None else microbatch.take_output_grads()
        return run, tuple(grad for grad in grads if grad is not None)

    def _finish_backward(self, microbatch: Microbatch, run: _Run, apart: WeightStore | None) -> None:
        grads = (torch.zeros_like(t) if t.grad is None and t.requires_grad else t.grad for t in run.inputs)
        microbatch.input_grads, microbatch.ended = tuple(grads), True
        queue = microbatch.queues[Op.DENSE, 0, 0] = WeightQueue()
        if apart is not None:
            queue.put(self._anchor, partial(_pop, apart))

    def _pair(self, stage0: int, forward: Microbatch, stage1: int, backward: Microbatch) -> None:
        """Run both members by the modules' own method, which takes tuples, as autograd's engine does."""
        backward.await_input(Kind.I, {})
        inputs0, (run1, grads1) = list(forward.take_activations()), self._roots(backward)
        module0, module1 = self.modules[stage0], self.modules[stage1]
        criterion0, labels0 = forward.loss_fn if isinstance(forward.loss_fn, Labelled) else (None, ())
        outputs0, loss0 = type(module0).overlapped_forward_backward(  # type: ignore[attr-defined]  # the protocol's
            module0, inputs0, criterion0, labels0, module1, run1.loss, run1.outputs, grads1
        )
        self._finish_forward(stage0, forward, inputs0, tensors(outputs0), loss0)
        self._finish_backward(backward, run1, None)


def _pop(store: WeightStore) -> None:
    """Compute the oldest group; what the store returns is no gradient for the engine to add."""
    store.pop()


def _plan(engine: Engine) -> Plan:
    """Return the actions one after another; the members of a pair run together, between the transfers of both."""
    plan = compile(engine.program, engine.shapes, NodeCosts(), "serial")
    blocking = engine.mesh.several and not engine.boundary.posts_ahead
    both = zip(engine.program.ranks, plan.ranks, strict=True)
    return replace(plan, ranks=tuple(_members_in_turn(*each, backward_first=blocking) for each in both))


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
        """Return where a node comes in its slot: receives, first member, second member, weight gradients, sends."""
        if node.op in (Op.RECEIVE, Op.SEND):
            return 0 if node.op is Op.RECEIVE else 4
        if node.kind is Kind.W:
            return 3
        return 1 if (node.kind is Kind.F) != backward_first else 2

    return tuple(chain.from_iterable(sorted(part, key=turn) for part in parts))
