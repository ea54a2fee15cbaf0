"""Schedules in which a rank holds two stages: the zero-bubble V, DualPipe, and its V-shaped half."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from overlap1f1b.schedule.action import Action, Kind, Pair, Slot, actions_of
from overlap1f1b.schedule.generators.options import Schedule
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program, program_of
from overlap1f1b.schedule.values import counted

PipeStage = tuple[int, int]
"""(pipe, stage)."""


class RankBuilder:
    """Builds one rank's slots: counts microbatches of each stage, from the ``first`` of each pipe, and queues W.

    >>> row = RankBuilder()
    >>> row.add(Kind.F, (0, 3)); row.add(Kind.F, (0, 3)); row.add(Kind.I, (0, 3)); row.weight()
    >>> print(*row.slots)
    3F0 3F1 3I0 3W0
    """

    def __init__(self, first: Sequence[int] = (0,)) -> None:
        self.slots: list[Slot] = []
        self.first = first
        self.count: Counter[tuple[PipeStage, bool]] = Counter()
        self.waiting: deque[Action] = deque()

    def _next(self, of: PipeStage, kind: Kind) -> Action:
        key = (of, kind is Kind.F)
        microbatch = self.first[of[0]] + self.count[key]
        self.count[key] += 1
        return Action(kind, of[1], microbatch, of[0])

    def add(self, kind: Kind, of: PipeStage) -> None:
        """Add the next forward, backward or input gradient of a stage; the weight gradient of the last one waits."""
        action = self._next(of, kind)
        self.slots.append(action)
        if kind is Kind.I:
            self.waiting.append(action)

    def weight(self, of: PipeStage | None = None) -> None:
        """Add the oldest waiting weight gradient, of one stage or of any, if there is one."""
        for action in self.waiting:
            if of is None or (action.pipe, action.stage) == of:
                self.waiting.remove(action)
                self.slots.append(action._replace(kind=Kind.W))
                return

    def pair(self, forward: PipeStage, backward: PipeStage) -> None:
        """Add a pair: the next forward of one stage and the next backward of another."""
        self.slots.append(Pair(self._next(forward, Kind.F), self._next(backward, Kind.B)))


@dataclass(frozen=True)
class DualPipe(Schedule):
    """Two pipes in opposite directions (DeepSeek-V3, arXiv 2412.19437): every rank holds two stages of the model.

    Eight steps, with H = P/2, h = min(r, P−1−r), and the pipes 0 and 1, swapped in the second half of the ranks::

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

    def program(self, microbatches: int, ranks: int) -> Program:
        if ranks % 2:
            nearest = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
            raise ValueError(f"dualpipe over {counted(ranks, 'rank')}; allowed: an even number, nearest {nearest}")
        if microbatches % 2 or microbatches < 2 * ranks:
            nearest = str(2 * ranks) if microbatches < 2 * ranks else f"{microbatches - 1} or {microbatches + 1}"
            raise ValueError(
                f"dualpipe over {counted(ranks, 'rank')} with {counted(microbatches, 'microbatch')}; "
                f"allowed: an even number from {2 * ranks} on, nearest {nearest}"
            )
        placement = Placement.bidirectional(ranks)
        first = [placement.microbatches(pipe, microbatches).start for pipe in (0, 1)]
        rows: list[list[Slot]] = []
        for rank in range(ranks):
            near, far = ((0, rank), (1, ranks - 1 - rank))[:: 1 if rank < ranks // 2 else -1]
            depth = min(rank, ranks - 1 - rank)
            main = microbatches // 2 - ranks + depth + 1
            rows.append(_eight_steps(RankBuilder(first), ranks // 2, depth, main, near, far))
        return program_of("dualpipe", microbatches, placement, rows)


@dataclass(frozen=True)
class DualPipeV(Schedule):
    """DualPipe cut in half and folded: one pipe on a V, parameters once (DualPipeV, "cut-in-half", Sea AI Lab 2025).

    The eight steps of :class:`DualPipe` with H → P, h → r, M−2P+r+1 rounds of step 4, chunk 0 for 0 and chunk 1 for 1;
    the last rank alone is the middle. P = 2, M = 4::

        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1‖0F3 0B0‖3F2 3B2 0B1‖3F3 3B3 0I2 0W2 0I3 0W3
        rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 1B0‖2F2 2B1‖1F3 1B1‖2F3 2B2 1B2 2I3 1I3 2W3 1W3

    Bubble (P−1)(F&B + B − 3W) in costs of a chunk; peak P+½ (2P+1 chunks). Pairs a rank: 2M − 3P + r + 1 of 2M, one
    less on the last rank. Needs M ≥ 2P.
    """

    fixed_chunks = 2

    def program(self, microbatches: int, ranks: int) -> Program:
        if microbatches < 2 * ranks:
            raise ValueError(
                f"dualpipev over {counted(ranks, 'rank')} with {counted(microbatches, 'microbatch')}; "
                f"allowed: {2 * ranks} or more"
            )
        rows = [
            _eight_steps(
                RankBuilder(), ranks, rank, microbatches - 2 * ranks + rank + 1, (0, rank), (0, 2 * ranks - 1 - rank)
            )
            for rank in range(ranks)
        ]
        return program_of("dualpipev", microbatches, Placement.v(ranks), rows)


def _eight_steps(row: RankBuilder, half: int, depth: int, main: int, zero: PipeStage, one: PipeStage) -> list[Slot]:
    """Return a rank's row: DualPipe's eight steps, over its two stages."""
    outer, inner = half - depth - 1, depth + 1
    for _ in range(2 * outer):
        row.add(Kind.F, zero)
    for _ in range(inner):
        row.add(Kind.F, zero)
        row.add(Kind.F, one)
    for _ in range(outer):
        row.add(Kind.I, one)
        row.weight()
        row.add(Kind.F, one)
    for turn in range(main):
        if turn == 0 and outer == 0:
            row.add(Kind.F, zero)
            row.add(Kind.B, one)
        else:
            row.pair(zero, one)
        row.pair(one, zero)
    for _ in range(outer):
        row.add(Kind.B, one)
        row.pair(one, zero)
    for turn in range(2 * inner):  # one, zero, one, …: in the second half W waits
        row.add(Kind.B if turn < inner else Kind.I, zero if turn % 2 else one)
    for _ in range(outer):
        row.weight()
        row.add(Kind.I, zero)
    for _ in range(inner):
        row.weight()
    return row.slots


@dataclass(frozen=True)
class ZBV(Schedule):
    """Two chunks a rank, down and up again: no bubble on any rank with 1F1B's memory (arXiv 2401.10241, section 6).

    ::

        rank 0: 0F0 0F1 0F2     3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        rank 1:     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    (The second row is drawn without its waits.) Chunk 0 of rank r is stage r, chunk 1 stage 2P−1−r. If F = I = W, no
    rank waits between its first and its last action; makespan M(F+B) + (P−1)F/2. Peak P of a rank's activations (2P
    chunks), the same on every rank. With fewer than 2P−1 microbatches the table of 2P−1 is used without the missing
    ones: the formulas do not hold then, and the peak is at most P.
    """

    fixed_chunks = 2

    def program(self, microbatches: int, ranks: int) -> Program:
        return program_of(
            "zb_v", microbatches, Placement.v(ranks), [_v_row(rank, ranks, microbatches) for rank in range(ranks)]
        )


def _v_row(rank: int, ranks: int, microbatches: int) -> list[Slot]:
    """Return a rank's row, with weight gradients where it would wait."""
    total = max(2 * ranks - 1, microbatches)
    down, up = (0, rank), (0, 2 * ranks - 1 - rank)
    row = RankBuilder()

    def whole(place: tuple[int, int]) -> None:
        row.add(Kind.I, place)
        row.weight(place)

    for _ in range(2 * (ranks - rank) - 1):
        row.add(Kind.F, down)
    for _ in range(rank):
        row.add(Kind.F, up)
        row.add(Kind.F, down)
    for _ in range(ranks - rank):
        row.add(Kind.F, up)
        whole(up)
    for microbatch in range(ranks, total):  # of the forward on the way up
        if microbatch + ranks - rank - 1 < total:
            row.add(Kind.F, down)
        whole(down)
        row.add(Kind.F, up)
        whole(up)
    for _ in range(rank):
        row.add(Kind.I, down)
        row.add(Kind.I, up)
    for _ in range(ranks - rank):
        row.add(Kind.I, down)
        row.weight(down)
    for place in (up, down):
        while any((action.pipe, action.stage) == place for action in row.waiting):
            row.weight(place)
    return [slot for slot in row.slots if all(action.microbatch < microbatches for action in actions_of(slot))]
