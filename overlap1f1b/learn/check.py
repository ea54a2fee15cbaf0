"""Compare the first step of every plan with a plain loop over the same batch: one microbatch after another.

Gradients of any order are equal to the loop's to the bit. So a forward that keeps state where the engine does
not look, and finds another microbatch's there, is noticed on the user's own model and data.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.cut.bits import is_plain, local_part, sum_of_bits
from overlap1f1b.cut.buffers import version_of
from overlap1f1b.cut.places import places
from overlap1f1b.cut.stage import Stage, parameters_of
from overlap1f1b.learn.undo import Undo
from overlap1f1b.plan import Node, Plan
from overlap1f1b.play.microbatch import Microbatch
from overlap1f1b.play.player import Player
from overlap1f1b.play.result import PlayedStep
from overlap1f1b.reduce.fsdp import Sharding
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.mesh import Mesh

ROUNDING = 1e-6
"""Largest difference of gradients whose sums have another order, as a part of the largest entry."""
SMALL = 1e-4
"""Largest entry of a gradient, as a part of the largest of all, below which it may be nothing but rounding."""
NOISE = 4.0
"""Largest difference from a plain loop, as a multiple of that of two loops."""
RANDOM = 0.05
"""Difference of two loops, as a part of a tensor's largest entry, above which nothing can be compared."""
ALLOWED = (
    "allowed: an input or output of the block in its place, an attribute of a module of the block, "
    "o1.carried(block, holder), overlap='serial' with schedule 'sequential', or verify=False"
)

_MOST = 4  # places that a message names

PlayNodes = Callable[[Plan], PlayedStep]
Outcome = Iterator[tuple[str, Tensor]]
Tables = Callable[[], Iterable[MutableMapping[Any, Any]]]
_Look = tuple[tuple[Any, ...], list[int]]
"""A value and what it holds, and how often tensors among them have changed."""


class VerificationError(RuntimeError):
    """A step differs from a plain loop over its microbatches; gradients are as before it."""


