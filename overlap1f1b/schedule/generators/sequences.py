"""Schedules without a steady phase: one microbatch after another, all forwards first, forwards alone."""

from dataclasses import dataclass, replace
from itertools import chain

from overlap1f1b.schedule.action import Action, Kind
from overlap1f1b.schedule.generators.interleaved import chunk_orders
from overlap1f1b.schedule.generators.options import Schedule
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program, program_of


@dataclass(frozen=True)
class Sequential(Schedule):
    """Each microbatch forward, then backward: the baseline of every comparison, with one activation alive.

    ::

        F0 B0 F1 B1 F2 B2

    Over several ranks only one of them works at a time. Peak: ``chunks`` stages of one microbatch.
    """

    chunks: int = 1

    def program(self, microbatches: int, ranks: int) -> Program:
        return one_by_one(microbatches, Placement.loop(ranks, self.chunks))


def one_by_one(microbatches: int, placement: Placement, *, split: bool = False) -> Program:
    """Return ``sequential`` over a placement: one microbatch after another, whatever its pipe.

    With ``split`` weight gradients follow all input gradients of their microbatch.
    """
    backward = (Kind.I, Kind.W) if split else (Kind.B,)
    rows = [
        [
            Action(kind, stage, m, pipe)
            for m in range(microbatches)
            for kind in (Kind.F, *backward)
            for pipe, stage in placement.places(rank)[:: 1 if kind is Kind.F else -1]
            if m in placement.microbatches(pipe, microbatches)
        ]
        for rank in range(placement.ranks)
    ]
    return program_of("sequential", microbatches, placement, rows)


def forwards_of(program: Program) -> Program:
    """Return the forwards of a program in its order, for evaluation over the same placement.

    >>> print(forwards_of(Sequential().program(microbatches=3, ranks=1)).draw())
    rank 0: F0 F1 F2
    """
    every = map(program.actions, range(len(program.ranks)))
    rows = [[action for action in actions if action.kind is Kind.F] for actions in every]
    forwards = program_of(f"{program.name} forward_only", program.microbatches, program.placement, rows)
    return replace(forwards, search_seconds=program.search_seconds)


@dataclass(frozen=True)
class Afab(Schedule):
    """All forwards, then all backwards in the same order (GPipe, arXiv 1811.06965; with chunks breadth first).

    ::

        rank 0: F0 F1 F2 F3       B0 B1 B2 B3
        rank 1:    F0 F1 F2 F3 B0 B1 B2 B3

    Bubble (P−1)(F+B)/v for v chunks and M ≥ P; peak M, whatever the rank.
    """

    chunks: int = 1

    def program(self, microbatches: int, ranks: int) -> Program:
        rows = [chain(*chunk_orders(rank, ranks, self.chunks, [range(microbatches)])) for rank in range(ranks)]
        return program_of("afab", microbatches, Placement.loop(ranks, self.chunks), rows)
