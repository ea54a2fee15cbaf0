"""A pipeline schedule: the actions of each rank in order, with its rules, its file and its drawing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from overlap1f1b.schedule.action import Action, Kind, Pair, Slot, actions_of, peaks_of
from overlap1f1b.schedule.placement import SINGLE, Placement
from overlap1f1b.schedule.table import read, write
from overlap1f1b.schedule.values import check_kind, check_size, checked, some

_BIT = {Kind.F: 1, Kind.B: 2, Kind.I: 4, Kind.W: 8}
_REPEATED = {Kind.F: 1, Kind.B: 14, Kind.I: 6, Kind.W: 10}
"""Bits of the kinds that a microbatch must not have passed before."""
_TRAINED = (3, 13)  # forward and B; forward, I and W
_FAR = 1000  # so many more microbatches than slots: the first missing one is not named


OPEN = ("combined_1f1b", "auto")
"""Schedules that say what may be alive, and leave the order to costs."""


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
        rows: list[list[Slot]] = [[] for _ in self.ranks]
        for row, slots in zip(rows, self.ranks, strict=True):
            for slot in slots:
                here = [action for action in actions_of(slot) if (action.pipe, action.microbatch) in kept]
                left = [action._replace(microbatch=kept[action.pipe, action.microbatch]) for action in here]
                row.extend((Pair(*left),) if len(left) == 2 else left)
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

    @property
    def open(self) -> bool:
        """Whether a planner may change the order within the limits of memory: the others are what their page says."""
        return self.name.partition("+")[0] in OPEN and not self.forward_only

    def draw(self) -> str:
        """Return one line a rank; ``‖`` joins the members of a pair. Stages are named if there are several."""
        places = {(action.stage, action.pipe) for rank in range(len(self.ranks)) for action in self.actions(rank)}

        def text(action: Action) -> str:
            return f"{action.kind.value}{action.microbatch}" if places == {(0, 0)} else str(action)

        return "\n".join(
            f"rank {rank}: " + " ".join("‖".join(text(a) for a in actions_of(slot)) for slot in slots)
            for rank, slots in enumerate(self.ranks)
        )

    @checked
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
    @checked
    def from_csv(cls, path: str | Path) -> Program:
        """Return the program of a file of :meth:`to_csv`, or of a table of torch's pipeline schedules.

        Raises:
            ValueError: The file cannot be read, is malformed (the message names line, column and text), or breaks a
                rule of schedules, as one that is cut off does.
        """
        said, placement, rows = read(path)
        count = 1 + max(action.microbatch for slots in rows for slot in slots for action in actions_of(slot))
        program = replace(program_of(Path(path).stem, count, placement, rows), **said)
        try:
            program.check()
        except ValueError as error:
            raise ValueError(f"{path}: {error}; allowed: a whole file of to_csv, or of torch's schedules") from None
        return program

    def check(self) -> None:
        """Raise ``ValueError`` for a broken rule of the schedule, naming rank, position and action.

        Rules:

        - Every (pipe, stage, microbatch) has, on the rank of its stage, one forward and, unless the program is
          forward only, either one B or one I and one W. Each comes after the actions that it needs. Neighbouring
          stages may mix B with I and W.
        - The members of a pair are independent.
        - No ranks wait for each other.
        - No more activations are alive, and no more weight gradients wait, than the program declares; both members of a
          pair count.

        Time is linear in the number of actions.

        >>> from overlap1f1b.schedule.generators.sequences import Sequential
        >>> slots = Sequential().program(2, ranks=1).ranks[0]
        >>> Program("mine", microbatches=2, ranks=(slots[1:],), peak_activations=(1,)).check()
        Traceback (most recent call last):
        ValueError: program 'mine', rank 0: 0F0 lacks a forward
        """
        _check_sizes(self)
        for rank in range(len(self.ranks)):
            _check_rank(self, rank)
        deque(flow(self), maxlen=0)
        for rank, slots in enumerate(() if self.forward_only else self.ranks):
            alive, pending = peaks_of(slots)
            where = f"program {self.name!r}, rank {rank}"
            if alive > (most := self.peak_activations[rank]):
                raise ValueError(f"{where}: {alive} microbatches alive, declared are {most}")
            if self.peak_weights and pending > (most := self.peak_weights[rank]):
                raise ValueError(f"{where}: {pending} weight gradients wait, declared are {most}")


def program_of(name: str, microbatches: int, placement: Placement, rows: Iterable[Iterable[Slot]]) -> Program:
    """Return the Program of finished rows; it declares the peaks of activations and weight gradients of the rows."""
    ranks = tuple(map(tuple, rows))
    alive, pending = zip(*map(peaks_of, ranks), strict=True)
    return Program(name, microbatches, ranks, alive, placement, pending)


def flow(program: Program) -> Iterator[tuple[int, Slot]]:
    """Yield every slot once, with its rank, after everything that it needs; slots of one rank keep their order.

    A send never blocks its rank. A pair needs the inputs of both members, and both end together. Time is linear in the
    number of actions. ValueError, with the first slot that waits, if some ranks wait for each other.
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
    if waiting:
        raise ValueError(_why_stuck(program, at, waiting))