class Verification:
    """Compares a step with a plain loop.

    Attributes:
        tables: Returns tables beside the model that a step changes, such as the losses that a framework logs.
    """

    def __init__(self, stages: Mapping[int, Stage], mesh: Mesh, player: Player, sharding: Sharding) -> None:
        self._stages, self._mesh, self._player, self._sharding = stages, mesh, player, sharding
        self.tables: Tables = tuple

    def play(self, plan: Plan, twin: Plan, play_nodes: PlayNodes, observe: Callable[[Any], None]) -> PlayedStep:
        """Play a step of a plan for the first time; return it if it is equal to the loop's.

        Side effects are those of one step. Where something outside the engine sums gradients while a step lasts, the
        step is played once more, since it can be compared only without these sums.

        Args:
            plan: Plan of the step.
            twin: Plan of one microbatch after another.
            play_nodes: Plays the batch by a plan.
            observe: Lets a recorder follow, or nobody.

        Raises:
            VerificationError: It differs, or two loops differ.
        """
        undo, weights = self.undo(), self._weights()

        def rehearse(order: Plan) -> PlayedStep:
            """Play without a recorder, and without what stands around nodes."""
            recorder, around = self._player.recorder, self._player.around
            observe(None)
            self._player.around = None
            try:
                return play_nodes(order)
            finally:
                observe(recorder)
                self._player.around = around

        serial = _bits(self._outcome(rehearse(twin)))
        mine = next((name for name, bits in self._weights().items() if bits != weights[name]), None)
        first = next(filter(None, self._mesh.every(mine).values()), None)
        undo()
        if first is not None:
            raise VerificationError(
                f"{first} changes inside a step, as by an optimizer in the backward, so no step can be compared with "
                "it; allowed: verify=False, on a model that no step has changed"
            )
        summed_outside = self._player.around is not None
        played = (rehearse if summed_outside else play_nodes)(plan)
        differs = self._mesh.sums(_bits(self._outcome(played)) != serial)[0]
        if differs:
            self._judge(plan, twin, rehearse, undo, serial)
        elif not summed_outside:
            return played
        undo()
        return play_nodes(plan)

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

    def undo(self) -> Undo:
        """Return what takes a step back that is played from now on."""
        stages = self._stages.values()
        states = [state for stage in stages for state in stage.attributes]
        places = {number: place for state in states for number, place in state.places.items()}
        return Undo(
            gradients=((owner, attribute) for _, owner, attribute in self._gradients()),
            tables=[*(place.table for place in places.values() if not place.shared), *self.tables()],
            shared=[(number, place.table) for number, place in places.items() if place.shared],
            known=lambda: {key for state in states for key in state.known},
            generators=dict.fromkeys(generator for stage in stages for generator in stage.generators),
        )

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
        """Return the bits of all parameters, by name."""
        held = ((f"{name} of {where}", parameter) for name, where, parameter, _ in parameters_of(self._stages))
        return _bits((name, parameter) for name, parameter in held if is_plain(local_part(parameter)))

    def _judge(self, plan: Plan, twin: Plan, rehearse: PlayNodes, undo: Undo, before: Mapping[str, int]) -> None:
        """Find out why a step differs; return if it does so by no more than loops do. All ranks must call this.

        ``before`` is the outcome of the loop that it was compared with.

        Raises:
            VerificationError: It differs by more.
        """
        # 1. Two loops, the second with other numbers of Python's and NumPy's generators; then the plan's order.
        undo()
        copies, seen = list[dict[str, Tensor]](), list[Witness]()
        for order in (twin, twin, plan):
            with Witness(self._stages, self._player) as witness:
                copies.append(
                    {name: local_part(tensor).to("cpu", copy=True) for name, tensor in self._outcome(rehearse(order))}
                )
            seen.append(witness)
            undo(global_random=order is plan)
        # 2. Loops may differ; then a step may differ as much.
        spread, apart = _apart(copies[0], copies[1]), _apart(copies[0], copies[2])
        of_loop, by = self._largest(spread), self._largest(apart)
        noisy = all(by <= NOISE * spread.get(name, 0.0) + ROUNDING for name, by in apart.items())
        if of_loop > RANDOM:
            name = max(spread, key=spread.__getitem__, default="")
            largest = spread.get(name, 0.0)
            raise self._error(
                (-largest,),
                f"two plain loops over one batch differ, {name} by {largest:.2g} of its largest entry; allowed: random "
                "numbers from torch's generators alone, torch.use_deterministic_algorithms(True), or verify=False",
            )
        # Where all that nodes hand on is equal, only sums have another order, as of a weight with several gradients.
        nodes, bits, other = enumerate(twin.ranks[self._mesh.rank("pp")]), seen[0].bits, seen[2].bits
        first = next(((at, node) for at, node in nodes if bits.get(node) != other.get(node)), None)
        rounded = all(by <= (ROUNDING if "grad of " in name else 0.0) for name, by in apart.items())
        resummed = not self._mesh.sums(first is not None or not rounded)[0]
        # The loop before them may differ from both, as where blocks were compiled in it.
        warmed = self._mesh.sums(_bits(iter(copies[0].items())) != before)[0]
        if (by or warmed) and (resummed or (of_loop and not self._mesh.sums(not noisy)[0])):
            return
        # 3. The first difference on any rank.
        raise self._error(*self._difference(plan, first, apart, seen[2]))

    def _largest(self, apart: Mapping[str, float]) -> float:
        return max(self._mesh.every(max(apart.values(), default=0.0)).values())

    def _error(self, when: tuple[float, ...], text: str) -> VerificationError:
        """Return the error of the rank whose difference comes first. All ranks must call this."""
        return VerificationError(min(self._mesh.every((when, text)).values())[1])

    def _difference(
        self, plan: Plan, first: tuple[int, Node] | None, apart: Mapping[str, float], found: Witness
    ) -> tuple[tuple[float, ...], str]:
        """Return the place in the loop of the first difference on this rank, and a text."""
        names, where = [name for name, by in apart.items() if by], ""
        when: tuple[float, ...] = (math.inf,)
        if first is not None:
            at, node = first
            back, place = node.kind is not Kind.F, f"{self._stages[node.stage].names[node.block]} of stage {node.stage}"
            when = (node.microbatch, back, -node.stage if back else node.stage, at)
            names.sort(key=lambda name: place not in name)  # those of this block first
            where = f"first in {node.name} of {place}, microbatch {node.microbatch}: "
        by = f"{names[0]} by {apart[names[0]]:.2g} of its largest entry" if names else "not the same in each play"
        changed = list(found.changed)
        more = f" and {len(changed) - _MOST} more" if len(changed) > _MOST else ""
        meanwhile = f"; changed by another microbatch meanwhile: {', '.join(changed[:_MOST])}{more}" if changed else ""
        what = f"{plan.program.name} with overlap {plan.order}"
        return when, f"{what} differs from a plain loop, {where}{by}{meanwhile}; {ALLOWED}"


