"""The order in which ranks can carry out a Program, each waiting for what other ranks hand over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from overlap1f1b.schedule.action import Action, Kind, Pair, Step
from overlap1f1b.schedule.program import Program


class Turn(NamedTuple):
    """A step that a rank carries out."""

    rank: int
    position: int
    step: Step


def flow(program: Program) -> Iterator[Turn]:
    """Every step once, after all that it needs; steps of one rank in their order.

    Sends are taken to hold nobody up. A pair needs what both of its members need, and neither is done before both are.
    Time is linear in the number of actions.

    Raises:
        ValueError: Some steps wait for each other; names the first that waits.
    """
    stages, count = program.placement.stages, program.microbatches
    size = len(program.placement.pipes) * stages * count
    done = bytearray(2 * size)  # of every (pipe, stage, microbatch) the forward, then B or I
    at = [0] * len(program.ranks)
    waiting: dict[int, list[int]] = {}  # ranks that wait for a forward or backward
    ready = list(range(len(program.ranks)))[::-1]
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
        steps = program.ranks[rank]
        for position in range(at[rank], len(steps)):
            step = steps[position]
            actions = step if isinstance(step, Pair) else (step,)
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
            yield Turn(rank, position, step)
    _check_finished(program, at, waiting)


def _check_finished(program: Program, at: list[int], waiting: dict[int, list[int]]) -> None:
    stages, count = program.placement.stages, program.microbatches
    for key, ranks in waiting.items():
        place, microbatch = divmod(key, count)
        backward, place = divmod(place, len(program.placement.pipes) * stages)
        pipe, stage = divmod(place, stages)
        needed = Action(Kind.B if backward else Kind.F, stage, microbatch, pipe)
        rank = ranks[0]
        raise ValueError(
            f"program {program.name!r}, rank {rank}, position {at[rank]}: {program.ranks[rank][at[rank]]} "
            f"waits forever for {needed} of rank {program.placement.rank(pipe, stage)}; "
            "allowed: no ranks that wait for each other"
        )
