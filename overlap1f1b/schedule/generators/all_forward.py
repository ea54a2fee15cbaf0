"""All forwards, then all backwards."""

from __future__ import annotations

from overlap1f1b.schedule.action import Action, Kind
from overlap1f1b.schedule.generators.row import assemble
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program


def afab(microbatches: int, ranks: int = 1, chunks: int = 1) -> Program:
    """All forwards, then all backwards in the same order (GPipe, arXiv 1811.06965; with chunks breadth first).

    ::

        rank 0: F0 F1 F2 F3       B0 B1 B2 B3
        rank 1:    F0 F1 F2 F3 B0 B1 B2 B3

    Bubble (P−1)(F+B)/v for v chunks and M ≥ P; peak M, whatever the rank.
    """
    rows = [
        [
            Action(kind, stage, m)
            for kind in (Kind.F, Kind.B)
            for stage in range(rank, ranks * chunks, ranks)[:: 1 if kind is Kind.F else -1]
            for m in range(microbatches)
        ]
        for rank in range(ranks)
    ]
    return assemble("afab", microbatches, Placement.loop(ranks, chunks), rows)
