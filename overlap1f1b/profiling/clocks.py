"""The steps of several ranks: what those that share experts saw, and the differences of their clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor
from statistics import median

from overlap1f1b.plan import OF_PARAMETERS, Node, Op, Resource
from overlap1f1b.plan.clock import destination
from overlap1f1b.profiling.figures import Lanes
from overlap1f1b.profiling.recording import EXCHANGES, Recording, StepRecord
from overlap1f1b.simulation import Flown


def aligned(ranks: Sequence[Recording], number: int) -> list[tuple[Recording, StepRecord, float]]:
    """Return one step of all ranks that have it, and the nanoseconds to add to its times for one clock of all ranks."""
    steps = [(recording, step) for recording in ranks for step in recording.steps if step.number == number]
    return [(*step, by) for step, by in zip(steps, offsets(steps), strict=True)]


def seen_by_others(ranks: Sequence[Recording]) -> dict[StepRecord, list[Mapping[Node, Flown]]]:
    """Return for each step what the other ranks that share its experts saw of its exchanges, as far as files show."""
    together: dict[object, list[Lanes]] = {}
    for recording in ranks if len(ranks) > 1 else ():
        for step in recording.steps if recording.by == "range" else ():
            together.setdefault((step.number, sharing("ep", recording)), []).append(Lanes(recording, step))
    return {
        one.step: [other.causes.flown for other in lanes if other is not one]
        for lanes in together.values()
        for one in lanes
    }


def sharing(dimension: str, recording: Recording) -> tuple[object, ...]:
    """Return the mesh position in all other dimensions; the ranks that share it send to each other along this one."""
    return tuple(sorted((name, at) for name, (at, _) in recording.mesh.items() if name != dimension))


def offsets(steps: Sequence[tuple[Recording, StepRecord]]) -> list[float]:
    """Return the nanoseconds to add to the times of each rank, so that the first rank's step starts at 0.

    Ranks that share experts receive the rows of an exchange at about the same time, and a transfer ends on its sender
    and on its receiver at about the same time. The difference of two clocks is the median over these events. A rank
    that has none in common with another rank is assumed to begin with the first.
    """
    arrivals = [_arrivals(recording, step) for recording, step in steps]
    starts = [Lanes(recording, step).window[0] for recording, step in steps]
    found: dict[int, float] = {}
    for first in range(len(steps)):
        linked = [] if first in found else [first]
        found.setdefault(first, -starts[first])
        for known in linked:
            for new in range(len(steps)):
                if new not in found and (common := arrivals[known].keys() & arrivals[new].keys()):
                    gaps = (arrivals[known][key] - arrivals[new][key] for key in common)
                    found[new] = found[known] + floor(median(gaps))
                    linked.append(new)
    return [found[place] for place in range(len(steps))]


def _arrivals(recording: Recording, step: StepRecord) -> dict[object, int]:
    """Return the arrival time of each transfer that other ranks have too."""
    arrived: dict[object, int] = {}
    over_experts, over_stages = sharing("ep", recording), sharing("pp", recording)
    for what, _, end in step.flights.whole:
        node = recording.names[what]
        if not isinstance(node, Node) or node.op in OF_PARAMETERS:
            continue
        if node.resource in EXCHANGES:
            arrived[node, over_experts] = end
        elif node.resource is Resource.PEER:
            key = destination(node) if node.op is Op.SEND else node.chain
            arrived[key, over_stages] = end
    return arrived
