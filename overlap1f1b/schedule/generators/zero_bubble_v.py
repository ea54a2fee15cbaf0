"""The zero-bubble schedule on a V."""

from __future__ import annotations

from overlap1f1b.schedule.action import Step, actions_of
from overlap1f1b.schedule.generators.row import Row, assemble
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program


def zb_v(microbatches: int, ranks: int = 1) -> Program:
    """Two chunks a rank, down and up again: no bubble on any rank with 1F1B's memory (arXiv 2401.10241, section 6).

    ::

        rank 0: 0F0 0F1 0F2     3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        rank 1:     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    (The second row is drawn without its waits.) Chunk 0 of rank r is stage r, chunk 1 stage 2P−1−r. If F = I = W, no
    rank waits between its first and its last action; makespan M(F+B) + (P−1)F/2. Peak P of a rank's activations (2P
    chunks), the same on every rank. Fewer than 2P−1 microbatches are the table of 2P−1 with the others left out: the
    formulas do not hold there, and the peak is P at most.
    """
    return assemble(
        "zb_v", microbatches, Placement.v(ranks), [_row(rank, ranks, microbatches) for rank in range(ranks)]
    )


def _row(rank: int, ranks: int, microbatches: int) -> list[Step]:
    total = max(2 * ranks - 1, microbatches)
    down, up = (0, rank), (0, 2 * ranks - 1 - rank)
    row = Row()

    def whole(place: tuple[int, int]) -> None:
        row.input(place)
        row.weight(place)

    for _ in range(2 * (ranks - rank) - 1):
        row.forward(down)
    for _ in range(rank):
        row.forward(up)
        row.forward(down)
    for _ in range(ranks - rank):
        row.forward(up)
        whole(up)
    for microbatch in range(ranks, total):  # of the forward on the way up
        if microbatch + ranks - rank - 1 < total:
            row.forward(down)
        whole(down)
        row.forward(up)
        whole(up)
    for _ in range(rank):
        row.input(down)
        row.input(up)
    for _ in range(ranks - rank):
        row.input(down)
        row.weight(down)
    for place in (up, down):
        while any((action.pipe, action.stage) == place for action in row.waiting):
            row.weight(place)
    return [step for step in row.steps if all(action.microbatch < microbatches for action in actions_of(step))]
