"""One forward, one backward on a loop: plain, over several chunks, combined to pairs, and with W in the waits."""

from collections.abc import Sequence
from dataclasses import dataclass

from overlap1f1b.schedule.action import Action, Kind, Pair, Slot
from overlap1f1b.schedule.generators.options import Schedule
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program, program_of
from overlap1f1b.schedule.values import counted

DEFAULT_EXTRA_WARMUP = 1
"""Extra warm-up of ``combined_1f1b`` with one chunk on one rank."""


def groups_of(microbatches: int, ranks: int, group_size: int | None = None) -> list[range]:
    """Return the microbatches in groups; a group passes one chunk of a rank before the rank turns to the next chunk.

    Without a size there are ⌊M/P⌋ groups, or one if M < P, as equal as can be. With a size the last group holds the
    rest. No group is smaller than P, so no chunk waits for the next one.

    >>> groups_of(10, 4)
    [range(0, 5), range(5, 10)]
    >>> groups_of(10, 4, group_size=6)
    [range(0, 6), range(6, 10)]

    Raises:
        ValueError: A group would be smaller than P: then ranks with three chunks or more can wait for each other.
    """
    if group_size is not None:
        fitting = [g for g in range(min(ranks, microbatches), microbatches + 1) if not 0 < microbatches % g < ranks]
        if group_size not in fitting:
            nearest = min(fitting, key=lambda size: abs(size - group_size))
            allowed = f"{fitting[0]} to {microbatches} with a last group of {ranks} or more, nearest {nearest}"
            sizes = f"over {counted(ranks, 'rank')} with {counted(microbatches, 'microbatch')}"
            raise ValueError(
                f"group_size={group_size} {sizes}; allowed: "
                + (allowed if len(fitting) > 1 else f"{nearest}, all in one group")
            )
        return [range(m, min(m + group_size, microbatches)) for m in range(0, microbatches, group_size)]
    rounds = max(1, microbatches // ranks)
    cuts = [-(-microbatches * group // rounds) for group in range(rounds + 1)]
    return [range(cuts[group], cuts[group + 1]) for group in range(rounds)]


def chunk_orders(
    rank: int, ranks: int, chunks: int, groups: Sequence[range], backward: Kind = Kind.B
) -> tuple[list[Action], list[Action]]:
    """Return a rank's forwards and backwards in order: group by group, and in a group chunk by chunk, deepest last."""
    stages = range(rank, ranks * chunks, ranks)
    forwards = [Action(Kind.F, stage, m) for group in groups for stage in stages for m in group]
    backwards = [Action(backward, stage, m) for group in groups for stage in reversed(stages) for m in group]
    return forwards, backwards


@dataclass(frozen=True)
class OneFOneB(Schedule):
    """One forward, one backward (PipeDream-Flush, arXiv 2006.09503; Megatron-LM without interleaving).

    ::

        rank 0: F0 F1 F2 F3          B0 F4 B1 F5 B2    B3    B4 B5
        rank 1:    F0 F1 F2       B0 F3 B1 F4 B2 F5 B3    B4 B5
        rank 2:       F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
        rank 3:          F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    Rank r begins with P−r−1 forwards. Bubble (P−1)(F+B); peak min(P−r, M). Every extra warm-up costs one activation.
    """

    extra_warmup: int = 0

    def program(self, microbatches: int, ranks: int) -> Program:
        return _interleave("1f1b", ranks, 1, groups_of(microbatches, ranks), self.extra_warmup)


@dataclass(frozen=True)
class Interleaved1F1B(Schedule):
    """1F1B over several chunks of the model a rank (arXiv 2104.04473; Megatron-LM with interleaving).

    ::

        rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    Rank r begins with 2(P−r−1) + (v−1)G forwards, G the size of the first group. Bubble (P−1)(F+B)/v for P ≤ G; peak
    [2(P−r−1) + (v−1)G + 1]/v of a rank's activations. M ≤ P is no special case: there is one group of M, and the
    warm-up has at most all forwards (Megatron-LM runs all forwards first if M = P: as fast, but with more memory).
    With one chunk the warm-up is 2(P−r−1), about twice that of 1F1B.
    """

    chunks: int = 1
    extra_warmup: int = 0
    group_size: int | None = None

    def program(self, microbatches: int, ranks: int) -> Program:
        groups = groups_of(microbatches, ranks, self.group_size)
        return _interleave("interleaved_1f1b", ranks, self.chunks, groups, self.extra_warmup, hop=2)


def _interleave(
    name: str, ranks: int, chunks: int, groups: Sequence[range], extra: int, hop: int = 1, *, paired: bool = False
) -> Program:
    """Return forwards to warm up, then forward and backward in turn, or a pair of both, then the last backwards.

    The warm-up has ``hop`` forwards for every rank behind, and one more for pairs.
    """
    rows: list[list[Slot]] = []
    for rank in range(ranks):
        forwards, backwards = chunk_orders(rank, ranks, chunks, groups)
        warmup = min(hop * (ranks - rank - 1) + (chunks - 1) * len(groups[0]) + paired + extra, len(forwards))
        row: list[Slot] = [*forwards[:warmup]]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            row += (Pair(forward, backward),) if paired else (forward, backward)
        row += backwards[len(forwards) - warmup :]
        rows.append(row)
    return program_of(f"{name}+{extra}" if extra else name, groups[-1].stop, Placement.loop(ranks, chunks), rows)


@dataclass(frozen=True)
class Combined1F1B(Schedule):
    """Each backward paired with the forward of a later microbatch (Megatron-Core's merged step).

    One rank::

        extra_warmup=0:  F0 B0‖F1 B1‖F2 B2
        extra_warmup=1:  F0 F1 B0‖F2 B1‖F3 B2 B3

    With ``w = 1 + extra_warmup`` forwards before the first backward, ``w + 1`` microbatches are alive at most: each
    extra warm-up costs one more activation and gives the exchange one more action to hide behind. Slot: F + (M−1)·F&B
    + B. By default ``DEFAULT_EXTRA_WARMUP`` with one chunk on one rank; else 0, since the warm-up is long enough.

    Several ranks::

        rank 0: F0 F1 F2 F3 F4             B0‖F5 B1    B2    B3 B4 B5
        rank 1:    F0 F1 F2       B0‖F3 B1‖F4    B2‖F5 B3 B4 B5
        rank 2:       F0    B0‖F1 B1‖F2 B2‖F3 B3‖F4    B4‖F5 B5

    A pair ends when both members end, so a microbatch needs one slot down and one slot up for every hop: rank r begins
    with 2(P−r−1) + (v−1)G + 1 forwards, one more than interleaved 1F1B, and with one chunk about twice as many as 1F1B
    (with P−r of them the pairs stall). Bubble (P−1)(F+B)/v if F&B = F+B; peak 1/v above interleaved 1F1B, 2(P−r) with
    one chunk. Pairs a rank for G = P: vM − 2(P−r−1) − (v−1)P − 1 of vM.
    """

    chunks: int = 1
    extra_warmup: int | None = None
    group_size: int | None = None

    def program(self, microbatches: int, ranks: int) -> Program:
        extra = self.extra_warmup
        if extra is None:
            extra = DEFAULT_EXTRA_WARMUP if ranks == self.chunks == 1 else 0
        groups = groups_of(microbatches, ranks, self.group_size)
        return _interleave("combined_1f1b", ranks, self.chunks, groups, extra, hop=2, paired=True)


@dataclass(frozen=True)
class ZBH1(Schedule):
    """1F1B's memory, a third of its bubble (zero-bubble pipelining, arXiv 2401.10241, section 3.1).

    ::

        rank 0: F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2    I3 W3 I4 W4
        rank 1:    F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2:       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    Rank r begins with P−r−1 forwards and lets r weight gradients wait. Bubble (P−1)(F+B−2W) if W is no longer than F
    and I, and M ≥ P; peak min(P, M) on every rank. With chunks there are (v−1)G more forwards first, as in torch, and
    the peak is min(P + (v−1)G, vM)/v.
    """

    chunks: int = 1
    group_size: int | None = None

    def program(self, microbatches: int, ranks: int) -> Program:
        groups = groups_of(microbatches, ranks, self.group_size)
        earlier = (self.chunks - 1) * len(groups[0])
        rows = [_delayed(rank, ranks, self.chunks, groups, ranks - rank - 1 + earlier, rank) for rank in range(ranks)]
        return program_of("zb_h1", microbatches, Placement.loop(ranks, self.chunks), rows)


@dataclass(frozen=True)
class ZBH2(Schedule):
    """No bubble on any rank, for twice the memory (zero-bubble pipelining, arXiv 2401.10241, section 3.2).

    ::

        rank 0: F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 F6 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6
        rank 1:    F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 F6 I4 W2 I5 W3 I6 W4 W5 W6
        rank 2:       F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 F6 I6 W2 W3 W4 W5 W6

    Rank r begins with 2(P−r)−1 forwards and lets 2r weight gradients wait. If F = I = W and M ≥ 2P−1, every rank
    works without a gap, from r·F on: the makespan is M(F+B) + (P−1)F. Peak min(2P−1, M).
    """

    def program(self, microbatches: int, ranks: int) -> Program:
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
