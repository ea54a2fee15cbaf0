"""Runs of known figures: what the simulation says, written as records."""

from pathlib import Path

from overlap1f1b.plan import BlockShape, NodeCosts, Overlap, compile
from overlap1f1b.schedule import build_schedule
from overlap1f1b.simulation import PlanTimeline, play_nodes
from tests.profiling.synthetic import spans_of, write_record

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, combine=4, counts=0.5, send=1, reduce=2, aggregate=1)


def simulated(schedule: str, overlap: Overlap, *, ranks: int = 2, microbatches: int = 4) -> PlanTimeline:
    """A plan of blocks with experts, as it runs by these costs."""
    program = build_schedule(schedule, ranks=ranks, microbatches=microbatches)
    plan = compile(program, (BlockShape(1, reduced=True), BlockShape(0)), COSTS, overlap)
    return play_nodes(plan, COSTS)


def write_run(folder: Path, timeline: PlanTimeline, *, steps: int = 1, experts: int = 1) -> Path:
    """One file a rank; every pipeline rank once for each that shares its experts."""
    folder.mkdir(exist_ok=True)
    size = len(timeline.ranks)
    for number, rank in enumerate(timeline.ranks):
        for expert in range(experts):
            mesh = {"pp": (number, size), "ep": (expert, experts)}
            place = number * experts + expert
            spans = [spans_of(rank.spans)] * steps
            write_record(folder / f"rank{place}.json", spans, rank=place, mesh=mesh, seconds=timeline.makespan / 1000)
    return folder
