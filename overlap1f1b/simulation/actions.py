"""Costs of actions, and the timeline of a Program played with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from overlap1f1b.schedule import Action, Kind, Pair, Program, Slot, actions_of
from overlap1f1b.schedule.action import peaks_of
from overlap1f1b.schedule.program import flow
from overlap1f1b.schedule.values import check_number, checked
from overlap1f1b.simulation.trace import Event, write_trace


class SlotSpan(NamedTuple):
    """An action or pair on its rank from ``start`` to ``end``."""

    slot: Slot
    start: float
    end: float


class TransferSpan(NamedTuple):
    """An activation or gradient in transfer; ``action`` made it."""

    action: Action
    source: int
    destination: int
    start: float
    end: float


@dataclass(frozen=True)
class ProgramTimeline:
    """The spans of all ranks; times in the unit of the costs, from the start of the step.

    >>> from overlap1f1b.schedule import build_schedule
    >>> timeline = play_actions(build_schedule("1f1b", ranks=4, microbatches=8), Costs(forward=1, backward=2))
    >>> timeline.makespan, timeline.bubble(0), timeline.peak_activations(0)
    (33.0, 9.0, 4.0)
    """

    program: Program
    costs: Costs
    ranks: tuple[tuple[SlotSpan, ...], ...]
    transfers: tuple[TransferSpan, ...]

    @cached_property
    def makespan(self) -> float:
        """End of the last action."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Return the time in which a rank works."""
        return sum(span.end - span.start for span in self.ranks[rank])

    def bubble(self, rank: int) -> float:
        """Return the part of the makespan in which a rank does nothing."""
        return self.makespan - self.busy(rank)

    def peak_activations(self, rank: int) -> float:
        """Return the peak of live activations; the unit is a rank's whole share for one microbatch."""
        program, placement = self.program, self.program.placement
        peak = 1 if program.forward_only else peaks_of(program.ranks[rank])[0]
        return peak * placement.ranks / placement.stages

    @checked
    def to_chrome_trace(self, path: str | Path, *, unit_us: float = 1000.0) -> None:
        """Write a trace for Perfetto or chrome://tracing: a process a rank, a track for compute and for each lane.

        Args:
            path: The JSON file.
            unit_us: Microseconds in the trace for one unit of the costs.
        """
        events = [
            Event(f"rank {rank}", "compute", str(span.slot), span.start, span.end)
            for rank, spans in enumerate(self.ranks)
            for span in spans
        ]
        events += [
            Event(f"rank {t.source}", f"to rank {t.destination}", f"send of {t.action}", t.start, t.end)
            for t in self.transfers
        ]
        write_trace(events, path, unit_us=unit_us)


def play_actions(program: Program, costs: Costs) -> ProgramTimeline:
    """Return the timeline of a checked program.

    Both members of a pair start when both can, and end together. The output of an action or a pair leaves at its end
    and arrives ``costs.send`` later. Transfers from one rank to another follow each other. Time is linear in the number
    of actions.
    """
    placement, count = program.placement, program.microbatches
    stages, share = placement.stages, placement.share
    cost = {kind: costs.of(Action(kind, 0, 0), share) for kind in Kind}
    fused = {kind: costs.pair * (cost[Kind.F] + cost[kind]) for kind in Kind}
    there: dict[tuple[bool, int], float] = {}  # arrival of a neighbour's result on the rank of a place
    free = [0.0] * len(program.ranks)
    lanes: dict[tuple[int, int], float] = {}
    ranks: list[list[SlotSpan]] = [[] for _ in program.ranks]
    transfers: list[TransferSpan] = []
    for rank, slot in flow(program):
        actions = actions_of(slot)
        start = free[rank]
        for kind, stage, microbatch, pipe in actions:
            if kind is not Kind.W:
                key = (pipe * stages + stage) * count + microbatch
                start = max(start, there.pop((kind is Kind.F, key), 0.0))
        end = start + (fused[slot.backward.kind] if isinstance(slot, Pair) else cost[slot.kind])
        free[rank] = end
        ranks[rank].append(SlotSpan(slot, start, end))
        for action in actions:
            kind, stage, microbatch, pipe = action
            onward = stage + 1 if kind is Kind.F else stage - 1
            if kind is Kind.W or not 0 <= onward < stages:
                continue
            arrival, to = end, placement.pipes[pipe][onward]
            if to != rank and costs.send:
                leaves = max(end, lanes.get((rank, to), 0.0))
                arrival = lanes[rank, to] = leaves + costs.send
                transfers.append(TransferSpan(action, rank, to, leaves, arrival))
            there[kind is Kind.F, (pipe * stages + onward) * count + microbatch] = arrival
    return ProgramTimeline(program, costs, tuple(map(tuple, ranks)), tuple(transfers))


@dataclass(frozen=True)
class Costs:
    """Costs of actions, in any one unit of time, for a rank's whole share of the model and one microbatch.

    A stage that is one of v chunks of its rank costs 1/v of this.

    >>> Costs(forward=1, backward=2, weight=1).of(Pair.parse("(0F1;0B0)OVERLAP_F_B"))
    3.0

    Args:
        forward: F.
        backward: B, input and weight gradients together.
        weight: W, the part of B that computes weight gradients; the input gradient takes ``backward − weight``.
        pair: Time of a fused pair, as a fraction of the sum of its members: F&B / (F+B).
        send: Time of one transfer between two ranks; transfers from one rank to another go one after the other.

    Raises:
        ValueError: A cost is not a finite number, is negative, or is zero although its action must take time.
    """

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 1.0
    pair: float = 1.0
    send: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value, above=name not in ("weight", "send"))
        if self.weight >= self.backward:
            raise ValueError(
                f"weight={self.weight} with backward={self.backward}, which it is a part of; "
                f"allowed: from 0 to below {self.backward}"
            )

    def of(self, slot: Slot, share: float = 1.0) -> float:
        """Return the time of an action or pair on a stage that is the fraction ``share`` of a rank's part."""
        if isinstance(slot, Pair):
            return self.pair * (self.of(slot.forward, share) + self.of(slot.backward, share))
        whole = {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.backward - self.weight, Kind.W: self.weight}
        return share * whole[slot.kind]
