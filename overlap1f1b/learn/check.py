"""Compare the first step of a plan with a plain loop over the same batch: one microbatch after another.

A forward may keep state where the engine does not look, and find another microbatch's there. This comparison shows it,
on the user's own model and data. :meth:`Verification.play` leaves what one step leaves; if it raises, what there was
before:

    loop = bits of what the loop leaves;  undo
    step = bits of what the plan leaves;  equal on all ranks: this was the step
    undo;  play the loop twice more, with an undo after each
    these two differ: warn that nothing can be compared, and play the step once more
    the step has left what they have, up to rounding of gradients: play it once more
    else play it once more, look which places microbatches change under each other, undo, and name what differs

Gradients may differ by :data:`ROUNDING`, since their sums may have another order: those of a weight with several
gradients. Two loops differ by atomics of a GPU, or by random numbers that are not torch's.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.cut.bits import is_plain, local_part, sum_of_bits
from overlap1f1b.cut.buffers import version_of
from overlap1f1b.cut.places import places
from overlap1f1b.cut.stage import Stage, parameters_of
from overlap1f1b.learn.undo import Undo
from overlap1f1b.plan import Node, Place, Plan, Resource
from overlap1f1b.play.observers import Observer
from overlap1f1b.play.step import PlayedStep, Step
from overlap1f1b.reduce.fsdp import Sharding
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.mesh import Mesh

ROUNDING = 1e-6
"""Largest difference of gradients whose sums have another order, as a part of the largest entry."""
ALLOWED = (
    "allowed: an input or output of the block in its place, an attribute of a module of the block, "
    "o1.carried(block, holder), overlap='serial' with schedule 'sequential', or verify=False"
)

_MOST = 4  # places that a message names

Rehearse = Callable[..., PlayedStep]
"""Plays a plan, with some more observers."""
Outcome = Iterator[tuple[str, Tensor]]
Copies = dict[str, Tensor]
Tables = Callable[[], Iterable[MutableMapping[Any, Any]]]
_Look = tuple[list[Any], tuple[Any, ...]]
"""What tells whether a value, or what it holds, has changed; and these, so that no other object gets their numbers."""


class VerificationError(RuntimeError):
    """A step differs from a plain loop over its microbatches; gradients are as before it."""


class Verification:
    """Compares a step with a plain loop, and what both change in ``tables`` beside the model, such as logged losses."""

    def __init__(self, stages: Mapping[int, Stage], mesh: Mesh, sharding: Sharding, tables: Tables = tuple) -> None:
        self._stages, self._mesh, self._sharding = stages, mesh, sharding
        self._tables = [tables]

    def watch(self, tables: Tables) -> None:
        """Take back what a step changes in tables, too."""
        self._tables.append(tables)

    def play(self, step: Step, twin: Plan) -> PlayedStep:
        """Play a step for the first time; return it if it leaves what the loop ``twin`` does, else VerificationError.

        Side effects are those of one step. Where something outside the engine sums gradients while a step lasts, the
        step is played once more, since it can be compared only without these sums. A parameter that changes is an
        error, too.
        """
        places = ((owner, attribute) for _, owner, attribute in self._gradients())
        tables = chain.from_iterable(tables() for tables in self._tables)
        undo, weights = Undo(self._stages.values(), places, tables), self._weights()

        def rehearse(order: Plan, *more: Observer) -> PlayedStep:
            """Play with those alone who look on at rehearsals."""
            return replace(step, plan=order, observers=(*filter(attrgetter("rehearses"), step.observers), *more)).run()

        loop = _bits(self._outcome(rehearse(twin)))
        changed = self._first(name for name, bits in self._weights().items() if bits != weights[name])
        undo()
        if changed is not None:
            raise VerificationError(
                f"{changed} changes inside a step, as by an optimizer in the backward, so no step can be compared with "
                "it; allowed: verify=False, on a model that no step has changed"
            )
        summed_outside = any(one.acts for one in step.observers)
        played = rehearse(step.plan) if summed_outside else step.run()
        if self._mesh.sums(_bits(self._outcome(played)) != loop)[0]:
            left = _copies(self._outcome(played))
            undo()
            self._judge(step.plan, twin, left, rehearse, undo)
        elif not summed_outside:
            return played
        undo()
        return step.run()

    def _judge(self, plan: Plan, twin: Plan, left: Copies, rehearse: Rehearse, undo: Undo) -> None:
        """Raise VerificationError for a difference that two more loops lack: the first may have compiled blocks."""
        # 1. Whether loops repeat themselves; the second draws other numbers from Python's and NumPy's generators.
        once = _bits(self._outcome(rehearse(twin)))
        undo(global_random=False)
        loop = _copies(self._outcome(rehearse(twin)))
        undo()
        again = _bits(iter(loop.items()))
        if noisy := self._first(name for name in once | again if once.get(name) != again.get(name)):
            warnings.warn(
                f"two plain loops over one batch differ in {noisy}: no step can be compared with them; allowed: "
                "torch.use_deterministic_algorithms(True), random numbers of torch's generators alone, or verify=False",
                stacklevel=2,
            )
            return
        # 2. How far the step is from them.
        apart = ((name, _apart(loop.get(name), left.get(name))) for name in loop | left)
        difference = self._first(
            f"{name} by {by:.2g} of its largest entry"
            for name, by in apart
            if by > (ROUNDING if "grad of " in name else 0.0)
        )
        if difference is None:
            return
        # 3. Why.
        changed = ChangedPlaces(self._stages)
        rehearse(plan, changed)
        undo()
        found = list(dict.fromkeys(chain.from_iterable(self._mesh.every(list(changed.names)).values())))
        more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
        meanwhile = f"; changed by another microbatch meanwhile: {', '.join(found[:_MOST])}{more}" if found else ""
        what = f"{plan.program.name} with overlap {plan.order}"
        raise VerificationError(f"{what} differs from a plain loop, {difference}{meanwhile}; {ALLOWED}")

    def _first(self, names: Iterable[str]) -> str | None:
        """Return the first name of the first rank that has one. All ranks must call this."""
        return next(filter(None, self._mesh.every(next(iter(names), None)).values()), None)

    def _gradients(self) -> Iterator[tuple[str, Any, str]]:
        """Yield a name for every gradient, the object that has it, and the name of its attribute."""
        named: dict[nn.Parameter, str] = {}
        for name, where, parameter, _ in parameters_of(self._stages):
            named.setdefault(parameter, f"{name} of {where}")
        for parameter, name in named.items():
            for attribute in ("grad", "main_grad"):
                yield f"the {attribute} of {name}", parameter, attribute
        for number, (owner, attribute) in enumerate(self._sharding.unreduced()):
            yield f"{attribute} {number} of FSDP2", owner, attribute

    def _outcome(self, played: PlayedStep) -> Outcome:
        """Yield what a step has left, by name: gradients, buffers and losses."""
        stages = ({p for block in stage.blocks for p in block.parameters()} for stage in self._stages.values())
        held = Counter(chain.from_iterable(stages))
        for name, owner, attribute in self._gradients():
            # Beside a gradient in main_grad hooks get one of no meaning.
            elsewhere = attribute == "grad" and getattr(owner, "grad_added_to_main_grad", False)
            # Stages of one rank that share a parameter add to it in the order of the plan.
            resummed = isinstance(owner, nn.Parameter) and held[owner] > 1
            grad = None if elsewhere or resummed else getattr(owner, attribute, None)
            if grad is not None:
                yield name, grad
        for number, stage in self._stages.items():
            for block, where in zip(stage.blocks, stage.names, strict=True):
                for name, buffer in block.named_buffers():
                    if is_plain(local_part(buffer)):
                        yield f"the buffer {name} of {where} of stage {number}", buffer
        for at, loss in enumerate(played.result.losses):
            yield f"loss {at}", loss

    def _weights(self) -> dict[str, int]:
        held = ((f"{name} of {where}", parameter) for name, where, parameter, _ in parameters_of(self._stages))
        return _bits((name, parameter) for name, parameter in held if is_plain(local_part(parameter)))


def _bits(outcome: Outcome) -> dict[str, int]:
    sums = {name: sum_of_bits(tensor, ordered=True) for name, tensor in outcome}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def _copies(outcome: Outcome) -> Copies:
    return {name: local_part(tensor).to("cpu", copy=True) for name, tensor in outcome}


def _apart(one: Tensor | None, other: Tensor | None) -> float:
    """Return the largest difference of two tensors as a part of the largest entry of the first."""
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    a, b = (tensor.to_dense().to(torch.complex128) for tensor in (one, other))
    if torch.equal(a.nan_to_num(), b.nan_to_num()):
        return 0.0
    by = float((a - b).abs().max()) / (float(a.abs().max()) or 1.0)
    return math.inf if math.isnan(by) else by


class ChangedPlaces(Observer):
    """Notes the ``names`` of places that other microbatches change between two nodes of a microbatch's forward."""

    keeps_order = True

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self.names: dict[str, None] = {}
        self._before: dict[str, _Look] = {}  # at the begin of the running node
        self._left: dict[tuple[int, int], dict[str, _Look]] = {}  # by a microbatch in the places that it has changed

    def ready(self, node: Node, received: Mapping[Place, Any]) -> None:
        """Look at the places before a node of a forward."""
        if _is_forward(node):
            self._before = self._values(node)
            for name, value in self._left.get((node.stage, node.microbatch), {}).items():
                if name in self._before and self._before[name][0] != value[0]:
                    self.names[name] = None

    def after(self, node: Node) -> None:
        """Note what the node has left in places that its microbatch has changed."""
        if _is_forward(node):
            left, before = self._left.setdefault((node.stage, node.microbatch), {}), self._before
            for name, value in self._values(node).items():
                if name in left or name not in before or before[name][0] != value[0]:
                    left[name] = value

    def _values(self, node: Node) -> dict[str, _Look]:
        """Return the values of all places that are not carried, of the blocks of a stage."""
        stage = self._stages[node.stage]
        known = {key for inside in stage.inside for key in inside.places.changing}  # blocks share classes and files
        return {
            name: _look(value)
            for block, where in zip(stage.blocks, stage.names, strict=True)
            for name, value in places(block, where, known)
        }


def _is_forward(node: Node) -> bool:
    return node.kind is Kind.F and node.resource is Resource.COMPUTE


def _look(value: Any) -> _Look:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | set | deque) else ()
    parts = (value, *inside)
    plain = int, float, str, bytes
    versions = [version_of(part) if isinstance(part, Tensor) else 0 for part in parts]
    return [part if isinstance(part, plain) else id(part) for part in parts] + versions, parts
