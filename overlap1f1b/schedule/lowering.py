"""A Program with everything that ranks do beside computing: transfers, reductions, frees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from overlap1f1b.schedule.action import Action, Kind, Step, actions_of
from overlap1f1b.schedule.flow import flow
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program
from overlap1f1b.schedule.sizes import check_size


class Verb(StrEnum):
    """What a command does; none of them holds up the rank's computing."""

    SEND = "SEND"
    RECV = "RECV"
    LOCAL_PASS = "LOCAL_PASS"
    REDUCE_REPLICA = "REDUCE_REPLICA"
    REDUCE_GRAD = "REDUCE_GRAD"
    FREE = "FREE"

    __hash__ = str.__hash__


class Command(NamedTuple):
    """One command beside the actions.

    >>> str(Command(Verb.SEND, stage=1, microbatch=0, peer=2, number=0))
    '1SEND_F0'

    - SEND, RECV: an activation (``kind`` F) or gradient (B) between the rank of the command and ``peer``; ``stage`` is
      the sender's of a SEND and the receiver's of a RECV. A lane leads from one rank to another and is first in, first
      out; ``number`` counts its messages. A RECV is posted, the action that needs the message waits for it.
    - LOCAL_PASS: the same to the next stage on this rank; ``stage`` is the one that made it.
    - REDUCE_REPLICA: the gradients of a parameter group, ``stage``, are summed over the ranks that hold it.
    - REDUCE_GRAD: they are summed over data-parallel ranks.
    - FREE: the activations of (``stage``, ``microbatch``) are no longer needed.
    """

    verb: Verb
    stage: int
    microbatch: int = -1
    pipe: int = 0
    kind: Kind = Kind.F
    peer: int = -1
    number: int = -1

    def __str__(self) -> str:
        kind = f"_{self.kind.value}" if self.verb in (Verb.SEND, Verb.RECV, Verb.LOCAL_PASS) else ""
        microbatch = "" if self.microbatch < 0 else str(self.microbatch)
        return f"{self.stage}{chr(39) * self.pipe}{self.verb.value}{kind}{microbatch}"


Instruction = Step | Command


@dataclass(frozen=True)
class LoweredProgram:
    """What every rank does, in order.

    >>> from overlap1f1b.schedule import build_schedule
    >>> print(lower(build_schedule("1f1b", ranks=2, microbatches=1)).draw())
    rank 0: 0RECV_B0 0F0 0SEND_F0 0B0 0FREE0 0REDUCE_GRAD
    rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1FREE0 1REDUCE_GRAD

    Args:
        program: Placement, microbatches and declared peaks.
        ranks: ``ranks[r]`` are the steps of rank ``r`` with the commands between them.
    """

    program: Program
    ranks: tuple[tuple[Instruction, ...], ...]

    def draw(self) -> str:
        """One line a rank."""
        return "\n".join(f"rank {rank}: " + " ".join(map(str, row)) for rank, row in enumerate(self.ranks))

    def check(self) -> None:
        """Raises ``ValueError`` naming rank, position and command where a rule is broken."""
        from overlap1f1b.schedule.lowered_checks import check_lowered

        check_lowered(self)


def passes_to(action: Action, placement: Placement) -> tuple[int, int] | None:
    """The stage that needs what an action makes, and its rank; none behind the last, and none behind W."""
    stage = action.stage + (1 if action.kind is Kind.F else -1)
    if action.kind is Kind.W or not 0 <= stage < placement.stages:
        return None
    return stage, placement.rank(action.pipe, stage)


def lower(program: Program, ahead: int = 1) -> LoweredProgram:
    """Adds transfers, passes, frees and reductions to a checked program.

    A SEND follows its action, of a pair the backward's first. A RECV stands ``ahead`` steps before the step that needs
    it, and earlier where its message could be under way earlier: with all ranks in step (F, I and W of one length, B of
    two) it is posted before its SEND, so that a SEND that waits for it holds nobody up forever. The order of a lane is
    that of its SENDs. A group's gradients are reduced after its last W or B; replicas in one order on both ranks.

    Raises:
        ValueError: ``ahead`` is negative or no whole number, or ranks wait for each other.
    """
    check_size("ahead", ahead, 0)
    before: list[defaultdict[int, list[Command]]] = [defaultdict(list) for _ in program.ranks]
    after: list[defaultdict[int, list[Command]]] = [defaultdict(list) for _ in program.ranks]
    _add_transfers(program, before, after, ahead)
    _add_frees(program, after)
    if not program.forward_only:
        _add_reductions(program, after)
    ranks = []
    for rank, steps in enumerate(program.ranks):
        row: list[Instruction] = []
        for position, step in enumerate(steps):
            row += before[rank].get(position, ())
            row.append(step)
            row += after[rank].get(position, ())
        ranks.append(tuple(row))
    return LoweredProgram(program, tuple(ranks))


