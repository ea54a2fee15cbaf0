"""Combined 1F1B: forwards and backwards of the steady phase fused into pairs."""

from __future__ import annotations

from overlap1f1b.schedule.action import Pair, Step
from overlap1f1b.schedule.generators.interleaved import chunk_orders, groups_of
from overlap1f1b.schedule.generators.row import assemble
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program


def combined_1f1b(
    microbatches: int, extra_warmup: int = 0, ranks: int = 1, chunks: int = 1, group_size: int | None = None
) -> Program:
    """Each backward paired with the forward of a later microbatch (Megatron-Core's merged step).

    One rank::

        extra_warmup=0:  F0 B0‖F1 B1‖F2 B2
        extra_warmup=1:  F0 F1 B0‖F2 B1‖F3 B2 B3

    With ``w = 1 + extra_warmup`` forwards before the first backward, ``w + 1`` microbatches are alive at most: each
    extra warm-up costs one more activation and gives the exchange one more action to hide behind. Step: F + (M−1)·F&B
    + B.

    Several ranks::

        rank 0: F0 F1 F2 F3 F4             B0‖F5 B1    B2    B3 B4 B5
        rank 1:    F0 F1 F2       B0‖F3 B1‖F4    B2‖F5 B3 B4 B5
        rank 2:       F0    B0‖F1 B1‖F2 B2‖F3 B3‖F4    B4‖F5 B5

    A pair ends when both members have, so a microbatch needs one slot down and one slot up for every hop: rank r begins
    with 2(P−r−1) + (v−1)G + 1 forwards, one more than interleaved 1F1B, and with one chunk about twice as many as 1F1B
    (with P−r of them the pairs stall). Bubble (P−1)(F+B)/v if F&B = F+B; peak 1/v above interleaved 1F1B, 2(P−r) with
    one chunk. Pairs a rank for G = P: vM − 2(P−r−1) − (v−1)P − 1 of vM.
    """
    groups = groups_of(microbatches, ranks, group_size)
    rows: list[list[Step]] = []
    for rank in range(ranks):
        forwards, backwards = chunk_orders(rank, ranks, chunks, groups)
        warmup = 2 * (ranks - rank - 1) + (chunks - 1) * len(groups[0]) + 1 + extra_warmup
        row: list[Step] = [*forwards[:warmup]]
        row += map(Pair, forwards[warmup:], backwards)
        row += backwards[max(0, len(forwards) - warmup) :]
        rows.append(row)
    name = f"combined_1f1b+{extra_warmup}" if extra_warmup else "combined_1f1b"
    return assemble(name, microbatches, Placement.loop(ranks, chunks), rows)
