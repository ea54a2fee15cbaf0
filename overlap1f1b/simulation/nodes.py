"""When the nodes of a plan run, on the lanes of every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from overlap1f1b.plan import NodeCosts, Plan, Resource, play_ranks
from overlap1f1b.schedule.values import check_size
from overlap1f1b.simulation.timeline import Timeline, length
from overlap1f1b.simulation.trace import write_trace


@dataclass(frozen=True)
class PlanTimeline:
    """The timelines of all ranks; times in the unit of the costs, from the start of the step.

    >>> from overlap1f1b.plan import BlockShape, compile
    >>> from overlap1f1b.schedule import build_schedule
    >>> costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5)
    >>> plan = compile(build_schedule("1f1b", ranks=2, microbatches=4), (BlockShape(seams=1),), costs, "serial")
    >>> timeline = play_nodes(plan, costs)
    >>> timeline.makespan, timeline.bubble(0), timeline.peak_activations(0)
    (205.0, 121.0, 2.0)
    """

    plan: Plan
    ranks: tuple[Timeline, ...]

    @cached_property
    def makespan(self) -> float:
        """End of the last node."""
        return max((rank.makespan for rank in self.ranks), default=0.0)

    def busy(self, rank: int) -> float:
        """Time in which a rank computes."""
        return length(self.ranks[rank].busy(Resource.COMPUTE))

    def bubble(self, rank: int) -> float:
        """Time of the makespan in which a rank computes nothing."""
        return self.makespan - self.busy(rank)

    def exposed(self, rank: int) -> float:
        """Time in which an exchange of a rank is in flight and the rank computes nothing."""
        return self.ranks[rank].exposed

    @property
    def hidden_fraction(self) -> float:
        """Share of all ranks' exchange time that has compute beside it; 1 where nothing is exchanged."""
        exchange = sum(rank.exchange for rank in self.ranks)
        return 1.0 - sum(rank.exposed for rank in self.ranks) / exchange if exchange else 1.0

    def peak_activations(self, rank: int) -> float:
        """Most activations alive at once until their backward, in those of a rank's whole share and one microbatch."""
        return self.plan.live(rank) * self.plan.program.placement.share

    def draw(self, width: int = 100) -> str:
        """The lanes of every rank as text, all on one scale; see :meth:`Timeline.draw`."""
        check_size("width", width)
        makespan = self.makespan
        drawn = []
        for number, rank in enumerate(self.ranks):
            scaled = rank.draw(max(1, round(width * rank.makespan / makespan))) if makespan else rank.draw(width)
            drawn.append(f"rank {number}\n{scaled}" if len(self.ranks) > 1 else scaled)
        return "\n".join(drawn)

    def to_chrome_trace(self, path: str | Path, *, unit_us: float = 1000.0) -> None:
        """Writes a trace for Perfetto or chrome://tracing: a process a rank, a track a lane.

        Args:
            path: The JSON file.
            unit_us: Microseconds that one unit of the costs is shown as.
        """
        events = [event for number, rank in enumerate(self.ranks) for event in rank.events(number)]
        write_trace(events, path, unit_us=unit_us)


def play_nodes(plan: Plan, costs: NodeCosts, *, counts_block: bool = False) -> PlanTimeline:
    """The timelines of a plan's nodes: compute, exchange, counts and transfers between stages side by side."""
    spans = play_ranks(plan.ranks, plan.program.placement, costs, counts_block=counts_block)
    return PlanTimeline(plan, tuple(Timeline(tuple(rank)) for rank in spans))
