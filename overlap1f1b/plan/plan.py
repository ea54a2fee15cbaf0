"""A plan: every node of a step on every rank, in issue order."""

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Literal, Self, cast

from overlap1f1b.plan.node import Node, Op, Resource, StageShape
from overlap1f1b.plan.turn import Plain, Turns, turns_of
from overlap1f1b.schedule import Action, Kind, Program

MOST_TURNS = 8
"""How many lists of turns a plan keeps: one for each state of what is known of the blocks."""

SEARCHED_FROM = 3
"""Open actions from which on an order is searched for within the limits of memory alone."""

Overlap = Literal["serial", "pairs"] | int
"""Degree of interleaving: none, inside a program's pairs, or k consecutive actions at a time."""


@dataclass(frozen=True)
class Plan:
    """The nodes of a step in issue order on every pipeline rank; ranks that share a collective share a plan.

    Args:
        program: The program that the plan carries out.
        overlap: The setting for which it was compiled.
        order: Name of the candidate: ``serial``, ``pairs``, ``k=…``, or ``k=…, lighter``, which was found to hold less.
        shapes: Blocks of each stage.
        ranks: ``ranks[r]`` has every node of the step on rank ``r``, in issue order.
        predicted: Makespan by the costs of the compilation, in their unit.
        peak_bytes: Most bytes that each pipeline rank holds at once, by these costs, beyond those before the step;
            empty if they have none.
    """

    program: Program
    overlap: Overlap
    order: str
    shapes: tuple[StageShape, ...]
    ranks: tuple[tuple[Node, ...], ...]
    predicted: float
    peak_bytes: tuple[float, ...] = ()

    def fits(self, rooms: Sequence[float]) -> bool:
        """Return whether every pipeline rank keeps within its room, in bytes; by no rooms each does."""
        return all(peak <= room for peak, room in zip(self.peak_bytes, rooms, strict=False))

    def memory(self) -> float:
        """Return the most bytes that a rank holds; if none are counted, (stage, microbatch) with activations."""
        return max(self.peak_bytes, default=float(self.peak_held))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the only rank."""
        (nodes,) = self.ranks
        return nodes

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the order of nodes: ranks with different fingerprints would wait for each other forever."""
        lines = (" ".join(map(str, nodes)) for nodes in self.ranks)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def turns(self, rank: int, plain: Mapping[int, Plain]) -> Turns:
        """Return what a rank plays in turn, made once; ``plain`` has the blocks of each stage that may be one call."""
        key = rank, tuple(plain.items())
        if key not in self._turns:
            if len(self._turns) >= MOST_TURNS:
                self._turns.clear()
            self._turns[key] = turns_of(self.ranks[rank], plain)
        return self._turns[key]

    @cached_property
    def _turns(self) -> dict[Hashable, Turns]:
        return {}

    @cached_property
    def offloads(self) -> Mapping[int, frozenset[tuple[int, int]]]:
        """Microbatch and block of the activations of each stage that leave to host memory."""
        found: dict[int, set[tuple[int, int]]] = {}
        for node in chain.from_iterable(self.ranks):
            if node.op is Op.OFFLOAD:
                found.setdefault(node.stage, set()).add((node.microbatch, node.block))
        return {stage: frozenset(places) for stage, places in found.items()}

    def without_reductions(self) -> Self:
        """Return the same order without reductions over ranks."""
        shapes = tuple(tuple(block._replace(reduced=False) for block in shape) for shape in self.shapes)
        ranks = tuple(tuple(node for node in nodes if node.op is not Op.REDUCE) for nodes in self.ranks)
        return replace(self, shapes=shapes, ranks=ranks)

    def gathered(self, rank: int) -> int:
        """Return the most blocks of a rank whose parameters are gathered at once; 0 if no node gathers any."""
        now = accumulate((node.op is Op.GATHER) - (node.op is Op.RELEASE) for node in self.ranks[rank])
        return max(now, default=0)

    @property
    def peak_held(self) -> int:
        """Peak number of (stage, microbatch) between forward and last weight gradient, over all ranks."""
        return max(map(self.held, range(len(self.ranks))))

    def live(self, rank: int) -> int:
        """Return the peak number of (stage, microbatch) of a rank between forward and end of backward."""
        return self._peak(rank, Kind.I)

    def held(self, rank: int) -> int:
        """Return the peak number of (stage, microbatch) of a rank between forward and last weight gradient."""
        return self._peak(rank, Kind.I, Kind.W)

    def _peak(self, rank: int, *ends: Kind) -> int:
        nodes = [node for node in self.ranks[rank] if node.resource is Resource.COMPUTE]
        forward_only = all(node.kind is Kind.F for node in nodes)
        return most_open(nodes, microbatch_of, lambda node: forward_only or node.kind in ends)


def most_open(
    nodes: Sequence[Node], of: Callable[[Node], Hashable], closes: Callable[[Node], bool] = lambda node: True
) -> int:
    """Return the peak number of what nodes are ``of`` that is open: from the first node to the last that closes it."""
    left = Counter(of(node) for node in nodes if closes(node))
    begun: set[Hashable] = set()
    most = 0
    for node in nodes:
        one = of(node)
        if left[one]:
            begun.add(one)
            most = max(most, len(begun))
        if closes(node):
            left[one] -= 1
            if not left[one]:
                begun.discard(one)
    return most


def ends_backward(node: Node) -> bool:
    """Return whether a node is the last computation of an input gradient."""
    return node.kind is Kind.I and node.block == 0 and node.op in (Op.ATTENTION, Op.DENSE)


def microbatch_of(what: Action | Node) -> tuple[int, int, int]:
    """Return pipe, stage and microbatch of an action or a node."""
    return what.pipe, what.stage, what.microbatch


def action_of(node: Node, backward: Kind = Kind.I) -> Action:
    """Return the action that a node belongs to, of what is no forward the ``backward``."""
    return Action(Kind.F if node.kind is Kind.F else backward, node.stage, node.microbatch, node.pipe)


def parse_overlap(value: str | int) -> Overlap:
    """Parse an overlap setting.

    >>> parse_overlap("3"), parse_overlap("pairs")
    (3, 'pairs')

    Raises:
        ValueError: The value is not ``serial``, ``pairs`` or a whole number from 1.
    """
    text = str(value)
    if text in ("serial", "pairs"):
        return cast("Overlap", text)
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise ValueError(f"overlap={value!r}; allowed: serial, pairs, or a number of open actions from 1")
