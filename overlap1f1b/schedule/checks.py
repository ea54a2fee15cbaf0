"""The rules of a program, checked before anything runs."""

from __future__ import annotations

from collections import deque
from itertools import islice

from overlap1f1b.schedule.action import Action, Kind, Pair, actions_of, levels_of
from overlap1f1b.schedule.rows import Rows, flow
from overlap1f1b.schedule.values import check_size

_BIT = {Kind.F: 1, Kind.B: 2, Kind.I: 4, Kind.W: 8}
_TRAINED = (3, 13)  # forward and B; forward, I and W
_FAR = 1000  # so many more microbatches than slots: the first missing one is not named


def check(program: Rows) -> None:
    """Raise ``ValueError`` for the first broken rule, naming rank, position and action.

    Rules:

    - Every (pipe, stage, microbatch) has, on the rank of its stage, one forward and, unless the program is forward
      only, either one B or one I and one W. Each comes after the actions that it needs. Neighbouring stages may mix B
      with I and W.
    - The members of a pair are independent.
    - No ranks wait for each other.
    - No more activations are alive, and no more weight gradients wait, than the program declares; both members of a
      pair count.

    Time is linear in the number of actions.

    >>> from overlap1f1b.schedule import Program
    >>> from overlap1f1b.schedule.generators.plain import sequential
    >>> slots = sequential(2).ranks[0]
    >>> check(Program("mine", microbatches=2, ranks=(slots[1:],), peak_activations=(1,)))
    Traceback (most recent call last):
    ValueError: program 'mine', rank 0, position 0: 0B0 comes before 0F0, which it needs
    """
    _check_sizes(program)
    trains = not program.forward_only
    for rank in range(len(program.ranks)):
        _RankCheck(program, rank, trains).run()
    deque(flow(program), maxlen=0)


def _check_sizes(program: Rows) -> None:
    check_size(f"program {program.name!r}: microbatches", program.microbatches)
    count = len(program.ranks)
    if program.placement.ranks != count:
        raise ValueError(
            f"program {program.name!r} has {count} ranks and a placement over {program.placement.ranks}; "
            "allowed: the same number"
        )
    declared = {"peak activations": program.peak_activations, "waiting weight gradients": program.peak_weights}
    for what, values in declared.items():
        if len(values) != count and (values or what == "peak activations"):
            raise ValueError(
                f"program {program.name!r} declares {what} for {len(values)} ranks "
                f"and has {count}; allowed: the same number"
            )
        for value in values:
            check_size(f"program {program.name!r}: {what}", value, 0)
    for rank, slots in enumerate(program.ranks):
        for position, slot in enumerate(slots):
            if not _is_slot(slot):
                raise ValueError(
                    f"program {program.name!r}, rank {rank}, position {position}: {slot!r} is not an action; "
                    "allowed: an Action of a Kind, or a Pair of two"
                )
        wanted = program.microbatches_of(0)  # its length may be too large for len()
        if wanted.stop - wanted.start - 2 * len(slots) > _FAR:
            raise ValueError(
                f"program {program.name!r}, rank {rank} has {len(slots)} actions for "
                f"{program.microbatches} microbatches; allowed: at least one for each"
            )


def _is_slot(slot: object) -> bool:
    members = slot if isinstance(slot, Pair) else (slot,)
    return all(isinstance(member, Action) and isinstance(member.kind, Kind) for member in members)


