"""A pipeline schedule: the actions of each rank in order, with its rules, its file and its drawing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NoReturn

from overlap1f1b.schedule.action import Action, Kind, Pair, Slot, actions_of, levels_of, peaks_of
from overlap1f1b.schedule.placement import SINGLE, Placement
from overlap1f1b.schedule.table import read, write
from overlap1f1b.schedule.values import check_size

_BIT = {Kind.F: 1, Kind.B: 2, Kind.I: 4, Kind.W: 8}
_TRAINED = (3, 13)  # forward and B; forward, I and W
_FAR = 1000  # so many more microbatches than slots: the first missing one is not named


@dataclass(frozen=True)
class Program:
    """The actions of every rank in one training step.

    >>> from overlap1f1b.schedule import build_schedule
    >>> program = build_schedule("combined_1f1b", microbatches=3, extra_warmup=0)
    >>> print(program.draw())
    rank 0: F0 B0‖F1 B1‖F2 B2

    Args:
        name: The generator's name, for reports.
        microbatches: Microbatches of a step over all pipes, M; see :meth:`microbatches_of` for their numbers.
        ranks: ``ranks[r]`` is the tuple of :class:`Action` and :class:`Pair` of rank ``r``.
        peak_activations: Declared limit of (stage, microbatch) whose activations are alive at once, per rank: from the
            forward to the end of its B, or of its W if the backward is split. Both members of a pair count.
        placement: Rank of each stage.
        peak_weights: Declared limit of weight gradients that wait at once, per rank: (stage, microbatch) between I and
            W. Empty if nothing is declared.
        search_seconds: If above 0, an Engine replaces the order by one that a search of this size finds for measured
            costs, within ``peak_activations``; see :func:`~overlap1f1b.found_orders`.
        build: Returns the program of the same schedule for another number of microbatches; None if there is none.
    """

    name: str
    microbatches: int
    ranks: tuple[tuple[Slot, ...], ...]
    peak_activations: tuple[int, ...]
    placement: Placement = SINGLE
    peak_weights: tuple[int, ...] = ()
    search_seconds: float = 0.0
    build: Callable[[int], Program] | None = field(default=None, compare=False, repr=False)

    def of(self, microbatches: int) -> Program:
        """Return the program of the same schedule for another number of microbatches.

        Where the schedule does not allow a smaller number, it is this program without its last microbatches.

        >>> from overlap1f1b.schedule import build_schedule
        >>> print(build_schedule("dualpipev", ranks=2, microbatches=4).of(1).draw())
        rank 0: 0F0 3F0 3I0 3W0 0B0
        rank 1: 1F0 2F0 2B0 1B0

        Raises:
            ValueError: The schedule does not allow the number, or this program is of no schedule and has fewer.
        """
        check_size("microbatches", microbatches)
        if microbatches == self.microbatches:
            return self
        if self.build is not None:
            try:
                return self.build(microbatches)
            except ValueError:
                if microbatches > self.microbatches:
                    raise
        elif microbatches > self.microbatches:
            raise ValueError(
                f"microbatches={microbatches} with program {self.name!r} of no schedule; "
                f"allowed: 1 to {self.microbatches}, its own"
            )
        kept: dict[tuple[int, int], int] = {}  # new numbers, by pipe and number here
        for pipe in range(len(self.placement.pipes)):
            numbers = zip(self.microbatches_of(pipe), self.placement.microbatches(pipe, microbatches), strict=False)
            kept |= {(pipe, old): new for old, new in numbers}
        rows = (_kept(slots, kept) for slots in self.ranks)
        return replace(program_of(self.name, microbatches, self.placement, rows), build=self.build)

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

    def draw(self) -> str:
        """Return one line a rank; ``‖`` joins the members of a pair. Stages are named if there are several."""
        places = {(action.stage, action.pipe) for rank in range(len(self.ranks)) for action in self.actions(rank)}

        def text(action: Action) -> str:
            return f"{action.kind.value}{action.microbatch}" if places == {(0, 0)} else str(action)

        return "\n".join(
            f"rank {rank}: " + " ".join("‖".join(text(a) for a in actions_of(slot)) for slot in slots)
            for rank, slots in enumerate(self.ranks)
        )

    def to_csv(self, path: str | Path, *, header: bool = True) -> None:
        """Write one row a rank, one cell a slot. A file holds an order that stays: ``search_seconds`` is not written.

        Args:
            path: The file.
            header: Whether the file begins with ``#`` lines for name, microbatches, placement and declared peaks.
                Without them torch can read the file, if the program has one pipe.
        """
        said = {
            "name": self.name,
            "pipes": "; ".join(" ".join(map(str, pipe)) for pipe in self.placement.pipes),
            "microbatches": self.microbatches,
            "peak_activations": " ".join(map(str, self.peak_activations)),
            "peak_weights": " ".join(map(str, self.peak_weights)),
        }
        write(self.ranks, path, said if header else {})

    @classmethod
    def from_csv(cls, path: str | Path) -> Program:
        """Return the program of a file of :meth:`to_csv`, or of a table of torch's pipeline schedules.

        Raises:
            ValueError: The file is malformed; the message names line, column and text.
        """
        return cls(**read(path))

    def check(self) -> None:
        """Raise ``ValueError`` for the first broken rule of the schedule, naming rank, position and action.

        Rules:

        - Every (pipe, stage, microbatch) has, on the rank of its stage, one forward and, unless the program is
          forward only, either one B or one I and one W. Each comes after the actions that it needs. Neighbouring
          stages may mix B with I and W.
        - The members of a pair are independent.
        - No ranks wait for each other.
        - No more activations are alive, and no more weight gradients wait, than the program declares; both members of a
          pair count.

        Time is linear in the number of actions.

        >>> from overlap1f1b.schedule.generators.plain import Sequential
        >>> slots = Sequential().program(2, ranks=1).ranks[0]
        >>> Program("mine", microbatches=2, ranks=(slots[1:],), peak_activations=(1,)).check()
        Traceback (most recent call last):
        ValueError: program 'mine', rank 0, position 0: 0B0 comes before 0F0, which it needs
        """
        _check_sizes(self)
        trains = not self.forward_only
        for rank in range(len(self.ranks)):
            _RankCheck(self, rank, trains).run()
        deque(flow(self), maxlen=0)


def _kept(slots: Iterable[Slot], numbers: Mapping[tuple[int, int], int]) -> Iterator[Slot]:
    """Yield the slots of some microbatches, which get new numbers, by pipe and number."""
    for slot in slots:
        here = [action for action in actions_of(slot) if (action.pipe, action.microbatch) in numbers]
        left = [action._replace(microbatch=numbers[action.pipe, action.microbatch]) for action in here]
        yield from (Pair(*left),) if len(left) == 2 else left


def program_of(name: str, microbatches: int, placement: Placement, rows: Iterable[Iterable[Slot]]) -> Program:
    """Return the Program of finished rows; it declares the peaks of activations and weight gradients of the rows."""
    ranks = tuple(map(tuple, rows))
    alive, pending = zip(*map(peaks_of, ranks), strict=True)
    return Program(name, microbatches, ranks, alive, placement, pending)


def flow(program: Program) -> Iterator[tuple[int, Slot]]:
    """Yield every slot once, with its rank, after everything that it needs; slots of one rank keep their order.

    A send never blocks its rank. A pair needs the inputs of both members, and both end together. Time is linear in the
    number of actions.

    Raises:
        ValueError: Some ranks wait for each other; the message names the first slot that waits.
    """
    stages, count = program.placement.stages, program.microbatches
    size = len(program.placement.pipes) * stages * count
    done = bytearray(2 * size)  # for every (pipe, stage, microbatch): its forward, then its B or I
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
        slots = program.ranks[rank]
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


def _check_sizes(program: Program) -> None:
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

    def __init__(self, program: Program, rank: int, trains: bool) -> None:
        self.program, self.rank, self.trains = program, rank, trains
        self.where = f"program {program.name!r}, rank {rank}"
        self.stages = program.placement.stages
        self.seen = {  # for each place and microbatch, bits of the kinds that it has passed
            place: bytearray(program.microbatches) for place in program.placement.places(rank)
        }
        self.allowed = [program.microbatches_of(pipe) for pipe in range(len(program.placement.pipes))]

    def run(self) -> None:
        slots = self.program.ranks[self.rank]
        if not slots:
            raise ValueError(f"{self.where} has no action; allowed: every microbatch's forward")
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

    def _refuse(self, position: int, why: str) -> NoReturn:
        raise ValueError(f"{self.where}, position {position}: {why}")

    def _pair(self, pair: Pair, position: int) -> None:
        forward, backward = pair
        if forward.kind is not Kind.F or backward.kind not in (Kind.B, Kind.I):
            self._refuse(position, f"{pair} must join a forward and a backward")
        if (forward.microbatch, forward.pipe) == (backward.microbatch, backward.pipe):
            self._refuse(position, f"{pair} joins two actions of one microbatch, the second needs the first")

    def _action(self, action: Action, position: int) -> None:
        kind, stage, microbatch, pipe = action
        seen = self.seen.get((pipe, stage))
        if seen is None:
            self._refuse_place(action, position)
        if microbatch not in self.allowed[pipe]:
            allowed = f"{self.allowed[pipe].start} to {self.allowed[pipe].stop - 1}"
            self._refuse(position, f"{action} names microbatch {microbatch}, allowed are {allowed}")
        bits = seen[microbatch]
        if bits & _BIT[kind]:
            self._refuse(position, f"{action} comes a second time")
        if kind is not Kind.F:
            if kind is not Kind.W and bits & 6:
                self._refuse(position, f"{action} repeats the backward of its microbatch")
            needed = Kind.I if kind is Kind.W else Kind.F
            if not bits & _BIT[needed]:
                self._refuse(position, f"{action} comes before {action._replace(kind=needed)}, which it needs")
        if kind is not Kind.W:
            self._check_neighbour(action, position)
        seen[microbatch] = bits | _BIT[kind]

    def _check_neighbour(self, action: Action, position: int) -> None:
        """Check the microbatch's neighbouring stage if this rank holds it too."""
        forward = action.kind is Kind.F
        stage = action.stage + (-1 if forward else 1)
        seen = self.seen.get((action.pipe, stage))
        if seen is not None and not seen[action.microbatch] & (1 if forward else 6):
            self._refuse(position, f"{action} comes before {action._replace(stage=stage)}, which it needs")

    def _refuse_place(self, action: Action, position: int) -> NoReturn:
        pipes = self.program.placement.pipes
        if action.pipe not in range(len(pipes)) or action.stage not in range(self.stages):
            allowed = f"allowed are stages 0 to {self.stages - 1} of pipes 0 to {len(pipes) - 1}"
            self._refuse(position, f"{action} names stage {action.stage} of pipe {action.pipe}, {allowed}")
        held = self.program.placement.rank(action.pipe, action.stage)
        self._refuse(position, f"{action} is on rank {self.rank}, its stage is on rank {held}")

    def _check_peaks(self, alive: int, pending: int, position: int) -> None:
        program, rank = self.program, self.rank
        slot, most = program.ranks[rank][position], program.peak_activations[rank]
        if alive > most:
            self._refuse(position, f"{slot} makes {alive} microbatches alive, declared are {most}")
        if program.peak_weights and pending > program.peak_weights[rank]:
            most = program.peak_weights[rank]
            self._refuse(position, f"{slot} lets {pending} weight gradients wait, declared are {most}")

    def _complete(self) -> None:
        whole = _TRAINED if self.trains else (1,)
        for (pipe, stage), seen in self.seen.items():
            for microbatch in self.allowed[pipe]:
                bits = seen[microbatch]
                if bits not in whole:
                    lacks = "its weight gradient" if bits & 4 else "a backward" if bits & 1 else "a forward"
                    raise ValueError(f"{self.where}: {Action(Kind.F, stage, microbatch, pipe)} lacks {lacks}")
