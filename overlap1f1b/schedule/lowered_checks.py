"""The rules that a lowered program keeps, checked before anything runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from overlap1f1b.schedule.action import Action, Kind, actions_of
from overlap1f1b.schedule.checks import check
from overlap1f1b.schedule.lowered_flow import run_lowered
from overlap1f1b.schedule.lowering import Command, LoweredProgram, Verb, passes_to
from overlap1f1b.schedule.program import Program

Lane = tuple[int, int]
Message = tuple[int, Command]
"""Position and SEND or RECV."""


def check_lowered(lowered: LoweredProgram) -> None:
    """Raises ``ValueError`` for the first broken rule, naming rank, position and command.

    Rules: the steps alone are a program that passes :func:`check`; what an action makes is sent or passed on exactly
    once, after it; what an action needs is received before it, exactly once; the messages of a lane are received in the
    order in which they are sent; activations are freed exactly once, after their last use, and no more are held than is
    declared; gradients are reduced exactly once, after the last W or B of their group, over replicas before
    data-parallel ranks and in one order on all ranks that share them; no ranks wait for each other, be sends buffered
    or held until their receives are posted. Time is linear in the number of instructions.
    """
    steps = tuple(tuple(entry for entry in row if not isinstance(entry, Command)) for row in lowered.ranks)
    program = replace(lowered.program, ranks=steps)
    check(program)
    sent: defaultdict[Lane, list[Message]] = defaultdict(list)
    posted: defaultdict[Lane, list[Message]] = defaultdict(list)
    replicas: list[list[int]] = [[] for _ in lowered.ranks]
    for rank, row in enumerate(lowered.ranks):
        _RowCheck(lowered, program, rank).run()
        for position, entry in enumerate(row):
            if isinstance(entry, Command):
                match entry.verb:
                    case Verb.SEND:
                        sent[rank, entry.peer].append((position, entry))
                    case Verb.RECV:
                        posted[entry.peer, rank].append((position, entry))
                    case Verb.REDUCE_REPLICA:
                        replicas[rank].append(entry.stage)
    for lane, sends in sent.items():
        _check_lane(lowered, lane, sends, posted[lane])
    _check_replicas(lowered, replicas)
    for rendezvous in (False, True):
        run_lowered(lowered, rendezvous=rendezvous)


def where(lowered: LoweredProgram, rank: int, position: int | None = None) -> str:
    """The beginning of every message."""
    at = "" if position is None else f", position {position}"
    return f"program {lowered.program.name!r} lowered, rank {rank}{at}"


class _RowCheck:
    """The rules of one rank's row: every command is there once, on the right side of the actions it belongs to."""

    def __init__(self, lowered: LoweredProgram, program: Program, rank: int) -> None:
        self.lowered, self.program, self.rank = lowered, program, rank
        self.at: dict[Command | Action, int] = {}
        """Position of every action and command, B for I; commands without their numbers."""

    def run(self) -> None:
        self._locate()
        known = set()
        for command, earlier, later in self._expected():
            position = self.at.get(command)
            if position is None:
                raise ValueError(f"{where(self.lowered, self.rank)}: {command} is missing")
            for other in earlier:
                if self.at[other] > position:
                    self._refuse(command, f"stands before {other}, which it needs", position)
            for other in later:
                if self.at[other] < position:
                    self._refuse(command, f"stands behind {other}, which needs it", position)
            known.add(command)
        for entry, position in self.at.items():
            if isinstance(entry, Command) and entry not in known:
                self._refuse(entry, "belongs to no action of the program", position)
        if not self.program.forward_only:
            self._check_held()

    def _locate(self) -> None:
        for position, entry in enumerate(self.lowered.ranks[self.rank]):
            if isinstance(entry, Command):
                bare = entry._replace(number=-1)
                if bare in self.at:
                    self._refuse(entry, "stands a second time", position)
                self.at[bare] = position
            else:
                for action in actions_of(entry):
                    self.at[action._replace(kind=Kind.B) if action.kind is Kind.I else action] = position

    def _refuse(self, command: Command | Action, what: str, position: int) -> None:
        raise ValueError(f"{where(self.lowered, self.rank, position)}: {command} {what}")

    def _expected(self) -> Iterator[tuple[Command, list[Command | Action], list[Command | Action]]]:
        """Every command of the rank, what stands before it, and what behind."""
        place = self.program.placement
        contributions: defaultdict[int, list[Command | Action]] = defaultdict(list)
        for action in self.program.actions(self.rank):
            kind, stage, microbatch, pipe = action
            forward = kind is Kind.F
            what = Kind.F if forward else Kind.B
            made = action._replace(kind=Kind.B) if kind is Kind.I else action
            onward = passes_to(action, place)
            message: list[Command | Action] = []
            if onward is not None:
                bare = Command(Verb.LOCAL_PASS, stage, microbatch, pipe, what)
                if onward[1] == self.rank:
                    yield bare, [made], [made._replace(stage=onward[0])]
                else:
                    bare = bare._replace(verb=Verb.SEND, peer=onward[1])
                    yield bare, [made], []
                message = [bare]
            source = stage - 1 if forward else stage + 1
            if kind is not Kind.W and 0 <= source < place.stages:
                peer = place.rank(pipe, source)
                if peer != self.rank:
                    yield Command(Verb.RECV, stage, microbatch, pipe, what, peer), [], [made]
            if kind in (Kind.B, Kind.W):
                contributions[place.group(pipe, stage)].append(made)
            if kind in (Kind.B, Kind.W) or self.program.forward_only:
                yield Command(Verb.FREE, stage, microbatch, pipe), [made, *(message if forward else [])], []
        for group, earlier in contributions.items():
            summed: list[Command | Action] = []
            if len(place.replicas(group)) > 1:
                yield Command(Verb.REDUCE_REPLICA, group), earlier, []
                summed = [Command(Verb.REDUCE_REPLICA, group)]
            yield Command(Verb.REDUCE_GRAD, group), [*earlier, *summed], []

    def _check_held(self) -> None:
        held, limit = 0, self.program.peak_activations[self.rank]
        for position, entry in enumerate(self.lowered.ranks[self.rank]):
            if isinstance(entry, Command):
                held -= entry.verb is Verb.FREE
                continue
            held += sum(action.kind is Kind.F for action in actions_of(entry))
            if held > limit:
                raise ValueError(
                    f"{where(self.lowered, self.rank, position)}: {entry} makes {held} microbatches alive, "
                    f"declared are {limit}"
                )


