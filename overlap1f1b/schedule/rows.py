"""The slots of every rank as data, and an order over all ranks in which they can be carried out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from overlap1f1b.schedule.action import Action, Kind, Pair, Slot, actions_of
from overlap1f1b.schedule.placement import SINGLE, Placement


@dataclass(frozen=True)
class Rows:
    """The data of a :class:`~overlap1f1b.schedule.Program`; its rules and its files are functions of this."""

    name: str
    microbatches: int
    ranks: tuple[tuple[Slot, ...], ...]
    peak_activations: tuple[int, ...]
    placement: Placement = SINGLE
    peak_weights: tuple[int, ...] = ()
    search_seconds: float = 0.0

    def microbatches_of(self, pipe: int) -> range:
        """Return the microbatches that pass a pipe; with two pipes, the first has the lower half."""
        return self.placement.microbatches(pipe, self.microbatches)

    def splits(self, rank: int) -> bool:
        """Return whether a rank has weight gradients as separate actions."""
        return any(action.kind is Kind.W for action in self.actions(rank))

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank in the order in which they open."""
        for slot in self.ranks[rank]:
            yield from actions_of(slot)

    @cached_property
    def forward_only(self) -> bool:
        """Whether no rank runs a backward."""
        return all(action.kind is Kind.F for rank in range(len(self.ranks)) for action in self.actions(rank))


def flow(rows: Rows) -> Iterator[tuple[int, Slot]]:
    """Yield every slot once, with its rank, after everything that it needs; slots of one rank keep their order.

    A send never blocks its rank. A pair needs the inputs of both members, and both end together. Time is linear in the
    number of actions.

    Raises:
        ValueError: Some ranks wait for each other; the message names the first slot that waits.
    """
    stages, count = rows.placement.stages, rows.microbatches
    size = len(rows.placement.pipes) * stages * count
    done = bytearray(2 * size)  # for every (pipe, stage, microbatch): its forward, then its B or I
    at = [0] * len(rows.ranks)
    waiting: dict[int, list[int]] = {}  # ranks that wait for a forward or backward
    ready = list(range(len(rows.ranks)))[::-1]
    forward, weight = Kind.F, Kind.W

    def lacking(action: Action) -> int:
        kind, stage, microbatch, pipe = action
        key = (pipe * stages + stage) * count + microbatch
        if kind is forward:
            return key - count if stage and not done[key - count] else -1
        if not done[key]:
            return key
        key += size
        if kind is weight:
            return -1 if done[key] else key
        return key + count if stage + 1 < stages and not done[key + count] else -1

    while ready:
        rank = ready.pop()
        slots = rows.ranks[rank]
        for position in range(at[rank], len(slots)):
            slot = slots[position]
            actions = slot if isinstance(slot, Pair) else (slot,)
            lacks = max(map(lacking, actions))
            if lacks >= 0:
                waiting.setdefault(lacks, []).append(rank)
                at[rank] = position
                break
            for kind, stage, microbatch, pipe in actions:
                if kind is not weight:
                    key = (pipe * stages + stage) * count + microbatch + (0 if kind is forward else size)
                    done[key] = 1
                    if key in waiting:
                        ready += waiting.pop(key)
            yield rank, slot
    _check_finished(rows, at, waiting)


def _check_finished(rows: Rows, at: list[int], waiting: dict[int, list[int]]) -> None:
    stages, count = rows.placement.stages, rows.microbatches
    for key, ranks in waiting.items():
        place, microbatch = divmod(key, count)
        backward, place = divmod(place, len(rows.placement.pipes) * stages)
        pipe, stage = divmod(place, stages)
        needed = Action(Kind.B if backward else Kind.F, stage, microbatch, pipe)
        rank = ranks[0]
        raise ValueError(
            f"program {rows.name!r}, rank {rank}, position {at[rank]}: {rows.ranks[rank][at[rank]]} "
            f"waits forever for {needed} of rank {rows.placement.rank(pipe, stage)}; "
            "allowed: no ranks that wait for each other"
        )