def _why_stuck(program: Program, at: list[int], waiting: dict[int, list[int]]) -> str:
    """Return the slot that waits forever; first one that waits for a later slot of its own rank."""
    stages, count, reasons = program.placement.stages, program.microbatches, []
    for key, ranks in waiting.items():
        place, microbatch = divmod(key, count)
        backward, place = divmod(place, len(program.placement.pipes) * stages)
        pipe, stage = divmod(place, stages)
        needed, holder = str(Action(Kind.F, stage, microbatch, pipe)), program.placement.rank(pipe, stage)
        if backward:
            needed = f"the backward of {needed}"
        for rank in ranks:
            why = f"waits forever for {needed} of rank {holder}; allowed: no ranks that wait for each other"
            if holder == rank:
                why = f"comes before {needed}, which it needs"
            slot = f"program {program.name!r}, rank {rank}, position {at[rank]}: {program.ranks[rank][at[rank]]}"
            reasons.append((holder != rank, f"{slot} {why}"))
    return min(reasons)[1]


def _check_sizes(program: Program) -> None:
    """Raise a ValueError for ranks, sizes or slots that do not fit together."""
    named = f"program {program.name!r}"
    check_kind(f"{named}: placement", program.placement, Placement)
    for name in ("ranks", "peak_activations", "peak_weights"):
        check_kind(f"{named}: {name}", getattr(program, name), tuple, list)
    check_size(f"{named}: microbatches", program.microbatches)
    count = len(program.ranks)
    placed, same = program.placement.ranks, "allowed: the same number"
    if placed != count:
        raise ValueError(f"{named} has {count} ranks and a placement over {placed}; {same}")
    declared = {"peak activations": program.peak_activations, "waiting weight gradients": program.peak_weights}
    for what, values in declared.items():
        if len(values) != count and (values or what == "peak activations"):
            raise ValueError(f"{named} declares {what} for {len(values)} ranks and has {count}; {same}")
        for value in values:
            check_size(f"{named}: {what}", value, 0)
    for rank, slots in enumerate(program.ranks):
        for position, slot in enumerate(slots):
            if not _is_slot(slot):
                why = f"{slot!r} is not an action; allowed: an Action of a Kind, or a Pair of two"
                raise ValueError(f"{named}, rank {rank}, position {position}: {why}")
        wanted = program.microbatches_of(0)  # its length may be too large for len()
        if wanted.stop - wanted.start - 2 * len(slots) > _FAR:
            why = f"{len(slots)} actions for {program.microbatches} microbatches; allowed: at least one for each"
            raise ValueError(f"{named}, rank {rank} has {why}")


def _is_slot(slot: object) -> bool:
    members = slot if isinstance(slot, Pair) else (slot,)
    return all(isinstance(member, Action) and isinstance(member.kind, Kind) for member in members)


def _check_rank(program: Program, rank: int) -> None:
    """Check that a rank has the actions of its stages, each once; :func:`flow` checks their order."""
    seen = {  # for each place and microbatch, bits of the kinds that it has passed
        place: bytearray(program.microbatches) for place in program.placement.places(rank)
    }
    numbers = [program.microbatches_of(pipe) for pipe in range(len(program.placement.pipes))]

    def refuse(position: int, why: str) -> NoReturn:
        raise ValueError(f"program {program.name!r}, rank {rank}, position {position}: {why}")

    for position, slot in enumerate(program.ranks[rank]):
        if isinstance(slot, Pair) and (slot.forward.kind is not Kind.F or slot.backward.kind not in (Kind.B, Kind.I)):
            refuse(position, f"{slot} must join a forward and a backward")
        for action in actions_of(slot):
            kind, stage, microbatch, pipe = action
            passed = seen.get((pipe, stage))
            if passed is None:
                places = some([f"{stage}{chr(39) * pipe}" for pipe, stage in seen], 8)
                refuse(position, f"{action} names stage {stage} of pipe {pipe}, allowed are the rank's own: {places}")
            if microbatch not in numbers[pipe]:
                allowed = f"{numbers[pipe].start} to {numbers[pipe].stop - 1}"
                refuse(position, f"{action} names microbatch {microbatch}, allowed are {allowed}")
            bits = passed[microbatch]
            if bits & _REPEATED[kind]:
                again = "comes a second time" if bits & _BIT[kind] else "repeats the backward of its microbatch"
                refuse(position, f"{action} {again}")
            passed[microbatch] = bits | _BIT[kind]
    whole = (1,) if program.forward_only else _TRAINED
    for (pipe, stage), passed in seen.items():
        for microbatch in numbers[pipe]:
            bits = passed[microbatch]
            if bits not in whole:
                lacks = "a forward" if not bits & 1 else "its weight gradient" if bits & 4 else "a backward"
                forward = Action(Kind.F, stage, microbatch, pipe)
                raise ValueError(f"program {program.name!r}, rank {rank}: {forward} lacks {lacks}")
