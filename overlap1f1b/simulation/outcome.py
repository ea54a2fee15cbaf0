"""What a simulated program comes to in a few figures, so that programs can be ranked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from overlap1f1b.schedule import Program


class Played(Protocol):
    """A timeline over ranks, whatever its costs were given for."""

    @property
    def makespan(self) -> float:
        """End of the last span."""

    def busy(self, rank: int) -> float:
        """Time in which a rank computes."""

    def bubble(self, rank: int) -> float:
        """Time of the makespan in which it does not."""

    def peak_activations(self, rank: int) -> float:
        """Most activations alive at once, in those of a rank's whole share and one microbatch."""


@dataclass(frozen=True, order=True)
class Outcome:
    """Figures of one program; outcomes are ordered by makespan, then by memory.

    >>> from overlap1f1b.schedule import build_schedule
    >>> from overlap1f1b.simulation import Costs, simulate
    >>> program = build_schedule("1f1b", ranks=4, microbatches=8)
    >>> Outcome.of(program, simulate(program, Costs(forward=1, backward=2)))
    Outcome(makespan=33.0, peak_activations=4.0, copies=1, bubble_share=0.2727272727272727)

    Args:
        makespan: Time of the step, in the unit of the costs.
        peak_activations: Most activations alive at once on any rank, in those of a rank's whole share of the model and
            one microbatch.
        copies: Ranks that hold the parameters of a stage: 2 for two pipes, else 1.
        bubble_share: Part of the ranks' time in which they do not compute.
    """

    makespan: float
    peak_activations: float
    copies: int
    bubble_share: float

    @classmethod
    def of(cls, program: Program, timeline: Played) -> Outcome:
        """The figures of a program's timeline."""
        ranks = range(len(program.ranks))
        whole = timeline.makespan * len(ranks)
        return cls(
            makespan=timeline.makespan,
            peak_activations=max(map(timeline.peak_activations, ranks)),
            copies=copies_of(program),
            bubble_share=sum(map(timeline.bubble, ranks)) / whole if whole else 0.0,
        )


def copies_of(program: Program) -> int:
    """How many ranks hold the parameters of a stage.

    >>> from overlap1f1b.schedule import build_schedule
    >>> copies_of(build_schedule("dualpipe", ranks=4, microbatches=8))
    2
    """
    placement = program.placement
    return max(len(placement.replicas(stage)) for stage in range(placement.stages))
