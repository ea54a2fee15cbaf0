"""DualPipe and its V-shaped half: both directions at once, a forward of one beside a backward of the other."""

from __future__ import annotations

from overlap1f1b.schedule.action import Step
from overlap1f1b.schedule.generators.row import Place, Row, assemble
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program


def dualpipe(microbatches: int, ranks: int) -> Program:
    """Two pipes in opposite directions (DeepSeek-V3, arXiv 2412.19437): every rank holds two stages of the model.

    Eight steps, with H = P/2, h = min(r, P−1−r), and 0 and 1 the two pipes, in the second half of the ranks exchanged::

        1. F0         × 2(H−h−1)
        2. F0 F1      × (h+1)
        3. I1 W F1    × (H−h−1)
        4. F0‖B1 F1‖B0  × (M/2−P+h+1), the first F0 and B1 of a middle rank apart
        5. B1 F1‖B0   × (H−h−1)
        6. B1 B0      × (h+1), from the middle on I in place of B
        7. W I0       × (H−h−1)
        8. W          × (h+1)

    P = 2, M = 4 (pipe 1 has microbatches 2 and 3, its stages are marked with ')::

        rank 0: 0F0 1'F2 0F1 1'B2 0B0‖1'F3 1'B3 0I1 0W1
        rank 1: 0'F2 1F0 0'F3 1B0 0'B2‖1F1 1B1 0'I3 0'W3

    Bubble (P/2−1)(F&B + B − 3W); peak P+1; parameters twice. Pairs a rank: M − 3P/2 + h + 1 of M, one less on the two
    middle ranks. Needs P even, M even, M ≥ 2P. The gradients of a stage's two replicas are summed.
    """
    placement = Placement.bidirectional(ranks)
    first = [placement.microbatches(pipe, microbatches).start for pipe in (0, 1)]
    rows: list[list[Step]] = []
    for rank in range(ranks):
        near, far = ((0, rank), (1, ranks - 1 - rank))[:: 1 if rank < ranks // 2 else -1]
        depth = min(rank, ranks - 1 - rank)
        rows.append(_eight_steps(Row(first), ranks // 2, depth, microbatches // 2 - ranks + depth + 1, near, far))
    return assemble("dualpipe", microbatches, placement, rows)


def dualpipev(microbatches: int, ranks: int) -> Program:
    """DualPipe cut in half and folded: one pipe on a V, parameters once (DualPipeV, "cut-in-half", Sea AI Lab 2025).

    The eight steps of :func:`dualpipe` with H → P, h → r, M−2P+r+1 rounds of step 4, chunk 0 for 0 and chunk 1 for 1;
    the last rank alone is the middle. P = 2, M = 4::

        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1‖0F3 0B0‖3F2 3B2 0B1‖3F3 3B3 0I2 0W2 0I3 0W3
        rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 1B0‖2F2 2B1‖1F3 1B1‖2F3 2B2 1B2 2I3 1I3 2W3 1W3

    Bubble (P−1)(F&B + B − 3W) in costs of a chunk; peak P+½ (2P+1 chunks). Pairs a rank: 2M − 3P + r + 1 of 2M, one
    less on the last rank. Needs M ≥ 2P.
    """
    rows = [
        _eight_steps(Row(), ranks, rank, microbatches - 2 * ranks + rank + 1, (0, rank), (0, 2 * ranks - 1 - rank))
        for rank in range(ranks)
    ]
    return assemble("dualpipev", microbatches, Placement.v(ranks), rows)


def _eight_steps(row: Row, half: int, depth: int, main: int, zero: Place, one: Place) -> list[Step]:
    outer, inner = half - depth - 1, depth + 1
    for _ in range(2 * outer):
        row.forward(zero)
    for _ in range(inner):
        row.forward(zero)
        row.forward(one)
    for _ in range(outer):
        row.input(one)
        row.weight()
        row.forward(one)
    for turn in range(main):
        if turn == 0 and outer == 0:
            row.forward(zero)
            row.backward(one)
        else:
            row.pair(zero, one)
        row.pair(one, zero)
    for _ in range(outer):
        row.backward(one)
        row.pair(one, zero)
    for turn in range(2 * inner):  # one, zero, one, …: those of the second half leave W for later
        (row.backward if turn < inner else row.input)(zero if turn % 2 else one)
    for _ in range(outer):
        row.weight()
        row.input(zero)
    for _ in range(inner):
        row.weight()
    return row.steps