def _check_lane(lowered: LoweredProgram, lane: Lane, sends: list[Message], receives: list[Message]) -> None:
    """Both ends of a lane count its messages alike; each side lists them in its order."""
    source, destination = lane
    for number, ((sent_at, send), (posted_at, receive)) in enumerate(zip(sends, receives, strict=True)):
        onward = send.stage + (1 if send.kind is Kind.F else -1)
        if (onward, *send[2:5]) != (receive.stage, *receive[2:5]):
            raise ValueError(
                f"{where(lowered, destination, posted_at)}: {receive} is number {number} of the lane "
                f"from rank {source}, whose {send} comes then; allowed: the order of the sends"
            )
        for rank, position, command in ((source, sent_at, send), (destination, posted_at, receive)):
            if command.number != number:
                raise ValueError(
                    f"{where(lowered, rank, position)}: {command} counts as number {command.number} of the lane from "
                    f"rank {source} to {destination}; allowed: {number}"
                )


def _check_replicas(lowered: LoweredProgram, replicas: list[list[int]]) -> None:
    place = lowered.program.placement
    for rank, groups in enumerate(replicas):
        for other in range(rank):
            mine = [group for group in groups if other in place.replicas(group)]
            theirs = [group for group in replicas[other] if rank in place.replicas(group)]
            if mine != theirs:
                raise ValueError(
                    f"{where(lowered, rank)}: replicas of stages {mine} are summed in this order, on rank {other} "
                    f"{theirs}; allowed: one order"
                )
