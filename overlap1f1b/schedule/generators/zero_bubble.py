"""Zero-bubble schedules on a loop: weight gradients fill the waits."""

from __future__ import annotations

from collections.abc import Sequence

from overlap1f1b.schedule.action import Kind, Slot
from overlap1f1b.schedule.generators.interleaved import chunk_orders, groups_of
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program, program_of


def zb_h1(microbatches: int, ranks: int = 1, chunks: int = 1, group_size: int | None = None) -> Program:
    """1F1B's memory, a third of its bubble (zero-bubble pipelining, arXiv 2401.10241, section 3.1).

    ::

        rank 0: F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2    I3 W3 I4 W4
        rank 1:    F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2:       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    Rank r begins with P−r−1 forwards and lets r weight gradients wait. Bubble (P−1)(F+B−2W) if W is no longer than F
    and I, and M ≥ P; peak min(P, M) on every rank. With chunks there are (v−1)G more forwards first, as in torch, and
    the peak is min(P + (v−1)G, vM)/v.
    """
    groups = groups_of(microbatches, ranks, group_size)
    rows = [
        _delayed(rank, ranks, chunks, groups, ranks - rank - 1 + (chunks - 1) * len(groups[0]), rank)
        for rank in range(ranks)
    ]
    return program_of("zb_h1", microbatches, Placement.loop(ranks, chunks), rows)


def zb_h2(microbatches: int, ranks: int = 1) -> Program:
    """No bubble on any rank, for twice the memory (zero-bubble pipelining, arXiv 2401.10241, section 3.2).

    ::

        rank 0: F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 F6 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6
        rank 1:    F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 F6 I4 W2 I5 W3 I6 W4 W5 W6
        rank 2:       F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 F6 I6 W2 W3 W4 W5 W6

    Rank r begins with 2(P−r)−1 forwards and lets 2r weight gradients wait. If F = I = W and M ≥ 2P−1, every rank
    works without a gap, from r·F on: the makespan is M(F+B) + (P−1)F. Peak min(2P−1, M).
    """
    groups = groups_of(microbatches, ranks)
    rows = [_delayed(rank, ranks, 1, groups, 2 * (ranks - rank - 1), 2 * rank) for rank in range(ranks)]
    return program_of("zb_h2", microbatches, Placement.loop(ranks), rows)


def _delayed(rank: int, ranks: int, chunks: int, groups: Sequence[range], warmup: int, waiting: int) -> list[Slot]:
    """Return ``warmup`` forwards, then forward and input gradient in turn, and W ``waiting`` input gradients later."""
    forwards, inputs = chunk_orders(rank, ranks, chunks, groups, Kind.I)
    row: list[Slot] = [*forwards[:warmup]]
    for index, action in enumerate(inputs):
        row += forwards[warmup + index : warmup + index + 1]
        row.append(action)
        if index >= waiting:
            row.append(inputs[index - waiting]._replace(kind=Kind.W))
    return row + [action._replace(kind=Kind.W) for action in inputs[max(0, len(inputs) - waiting) :]]