def _placed(program: Program) -> Iterator[tuple[int, int, Action]]:
    for rank, steps in enumerate(program.ranks):
        for position, step in enumerate(steps):
            for action in actions_of(step):
                yield rank, position, action


def _add_transfers(
    program: Program,
    before: list[defaultdict[int, list[Command]]],
    after: list[defaultdict[int, list[Command]]],
    ahead: int,
) -> None:
    place, needed = program.placement, {}
    for _, position, action in _placed(program):
        if action.kind is not Kind.W:
            needed[action.kind is Kind.F, action[1:]] = position
    lanes: defaultdict[tuple[int, int], list[tuple[Command, int]]] = defaultdict(list)
    ended = [0] * len(program.ranks)
    for rank, position in _in_step(program):
        ended[rank] += 1
        for action in actions_of(program.ranks[rank][position]):
            onward = passes_to(action, place)
            if onward is None:
                continue
            (stage, peer), forward = onward, action.kind is Kind.F
            kind = Kind.F if forward else Kind.B
            message = Command(Verb.LOCAL_PASS, action.stage, action.microbatch, action.pipe, kind)
            if peer != rank:
                lane = lanes[rank, peer]
                message = message._replace(verb=Verb.SEND, peer=peer, number=len(lane))
                receive = message._replace(verb=Verb.RECV, stage=stage, peer=rank)
                latest = needed[forward, (stage, action.microbatch, action.pipe)] - ahead
                lane.append((receive, min(latest, ended[peer])))
            after[rank][position].append(message)
    for (_, peer), lane in sorted(lanes.items()):
        earliest = list(accumulate((position for _, position in reversed(lane)), min))[::-1]
        for (receive, _), position in zip(lane, earliest, strict=True):
            before[peer][max(0, position)].append(receive)


def _in_step(program: Program) -> list[tuple[int, int]]:
    """Rank and position of every step in the order in which they end, with F, I and W of one length and B of two."""
    end: dict[tuple[bool, int, int, int], int] = {}
    free = [0] * len(program.ranks)
    order: list[tuple[int, int, int]] = []
    for rank, position, step in flow(program):
        actions = actions_of(step)
        for kind, stage, microbatch, pipe in actions:
            if kind is not Kind.W:
                forward = kind is Kind.F
                source = stage - 1 if forward else stage + 1
                free[rank] = max(free[rank], end.get((forward, source, microbatch, pipe), 0))
        free[rank] += sum(2 if action.kind is Kind.B else 1 for action in actions)
        order.append((free[rank], rank, position))
        for kind, stage, microbatch, pipe in actions:
            if kind is not Kind.W:
                end[kind is Kind.F, stage, microbatch, pipe] = free[rank]
    return [(rank, position) for _, rank, position in sorted(order)]


def _add_frees(program: Program, after: list[defaultdict[int, list[Command]]]) -> None:
    last = (Kind.F,) if program.forward_only else (Kind.B, Kind.W)
    for rank, position, action in _placed(program):
        if action.kind in last:
            after[rank][position].append(Command(Verb.FREE, action.stage, action.microbatch, action.pipe))


def _add_reductions(program: Program, after: list[defaultdict[int, list[Command]]]) -> None:
    place = program.placement
    last: defaultdict[int, dict[int, int]] = defaultdict(dict)  # position of each rank's last contribution to a group
    for rank, position, action in _placed(program):
        if action.kind in (Kind.B, Kind.W):
            last[place.group(action.pipe, action.stage)][rank] = position
    at = [0] * len(program.ranks)  # where the replicas before have been summed
    for group in sorted(last, key=lambda g: (max(last[g].values()), g)):
        for rank, position in last[group].items():
            if len(place.replicas(group)) > 1:
                position = at[rank] = max(at[rank], position)  # noqa: PLW2901
                after[rank][position].append(Command(Verb.REDUCE_REPLICA, group))
            after[rank][position].append(Command(Verb.REDUCE_GRAD, group))
