"""A plan: every node of a step on every rank, in issue order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from overlap1f1b.plan.node import Node, Op, StageShape
from overlap1f1b.schedule import Action, Kind, Program

Overlap = Literal["serial", "pairs"] | int
"""Degree of interleaving: none, inside a program's pairs, or k consecutive actions at a time."""


@dataclass(frozen=True)
class Plan:
    """The nodes of a step in issue order on every pipeline rank; ranks that share a collective share a plan.

    Args:
        program: The program that the plan carries out.
        overlap: The setting for which it was compiled.
        order: Name of the fastest candidate: ``serial``, ``pairs`` or ``k=…``.
        shapes: Blocks of each stage.
        ranks: ``ranks[r]`` has every node of the step on rank ``r``, in issue order.
        predicted: Makespan by the costs of the compilation, in their unit.
    """

    program: Program
    overlap: Overlap
    order: str
    shapes: tuple[StageShape, ...]
    ranks: tuple[tuple[Node, ...], ...]
    predicted: float

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

    def without_reductions(self) -> Plan:
        """Return the same order without reductions over ranks."""
        shapes = tuple(tuple(block._replace(reduced=False) for block in shape) for shape in self.shapes)
        ranks = tuple(tuple(node for node in nodes if node.op is not Op.REDUCE) for nodes in self.ranks)
        return replace(self, shapes=shapes, ranks=ranks)

    @property
    def peak_held(self) -> int:
        """Peak number of (stage, microbatch) between forward and last weight gradient, over all ranks."""
        return max(map(self.held, range(len(self.ranks))))

    def live(self, rank: int) -> int:
        """Return the peak number of (stage, microbatch) of a rank between forward and end of backward."""
        return _peak(self.ranks[rank], lambda node: node.kind is Kind.I and node.op is not Op.SEND)

    def held(self, rank: int) -> int:
        """Return the peak number of (stage, microbatch) of a rank between forward and last weight gradient."""
        return _peak(
            self.ranks[rank], lambda node: node.kind is not Kind.F and node.op not in (Op.REDUCE, Op.SEND, Op.RECEIVE)
        )

    def waiting(self, rank: int) -> int:
        """Return the peak number of (stage, microbatch) of a rank between input gradient and weight gradients.

        Only backwards that the program splits count: the weight gradients of a B are held with its activations.
        """
        split = {microbatch_of(action) for action in self.program.actions(rank) if action.kind is Kind.I}
        nodes = [node for node in self.ranks[rank] if microbatch_of(node) in split and node.op is not Op.REDUCE]
        left = Counter(microbatch_of(node) for node in nodes if node.kind is Kind.W)
        waiting: set[tuple[int, int, int]] = set()
        peak = 0
        for node in nodes:
            place = microbatch_of(node)
            if node.kind is Kind.W:
                left[place] -= 1
                if not left[place]:
                    waiting.discard(place)
            elif ends_backward(node) and left[place]:
                waiting.add(place)
                peak = max(peak, len(waiting))
        return peak


def ends_backward(node: Node) -> bool:
    """Return whether a node is the last computation of an input gradient."""
    return node.kind is Kind.I and node.block == 0 and node.op in (Op.ATTENTION, Op.DENSE)


def _peak(nodes: tuple[Node, ...], ends: Callable[[Node], bool]) -> int:
    """Return the peak of (stage, microbatch) that are open, from first computation to last ending node."""
    computing = [node for node in nodes if node.op not in (Op.SEND, Op.RECEIVE, Op.REDUCE)]
    left = Counter(map(microbatch_of, filter(ends, computing)))
    forward_only = not left
    left = left or Counter(map(microbatch_of, computing))
    live: set[tuple[int, int, int]] = set()
    peak = 0
    for node in computing:
        place = microbatch_of(node)
        if left[place]:
            live.add(place)
            peak = max(peak, len(live))
        if forward_only or ends(node):
            left[place] -= 1
            if not left[place]:
                live.discard(place)
    return peak


def microbatch_of(what: Action | Node) -> tuple[int, int, int]:
    """Return pipe, stage and microbatch of an action or a node."""
    return what.pipe, what.stage, what.microbatch


def parse_overlap(value: str | int) -> Overlap:
    """Parse an overlap setting.

    >>> parse_overlap("3"), parse_overlap("pairs")
    (3, 'pairs')

    Raises:
        ValueError: The value is not ``serial``, ``pairs`` or a whole number from 1.
    """
    text = str(value)
    if text == "serial":
        return "serial"
    if text == "pairs":
        return "pairs"
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise ValueError(f"overlap={value!r}; allowed: serial, pairs, or a number of open actions from 1")
