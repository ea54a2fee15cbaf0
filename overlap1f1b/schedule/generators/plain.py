"""The schedules without a pipeline's overlap: one microbatch after another, and forwards alone."""

from __future__ import annotations

from dataclasses import replace

from overlap1f1b.schedule.action import Action, Kind, Pair, Step
from overlap1f1b.schedule.generators.row import assemble
from overlap1f1b.schedule.peaks import peaks_of
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program


def sequential(microbatches: int, ranks: int = 1, chunks: int = 1) -> Program:
    """Each microbatch forward, then backward: the baseline of every comparison, one activation alive.

    ::

        F0 B0 F1 B1 F2 B2

    Over several ranks only one of them works at a time. Peak: ``chunks`` stages of one microbatch.
    """
    rows = [
        [
            Action(kind, stage, m)
            for m in range(microbatches)
            for kind in (Kind.F, Kind.B)
            for stage in range(rank, ranks * chunks, ranks)[:: 1 if kind is Kind.F else -1]
        ]
        for rank in range(ranks)
    ]
    return assemble("sequential", microbatches, Placement.loop(ranks, chunks), rows)


def forward_only(microbatches: int) -> Program:
    """Forwards alone on one rank, for evaluation.

    ::

        F0 F1 F2
    """
    steps = tuple(Action(Kind.F, 0, m) for m in range(microbatches))
    return Program("forward_only", microbatches, (steps,), (microbatches,))


def forwards_of(program: Program) -> Program:
    """The forwards of a program in its order, for evaluation over the same placement.

    >>> print(forwards_of(sequential(3)).draw())
    rank 0: F0 F1 F2
    """
    ranks = tuple(tuple(f for step in steps for f in _forward_of(step)) for steps in program.ranks)
    alive, _ = zip(*map(peaks_of, ranks), strict=True)
    name = f"{program.name} forward_only"
    return replace(program, name=name, ranks=ranks, peak_activations=alive, peak_weights=(0,) * len(ranks))


def _forward_of(step: Step) -> tuple[Action, ...]:
    action = step.forward if isinstance(step, Pair) else step
    return (action,) if action.kind is Kind.F else ()
