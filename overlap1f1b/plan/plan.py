"""A plan: every node of a step on one rank, in issue order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from overlap1f1b.plan.clock import makespan
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import Node, Op, StageShape
from overlap1f1b.plan.orders import pairs, serial, with_reductions
from overlap1f1b.plan.scheduler import ListScheduler, Policy
from overlap1f1b.schedule import Kind, Program

PATIENCES = (0.0, 0.2, 0.4, 0.6)
"""Tried shares of a weight gradient's time that a wait must last for the gradient to be issued in it."""

DEFERRED = (1, 2)
"""Tried numbers of microbatches beyond the live ones that may wait for weight gradients alone."""

Overlap = Literal["serial", "pairs"] | int
"""How much of a program runs interleaved: not at all, inside its pairs, or k consecutive actions at a time."""


@dataclass(frozen=True)
class Plan:
    """The nodes of a step in issue order, the same on all ranks that share a collective.

    Args:
        program: What the plan carries out.
        overlap: The setting that it was compiled for.
        order: What it became, the best of the candidates: ``serial``, ``pairs`` or ``k=…``.
        shape: Blocks of the stage.
        nodes: Every node of the step.
        predicted: Makespan by the costs that it was compiled with, in their unit.
    """

    program: Program
    overlap: Overlap
    order: str
    shape: StageShape
    nodes: tuple[Node, ...]
    predicted: float

    @property
    def fingerprint(self) -> str:
        """Hash of the order of nodes: ranks with different fingerprints would wait for each other forever."""
        return hashlib.sha256("\n".join(map(str, self.nodes)).encode()).hexdigest()

    def without_reductions(self) -> Plan:
        """The same order with nothing to sum over ranks."""
        shape = tuple(block._replace(reduced=False) for block in self.shape)
        return replace(self, shape=shape, nodes=tuple(node for node in self.nodes if node.op is not Op.REDUCE))

    @property
    def peak_activations(self) -> int:
        """Most microbatches between the start of their forward and the end of their backward at any moment."""
        return _peak(self.nodes, [node for node in self.nodes if node.kind is Kind.I])

    @property
    def peak_held(self) -> int:
        """The same, with those that wait for weight gradients alone."""
        return _peak(self.nodes, [node for node in self.nodes if node.kind is not Kind.F and node.op is not Op.REDUCE])


def _peak(nodes: tuple[Node, ...], ending: list[Node]) -> int:
    """Most microbatches that are open at once, each from its first node to the last of its ``ending`` nodes."""
    left = Counter(node.microbatch for node in ending or nodes)
    ends, live, peak = set(ending or nodes), set(), 0
    for node in nodes:
        if left[node.microbatch]:
            live.add(node.microbatch)
            peak = max(peak, len(live))
            left[node.microbatch] -= node in ends
            if not left[node.microbatch]:
                live.discard(node.microbatch)
    return peak


def parse_overlap(value: str | int) -> Overlap:
    """The overlap setting of a text or number.

    >>> parse_overlap("3"), parse_overlap("pairs")
    (3, 'pairs')

    Raises:
        ValueError: Anything but ``serial``, ``pairs`` and whole numbers from 1.
    """
    text = str(value)
    if text == "serial":
        return "serial"
    if text == "pairs":
        return "pairs"
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise ValueError(f"overlap={value!r}; allowed: serial, pairs, or a number of open actions from 1")


def compile(
    program: Program, shape: StageShape, costs: NodeCosts, overlap: Overlap, *, counts_block: bool = False
) -> Plan:
    """The plan of a one-stage program.

    A number k compiles the fixed orders and every number of open actions up to k, plays each against the costs and
    keeps the fastest: list scheduling is greedy, and a smaller k is now and then better. Each number is tried with
    every one of ``PATIENCES`` and ``DEFERRED``.

    >>> from overlap1f1b.plan import BlockShape
    >>> from overlap1f1b.schedule import build_schedule
    >>> program = build_schedule("combined_1f1b", microbatches=8)
    >>> costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5)
    >>> [compile(program, (BlockShape(seams=1),) * 4, costs, k).predicted for k in ("serial", "pairs", 3)]
    [1312.0, 880.0, 701.0]

    Raises:
        ValueError: An unknown overlap, a program of several stages or with split backwards, or a stage without blocks.
    """
    overlap = parse_overlap(overlap)
    _check_one_stage(program, shape)
    steps = program.ranks[0]
    candidates: list[tuple[str, Iterable[Node]]] = []
    if overlap != "pairs":
        candidates.append(("serial", serial(program.actions(0), shape)))
    if overlap != "serial":
        candidates.append(("pairs", pairs(steps, shape)))
    if isinstance(overlap, int):
        for k, deferred, patience in product(range(1, overlap + 1), DEFERRED, PATIENCES):
            policy = Policy(k, counts_block, deferred, patience)
            scheduler = ListScheduler(program.actions(0), shape, costs, policy, program.peak_activations[0])
            candidates.append((f"k={k}", scheduler.run()))
    best: Plan | None = None
    for order, candidate in candidates:
        nodes = tuple(with_reductions(candidate, shape))
        predicted = makespan(nodes, costs, counts_block=counts_block)
        if best is None or predicted < best.predicted:
            best = Plan(program, overlap, order, shape, nodes, predicted)
    assert best is not None
    return best


def _check_one_stage(program: Program, shape: StageShape) -> None:
    if len(program.ranks) != 1:
        raise ValueError(f"program {program.name!r} has {len(program.ranks)} ranks; allowed in a plan: 1")
    for action in program.actions(0):
        if action.kind not in (Kind.F, Kind.B) or action.stage or action.pipe:
            raise ValueError(
                f"program {program.name!r} holds {action}; allowed in a plan: forwards and whole backwards of stage 0"
            )
    if not shape:
        raise ValueError("a stage of 0 blocks; allowed: at least 1")
