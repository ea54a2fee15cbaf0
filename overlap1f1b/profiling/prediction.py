"""Prediction: the simulated step for the measured order and times of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from overlap1f1b.plan import CostKey, Node, NodeCosts, Op, Resource, cost_key, play_ranks
from overlap1f1b.profiling.recording import Recording, StepRecord
from overlap1f1b.schedule import Placement
from overlap1f1b.simulation import Timeline


def predict(ranks: Sequence[Recording], number: int) -> dict[int, Timeline]:
    """Return the simulated timelines of one step, by rank, in milliseconds.

    Every rank's nodes are played in the order in which they were issued. A compute node takes its mean over the
    microbatches. A transfer takes the shortest of its times, since longer ones may include waiting. For both, the
    slowest rank counts. Ranks that share experts play the same plan, so one of them is played for each pipeline rank.
    """
    steps = [(recording, _step(recording, number)) for recording in ranks]
    played: dict[int, tuple[Node, ...]] = {}
    size = 1
    for recording, step in steps:
        at, of = recording.mesh.get("pp", (0, 1))
        size = max(size, of)
        played.setdefault(at, recording.order(step))
    if len(played) < size:
        absent = ", ".join(str(at) for at in range(size) if at not in played)
        raise ValueError(f"no file of pipeline rank {absent}, so nothing can be predicted; allowed: all pipeline ranks")
    orders = [played[at] for at in range(size)]
    costs = _costs(steps)
    try:
        held = {(node.pipe, node.stage): rank for rank, order in enumerate(orders) for node in order}
        pipes, stages = max(pipe for pipe, _ in held) + 1, max(stage for _, stage in held) + 1
        placement = Placement(tuple(tuple(held[pipe, stage] for stage in range(stages)) for pipe in range(pipes)))
        spans = play_ranks(orders, placement, costs, counts_block=ranks[0].device)
    except (LookupError, AssertionError, ValueError) as error:
        raise ValueError(
            f"the nodes of step {number} are not a whole step of all stages ({error}), so nothing can be predicted"
        ) from None
    timelines = [Timeline(tuple(rank)) for rank in spans]
    return {recording.rank or 0: timelines[recording.mesh.get("pp", (0, 1))[0]] for recording, _ in steps}


def _step(recording: Recording, number: int) -> StepRecord:
    for step in recording.steps:
        if step.number == number and len(step.issued):
            return step
    raise ValueError(f"{recording.path} has no ranges of step {number}, so nothing can be predicted")


def _costs(steps: Sequence[tuple[Recording, StepRecord]]) -> NodeCosts:
    """Return the milliseconds for which each node occupied its resource."""
    merged: dict[CostKey, float] = {}
    for recording, step in steps:
        took: dict[CostKey, list[float]] = {}
        for spans, computes in ((step.compute, True), (step.flights, False)):
            for what, start, end in spans.whole:
                node = recording.names[what]
                if not isinstance(node, Node) or node.op is Op.RECEIVE:
                    continue
                if computes is (node.resource is Resource.COMPUTE):  # not kernels that pack rows of an exchange
                    took.setdefault(cost_key(node), []).append((end - start) / 1e6)
        for key, times in took.items():
            time = fmean(times) if Node(*key[:2], 0, 0).resource is Resource.COMPUTE else min(times)
            merged[key] = max(merged.get(key, 0.0), time)
    return NodeCosts(by_node=merged)