def _bits(outcome: Outcome) -> dict[str, int]:
    sums = {name: sum_of_bits(tensor, ordered=True) for name, tensor in outcome}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def _apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor, as a part of its largest entry; small gradients count as larger."""
    wide = {name: [_wide(tensors.get(name)) for tensors in (one, other)] for name in dict.fromkeys((*one, *other))}
    largest = {name: _largest(a) for name, (a, _) in wide.items()}
    least = SMALL * max((of for name, of in largest.items() if "grad of " in name), default=0.0)
    found = {}
    for name, (a, b) in wide.items():
        if a is None or b is None or a.shape != b.shape:
            found[name] = math.inf
        elif torch.equal(a.nan_to_num(), b.nan_to_num()):
            found[name] = 0.0
        else:
            by = _largest(a - b) / (max(least, largest[name]) if "grad of " in name else largest[name] or 1.0)
            found[name] = math.inf if math.isnan(by) else by
    return found


def _wide(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _largest(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().max())


class Witness:
    """Notes, inside its context, what every compute node hands on, and what others change between a microbatch's nodes.

    Attributes:
        bits: Sum over the bits of all that a compute node has handed on, once the context has ended.
        changed: Places that microbatches have changed under each other, the first ones first.
    """

    def __init__(self, stages: Mapping[int, Stage], player: Player) -> None:
        self._stages, self._player = stages, player
        self.bits: dict[Node, int] = {}
        self.changed: dict[str, None] = {}
        self._sums: dict[Node, Tensor] = {}
        self._left: dict[tuple[int, int], dict[str, _Look]] = {}  # by a microbatch in the places that it has changed

    def __enter__(self) -> Witness:
        self._compute, self._player.compute = self._player.compute, self._watched
        return self

    def __exit__(self, *_: object) -> None:
        self._player.compute = self._compute
        self.bits = {node: int(bits) for node, bits in self._sums.items()}
        self._sums, self._left = {}, {}

    def _watched(self, node: Node, microbatch: Microbatch, received: Mapping[Any, Any]) -> None:
        if node.kind is not Kind.F:
            self._compute(node, microbatch, received)
        else:
            left = self._left.setdefault((node.stage, node.microbatch), {})
            before = self._values(node)
            for name, value in left.items():
                if name in before and not _same(before[name], value):
                    self.changed[name] = None
            self._compute(node, microbatch, received)
            for name, value in self._values(node).items():
                if name in left or name not in before or not _same(before[name], value):
                    left[name] = value
        sums = [sum_of_bits(tensor, ordered=True) for tensor in _handed_on(node, microbatch)]
        if sums:
            self._sums[node] = torch.stack(sums).sum()

    def _values(self, node: Node) -> dict[str, _Look]:
        """Return the values of all places that are not carried, of the blocks of a stage."""
        stage = self._stages[node.stage]
        known = {key for state in stage.attributes for key in state.known}  # blocks share classes and files
        return {
            name: _look(value)
            for block, where in zip(stage.blocks, stage.names, strict=True)
            for name, value in places(block, where, known)
        }


def _look(value: Any) -> _Look:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | set | deque) else ()
    parts = (value, *inside)
    return parts, [version_of(part) for part in parts if isinstance(part, Tensor)]


def _same(one: _Look, other: _Look) -> bool:
    """Return whether nothing has changed between two looks at a place."""
    if len(one[0]) != len(other[0]) or one[1] != other[1]:
        return False
    plain = int, float, str, bytes
    pairs = zip(one[0], other[0], strict=True)
    return all(a is b or (isinstance(a, plain) and isinstance(b, plain) and a == b) for a, b in pairs)


def _handed_on(node: Node, microbatch: Microbatch) -> Iterator[Tensor]:
    """Yield what a compute node has left for the next one: rows to send, activations, or gradients."""
    if node.kind is Kind.W or microbatch.finished:
        return
    run = microbatch.runs.get(node.block)
    for sent in () if run is None else run.sent.values():
        rows = sent.rows if isinstance(sent.rows, tuple | list) else (sent.rows,)
        yield from (tensor for tensor in rows if isinstance(tensor, Tensor))
    forward = (microbatch.activations, microbatch.outputs)
    for tensors in forward if node.kind is Kind.F else (microbatch.output_grads, microbatch.input_grads):
        yield from (tensor for tensor in tensors or () if tensor is not None)
