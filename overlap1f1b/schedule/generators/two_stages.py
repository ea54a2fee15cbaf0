"""Schedules in which a rank holds two stages: the zero-bubble V, DualPipe, and its V-shaped half."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlap1f1b.schedule.action import Action, Kind, Pair, Slot, actions_of
from overlap1f1b.schedule.generators.options import Schedule
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program, program_of
from overlap1f1b.schedule.values import counted

PipeStage = tuple[int, int]
"""(pipe, stage)."""


def row_of(steps: Iterable[tuple[str, int]], stages: Sequence[PipeStage], first: Sequence[int] = (0,)) -> list[Slot]:
    """Return a rank's slots from steps in words, each with how often it comes.

    The words name one of the rank's two ``stages``: ``F0`` is the next forward of the one, ``B1`` or ``I1`` the next
    backward of the other, ``F0‖B1`` both as a pair. ``W1`` is the oldest weight gradient that waits there, ``W`` the
    oldest of all. Microbatches count from the ``first`` of each pipe.

    >>> print(*row_of([("F1", 2), ("I1 W", 1), ("F0‖B1", 1)], stages=((0, 0), (0, 3))))
    3F0 3F1 3I0 3W0 (0F0;3B1)OVERLAP_F_B
    """
    slots, waiting, count = list[Slot](), deque[Action](), Counter[tuple[PipeStage, bool]]()
    meaning = {f"{kind.value}{number}": (kind, of) for kind in Kind for number, of in enumerate(stages)}

    def following(word: str) -> Action:
        kind, of = meaning[word]
        count[of, kind is Kind.F] += 1
        return Action(kind, of[1], first[of[0]] + count[of, kind is Kind.F] - 1, of[0])

    for words, times in steps:
        for word in words.split() * times:
            if word[0] == "W":
                _, of = meaning.get(word, (Kind.W, None))
                action = next(one for one in waiting if of in (None, (one.pipe, one.stage)))
                waiting.remove(action)
                slots.append(action._replace(kind=Kind.W))
            elif "‖" in word:
                slots.append(Pair(*map(following, word.split("‖"))))
            else:
                action = following(word)
                slots.append(action)
                if action.kind is Kind.I:
                    waiting.append(action)
    return slots


@dataclass(frozen=True)
class DualPipe(Schedule):
    """Two pipes in opposite directions (DeepSeek-V3, arXiv 2412.19437): every rank holds two stages of the model.

    Eight steps, with H = P/2 and h = min(r, P−1−r). Stage 0 of a rank is of pipe 0 and stage 1 of pipe 1; in the second
    half of the ranks the reverse::

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
            rows.append(row_of(_eight_steps(ranks // 2, depth, main), (near, far), first))
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
            row_of(_eight_steps(ranks, rank, microbatches - 2 * ranks + rank + 1), _folded(rank, ranks))
            for rank in range(ranks)
        ]
        return program_of("dualpipev", microbatches, Placement.v(ranks), rows)


def _eight_steps(half: int, depth: int, main: int) -> list[tuple[str, int]]:
    """Return DualPipe's eight steps of a rank."""
    outer, inner = half - depth - 1, depth + 1
    apart = int(outer == 0)  # on a middle rank the first pair of step 4 is none
    return [
        ("F0", 2 * outer),
        ("F0 F1", inner),
        ("I1 W F1", outer),
        *(("F0 B1 F1‖B0", apart), ("F0‖B1 F1‖B0", main - apart)),
        ("B1 F1‖B0", outer),
        *(("B1 B0", inner // 2), ("B1 I0", inner % 2), ("I1 I0", inner // 2)),  # from the middle on W waits
        ("W I0", outer),
        ("W", inner),
    ]


def _folded(rank: int, ranks: int) -> tuple[PipeStage, PipeStage]:
    """Return a rank's stages on a V: down and up."""
    return (0, rank), (0, 2 * ranks - 1 - rank)


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
        rows = [
            [
                slot
                for slot in row_of(_down_and_up(rank, ranks, max(2 * ranks - 1, microbatches)), _folded(rank, ranks))
                if all(action.microbatch < microbatches for action in actions_of(slot))
            ]
            for rank in range(ranks)
        ]
        return program_of("zb_v", microbatches, Placement.v(ranks), rows)


def _down_and_up(rank: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    """Return the steps of a rank of the V, with weight gradients where it would wait."""
    behind = ranks - rank - 1  # ranks before the turn
    return [
        ("F0", 2 * behind + 1),
        ("F1 F0", rank),
        ("F1 I1 W1", behind + 1),
        ("F0 I0 W0 F1 I1 W1", microbatches - ranks - behind),
        ("I0 W0 F1 I1 W1", behind),
        ("I0 I1", rank),
        ("I0 W0", behind + 1),
        ("W1", rank),
        ("W0", rank),
    ]
