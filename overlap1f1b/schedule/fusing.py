"""Neighbouring forwards and backwards become pairs."""

from __future__ import annotations

from dataclasses import replace

from overlap1f1b.schedule.action import Action, Kind, Pair, Step, actions_of
from overlap1f1b.schedule.flow import needs
from overlap1f1b.schedule.peaks import peaks_of
from overlap1f1b.schedule.program import Program


def fuse(program: Program) -> Program:
    """The same program with adjacent F and B of different microbatches joined, first come first joined.

    >>> from overlap1f1b.schedule import build_schedule
    >>> print(fuse(build_schedule("1f1b", ranks=2, microbatches=4)).draw())
    rank 0: 0F0 0F1 0B0‖0F2 0B1‖0F3 0B2 0B3
    rank 1: 1F0 1B0‖1F1 1B1‖1F2 1B2‖1F3 1B3

    Two neighbours stay apart where ranks would wait for each other if they ended together. A pair keeps both members'
    activations, so the declared peaks are those of the new rows; a fused program can be slower than one that was
    warmed up for pairs, as ``combined_1f1b`` is.
    """
    return _Fusion(program).run()


class _Fusion:
    """A run of all ranks in which each waits until it can join two steps, and gives up when nobody else can move."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.done: set[Action] = set()
        self.at = [0] * len(program.ranks)
        self.rows: list[list[Step]] = [[] for _ in program.ranks]

    def run(self) -> Program:
        ranks = range(len(self.rows))
        while any(self.at[rank] < len(self.program.ranks[rank]) for rank in ranks):
            moved = [rank for rank in ranks if self._advance(rank, patient=True)]
            if not moved and not any(self._advance(rank, patient=False) for rank in ranks):
                self.program.check()
                raise AssertionError("a program that passes its checks can be carried out")
        rows = tuple(map(tuple, self.rows))
        alive, pending = zip(*map(peaks_of, rows), strict=True)
        return replace(self.program, ranks=rows, peak_activations=alive, peak_weights=pending)

    def _advance(self, rank: int, *, patient: bool) -> bool:
        """Carries out what a rank can: of an impatient one a single step that it would rather join to the next."""
        steps, before = self.program.ranks[rank], self.at[rank]
        while self.at[rank] < len(steps):
            position = self.at[rank]
            step, width = steps[position], 1
            if position + 1 < len(steps) and (pair := _joined(step, steps[position + 1])):
                step, width = (pair, 2) if patient or self._ready(pair) else (step, 1)
            if not self._ready(step):
                break
            self.done.update(a._replace(kind=Kind.B) if a.kind is Kind.I else a for a in actions_of(step))
            self.rows[rank].append(step)
            self.at[rank] += width
            if not patient:
                break
        return self.at[rank] > before

    def _ready(self, step: Step) -> bool:
        stages = self.program.placement.stages
        return all(needed in self.done for action in actions_of(step) for needed in needs(action, stages))


def _joined(first: Step, second: Step) -> Pair | None:
    if isinstance(first, Pair) or isinstance(second, Pair):
        return None
    forward, backward = (first, second) if first.kind is Kind.F else (second, first)
    if (forward.kind, backward.kind) != (Kind.F, Kind.B):
        return None
    same = (forward.microbatch, forward.pipe) == (backward.microbatch, backward.pipe)
    return None if same else Pair(forward, backward)