class _RankCheck:
    """The rules of one rank's row."""

    def __init__(self, program: Rows, rank: int, trains: bool) -> None:
        self.program, self.rank, self.trains = program, rank, trains
        self.stages = program.placement.stages
        self.seen = {  # for each place and microbatch, bits of the kinds that it has passed
            place: bytearray(program.microbatches) for place in program.placement.places(rank)
        }
        self.allowed = [program.microbatches_of(pipe) for pipe in range(len(program.placement.pipes))]

    def run(self) -> None:
        slots = self.program.ranks[self.rank]
        if not slots:
            raise ValueError(f"{self._where()} has no action; allowed: every microbatch's forward")
        levels = levels_of(slots)
        for position, slot in enumerate(slots):
            if isinstance(slot, Pair):
                self._pair(slot, position)
            actions = actions_of(slot)
            for action in actions:
                self._action(action, position)
            for alive, pending in islice(levels, len(actions)) if self.trains else ():
                self._check_peaks(alive, pending, position)
        self._complete()

    def _where(self, position: int | None = None) -> str:
        at = "" if position is None else f", position {position}"
        return f"program {self.program.name!r}, rank {self.rank}{at}"

    def _pair(self, pair: Pair, position: int) -> None:
        forward, backward = pair
        if forward.kind is not Kind.F or backward.kind not in (Kind.B, Kind.I):
            raise ValueError(f"{self._where(position)}: {pair} must join a forward and a backward")
        if (forward.microbatch, forward.pipe) == (backward.microbatch, backward.pipe):
            raise ValueError(
                f"{self._where(position)}: {pair} joins two actions of one microbatch, the second needs the first"
            )

    def _action(self, action: Action, position: int) -> None:
        kind, stage, microbatch, pipe = action
        seen = self.seen.get((pipe, stage))
        if seen is None:
            self._refuse_place(action, position)
            return
        allowed = self.allowed[pipe]
        if microbatch not in allowed:
            raise ValueError(
                f"{self._where(position)}: {action} names microbatch {microbatch}, "
                f"allowed are {allowed.start} to {allowed.stop - 1}"
            )
        bits = seen[microbatch]
        if bits & _BIT[kind]:
            raise ValueError(f"{self._where(position)}: {action} comes a second time")
        if kind is not Kind.F:
            if kind is not Kind.W and bits & 6:
                raise ValueError(f"{self._where(position)}: {action} repeats the backward of its microbatch")
            needed = Kind.I if kind is Kind.W else Kind.F
            if not bits & _BIT[needed]:
                self._refuse_order(action, action._replace(kind=needed), position)
        if kind is not Kind.W:
            self._check_neighbour(action, position)
        seen[microbatch] = bits | _BIT[kind]

    def _check_neighbour(self, action: Action, position: int) -> None:
        """Check the microbatch's neighbouring stage if this rank holds it too."""
        forward = action.kind is Kind.F
        neighbour = self.seen.get((action.pipe, action.stage + (-1 if forward else 1)))
        if neighbour is not None and not neighbour[action.microbatch] & (1 if forward else 6):
            self._refuse_order(action, action._replace(stage=action.stage + (-1 if forward else 1)), position)

    def _refuse_order(self, action: Action, needed: Action, position: int) -> None:
        raise ValueError(f"{self._where(position)}: {action} comes before {needed}, which it needs")

    def _refuse_place(self, action: Action, position: int) -> None:
        pipes = self.program.placement.pipes
        if action.pipe not in range(len(pipes)) or action.stage not in range(self.stages):
            raise ValueError(
                f"{self._where(position)}: {action} names stage {action.stage} of pipe {action.pipe}, "
                f"allowed are stages 0 to {self.stages - 1} of pipes 0 to {len(pipes) - 1}"
            )
        held = self.program.placement.rank(action.pipe, action.stage)
        raise ValueError(f"{self._where(position)}: {action} is on rank {self.rank}, its stage is on rank {held}")

    def _check_peaks(self, alive: int, pending: int, position: int) -> None:
        program, rank = self.program, self.rank
        slot = program.ranks[rank][position]
        if alive > program.peak_activations[rank]:
            raise ValueError(
                f"{self._where(position)}: {slot} makes {alive} microbatches alive, "
                f"declared are {program.peak_activations[rank]}"
            )
        if program.peak_weights and pending > program.peak_weights[rank]:
            raise ValueError(
                f"{self._where(position)}: {slot} lets {pending} weight gradients wait, "
                f"declared are {program.peak_weights[rank]}"
            )

    def _complete(self) -> None:
        whole = _TRAINED if self.trains else (1,)
        for (pipe, stage), seen in self.seen.items():
            for microbatch in self.allowed[pipe]:
                bits = seen[microbatch]
                if bits not in whole:
                    lacks = "its weight gradient" if bits & 4 else "a backward" if bits & 1 else "a forward"
                    raise ValueError(f"{self._where()}: {Action(Kind.F, stage, microbatch, pipe)} lacks {lacks}")
