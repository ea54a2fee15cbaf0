"""Clocks of several ranks, brought together by what they have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from overlap1f1b.plan import Node, Op, Resource
from overlap1f1b.plan.clock import destination
from overlap1f1b.profiling.figures import Lanes
from overlap1f1b.profiling.recording import EXCHANGES, Recording, Step

Landed = Mapping[object, int]


def offsets(steps: Sequence[tuple[Recording, Step]]) -> list[int]:
    """What to add to the times of each rank, in nanoseconds, so that the first rank's step starts at 0.

    Ranks that share experts receive the rows of an exchange at about the same time, and a transfer lands where it is
    sent to when it does where it comes from: the median over these is the difference of two clocks. A rank that has
    nothing in common with another is taken to begin with the first.
    """
    landings = [_landings(recording, step) for recording, step in steps]
    starts = [Lanes(recording, step).window[0] for recording, step in steps]
    found: dict[int, int] = {0: -starts[0]}
    while len(found) < len(steps):
        pairs = ((known, new) for known in found for new in range(len(steps)) if new not in found)
        linked = next(((k, n, gap) for k, n in pairs if (gap := _gap(landings[k], landings[n])) is not None), None)
        if linked is None:
            new = next(new for new in range(len(steps)) if new not in found)
            found[new] = -starts[new]
        else:
            known, new, gap = linked
            found[new] = found[known] + gap
    return [found[place] for place in range(len(steps))]


def _landings(recording: Recording, step: Step) -> Landed:
    """When what ranks have in common had arrived."""
    group = tuple(sorted((name, at) for name, (at, _) in recording.mesh.items() if name != "ep"))
    replica = tuple(sorted((name, at) for name, (at, _) in recording.mesh.items() if name != "pp"))
    ends: dict[int, int] = {}
    for what, end in zip(step.flights.what.tolist(), step.flights.end.tolist(), strict=True):
        ends[what] = max(end, ends.get(what, end))
    landed: dict[object, int] = {}
    for what, end in ends.items():
        node = recording.names[what]
        if not isinstance(node, Node) or node.op is Op.REDUCE:
            continue
        if node.resource in EXCHANGES:
            landed[node, group] = end
        elif node.resource is Resource.PEER:
            key = destination(node) if node.op is Op.SEND else (node.pipe, node.stage, node.microbatch, node.kind)
            landed[key, replica] = end
    return landed


def _gap(known: Landed, new: Landed) -> int | None:
    """How far the clock of one is ahead of the other's."""
    gaps = [known[key] - new[key] for key in known.keys() & new.keys()]
    return int(np.floor(median(gaps))) if gaps else None
