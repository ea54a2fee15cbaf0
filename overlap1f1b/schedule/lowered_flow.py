"""Whether ranks can carry out a lowered program, with sends that wait or do not."""

from __future__ import annotations

from collections import defaultdict

from overlap1f1b.schedule.action import Kind, actions_of
from overlap1f1b.schedule.lowering import Command, Instruction, LoweredProgram, Verb

Event = tuple[str, int, int, int]
"""``sent`` or ``posted``, source, destination, number."""


def run_lowered(lowered: LoweredProgram, *, rendezvous: bool) -> None:
    """Carries out every rank's instructions in order; raises ``ValueError`` where ranks wait for each other.

    A RECV is posted and holds nobody up; a step waits until the messages that it needs have been sent. With
    ``rendezvous`` a SEND holds its rank up until its RECV is posted, as a transport without buffers may; otherwise not.
    Reductions run beside the row, in one order on all ranks.
    """
    runner = _Runner(lowered, rendezvous)
    ready = list(range(len(lowered.ranks)))
    while ready:
        ready += runner.advance(ready.pop())
    for rank, position in enumerate(runner.at):
        row = lowered.ranks[rank]
        if position < len(row):
            how = "held until their receives are posted" if rendezvous else "buffered"
            raise ValueError(
                f"program {lowered.program.name!r} lowered, rank {rank}, position {position}: {row[position]} waits "
                f"forever with sends {how}; allowed: no ranks that wait for each other"
            )


class _Runner:
    def __init__(self, lowered: LoweredProgram, rendezvous: bool) -> None:
        self.lowered, self.rendezvous = lowered, rendezvous
        self.at = [0] * len(lowered.ranks)
        self.happened: set[Event] = set()
        self.waiting: defaultdict[Event, list[int]] = defaultdict(list)
        self.inputs: list[dict[tuple[Kind, int, int, int], Event]] = [{} for _ in lowered.ranks]

    def advance(self, rank: int) -> list[int]:
        """Carries out what a rank can, and returns the ranks that waited for it."""
        row, woken = self.lowered.ranks[rank], []
        while self.at[rank] < len(row):
            entry = row[self.at[rank]]
            for event in self._causes(rank, entry):  # before it waits: the others may wait for this
                if event not in self.happened:
                    self.happened.add(event)
                    woken += self.waiting.pop(event, [])
            lacks = next((event for event in self._awaits(rank, entry) if event not in self.happened), None)
            if lacks is not None:
                self.waiting[lacks].append(rank)
                break
            self.at[rank] += 1
        return woken

    def _causes(self, rank: int, entry: Instruction) -> list[Event]:
        if not isinstance(entry, Command):
            return []
        match entry.verb:
            case Verb.SEND:
                return [("sent", rank, entry.peer, entry.number)]
            case Verb.RECV:
                event = ("sent", entry.peer, rank, entry.number)
                self.inputs[rank][entry.kind, entry.stage, entry.microbatch, entry.pipe] = event
                return [("posted", entry.peer, rank, entry.number)]
        return []

    def _awaits(self, rank: int, entry: Instruction) -> list[Event]:
        if not isinstance(entry, Command):
            keys = [
                (Kind.F if action.kind is Kind.F else Kind.B, action.stage, action.microbatch, action.pipe)
                for action in actions_of(entry)
                if action.kind is not Kind.W
            ]
            return [self.inputs[rank][key] for key in keys if key in self.inputs[rank]]
        if self.rendezvous and entry.verb is Verb.SEND:
            return [("posted", rank, entry.peer, entry.number)]
        return []
