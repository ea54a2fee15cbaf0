"""Search for the fastest schedule for given ranks, microbatches, costs and memory."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from overlap1f1b.plan import BlockShape, NodeCosts, Overlap, Plan, bound, fastest, found_orders, pipeline_bound
from overlap1f1b.schedule import (
    AUTO,
    EXTRA_WARMUP,
    SCHEDULES,
    SEARCH_SECONDS,
    Placement,
    Program,
    build_schedule,
    variants,
)
from overlap1f1b.schedule.values import check_size, counted
from overlap1f1b.simulation.actions import Costs, ProgramTimeline
from overlap1f1b.simulation.simulator import simulate
from overlap1f1b.simulation.timeline import PlanTimeline, front_of, play_nodes

Played = ProgramTimeline | PlanTimeline
"""A timeline over ranks, of actions or of nodes."""


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
        peak_activations: Peak of live activations on any rank; the unit is a rank's whole share of the model for one
            microbatch.
        copies: Number of ranks that hold the parameters of a stage: 2 for two pipes, else 1.
        bubble_share: Fraction of the ranks' time in which they do not compute.
    """

    makespan: float
    peak_activations: float
    copies: int
    bubble_share: float

    @classmethod
    def of(cls, program: Program, timeline: Played) -> Outcome:
        """Return the figures of a program's timeline."""
        ranks, placement = range(len(program.ranks)), program.placement
        whole = timeline.makespan * len(ranks)
        return cls(
            makespan=timeline.makespan,
            peak_activations=max(map(timeline.peak_activations, ranks)),
            copies=max(len(placement.replicas(stage)) for stage in range(placement.stages)),
            bubble_share=sum(map(timeline.bubble, ranks)) / whole if whole else 0.0,
        )


CHUNKS = (1, 2, 3, 4)
OVERLAPS: tuple[Overlap, ...] = ("serial", "pairs", 2, 3)
_ONE = ("chunks", 1)  # says nothing in a name


@dataclass(frozen=True)
class Candidate:
    """One way to run a step.

    >>> print(Candidate("combined_1f1b", {"chunks": 2, "extra_warmup": 1}))
    combined_1f1b:chunks=2,extra_warmup=1

    Args:
        schedule: One of ``SCHEDULES``, or ``"auto"``: an order that is found for the costs, in a loop or a V.
        options: Options of the schedule that differ from their defaults.
        overlap: Overlap of nodes, for costs of nodes; None is the model's default.
    """

    schedule: str
    options: Mapping[str, int] = field(default_factory=dict, hash=False)
    overlap: Overlap | None = None

    def __str__(self) -> str:
        options = {**self.options, "overlap": self.overlap}
        words = [f"{name}={value}" for name, value in options.items() if value is not None and (name, value) != _ONE]
        return self.schedule + (":" + ",".join(words) if words else "")

    def build(self, ranks: int, microbatches: int, *, forward_only: bool = False) -> Program:
        """Return its program, or only the program's forwards.

        Raises:
            ValueError: The combination is impossible.
        """
        sizes = {"ranks": ranks, "microbatches": microbatches}
        return build_schedule(self.schedule, forward_only=forward_only, **sizes, **self.options)


@dataclass(frozen=True)
class NodeModel:
    """A model that plays programs by sub-op nodes on resources for compute, exchange and peers.

    Args:
        costs: Costs of the nodes. With launch costs the host waits for counts, as on a GPU with exact sizes. Where a
            copy to host memory takes time, all activations leave that can be back in time.
        layers: Blocks of a rank, divided evenly over its chunks; with two pipes, on each pipe.
        overlap: Overlap of candidates without one.
        parts: Parts of the tokens of each call of experts; ``costs`` are costs of whole calls.
        seconds: Of the search for an order, see :func:`~overlap1f1b.found_orders`.
        progress: Called with the share of a search for an order that is done, after each try.
    """

    costs: NodeCosts
    layers: int
    overlap: Overlap = 3
    parts: int = 1
    seconds: float = SEARCH_SECONDS
    progress: Callable[[float], None] = field(default=lambda share: None, compare=False, repr=False)

    def play(self, program: Program, overlap: Overlap | None = None) -> PlanTimeline:
        """Return a program's timeline; ``ValueError`` if the layers cannot be divided evenly over the chunks."""
        shape, costs = self._shape(program.placement), self._costs
        overlap = self.overlap if overlap is None else overlap
        return self._played(fastest(program, shape, costs, overlap, counts_block=self._waits))

    def _played(self, plans: Sequence[Plan]) -> PlanTimeline:
        return replace(play_nodes(plans[0], self._costs, counts_block=self._waits), front=front_of(plans))

    def synthesized(self, ranks: int, microbatches: int, chunks: int, peak_activations: float | None) -> PlanTimeline:
        """Return the timeline of the best order that is found for the costs: in a loop, or in a V if there are chunks.

        Raises:
            ValueError: The layers cannot be divided evenly over the chunks, or no order can keep the limit of memory.
        """
        placements, plans = _placements(ranks, chunks), list[list[Plan]]()
        options: dict[str, Any] = {"peak_activations": peak_activations, "counts_block": self._waits}
        options["seconds"] = self.seconds / len(placements)
        options["progress"] = lambda share: self.progress((len(plans) + share) / len(placements))
        for placement in placements:
            shape = self._shape(placement)
            plans.append(found_orders(placement, microbatches, shape, self._costs, **options))
        return self._played(min(plans, key=lambda found: found[0].predicted))

    def bound(self, candidate: Candidate, ranks: int, microbatches: int, *, forward_only: bool = False) -> float:
        """Return a lower bound of the time of a candidate: 0 of an impossible one; of ``auto`` that of every order."""
        try:
            if candidate.schedule == AUTO:
                return min(
                    pipeline_bound(placement, microbatches, self._shape(placement), self._costs)
                    for placement in _placements(ranks, candidate.options.get("chunks", 1))
                )
            program = candidate.build(ranks, microbatches, forward_only=forward_only)
            overlap = self.overlap if candidate.overlap is None else candidate.overlap
            return bound(program, self._shape(program.placement), self._costs, overlap)
        except ValueError:
            return 0.0

    @property
    def _costs(self) -> NodeCosts:
        return self.costs.in_parts(self.parts)

    @property
    def _waits(self) -> bool:
        return bool(self.costs.launch)

    def _shape(self, placement: Placement) -> tuple[BlockShape, ...]:
        chunks = placement.stages // placement.ranks
        check_size("layers", self.layers)
        if self.layers % chunks:
            raise ValueError(f"layers={self.layers} over {counted(chunks, 'chunk')}; allowed: a multiple of {chunks}")
        return (BlockShape(expert_calls=1, parts=self.parts, offload=self.costs.moves),) * (self.layers // chunks)


def _placements(ranks: int, chunks: int) -> list[Placement]:
    return list(dict.fromkeys((Placement.loop(ranks, chunks), Placement.v(ranks, chunks))))


Model = Costs | NodeModel
"""A way to play programs: by whole actions, which overlap in pairs only, or by nodes."""


def play(program: Program, model: Model, overlap: Overlap | None = None) -> Played:
    """Return a program's timeline; ``ValueError`` if actions are given an overlap, or the program is impossible."""
    if isinstance(model, NodeModel):
        return model.play(program, overlap)
    if overlap is not None:
        raise ValueError(f"overlap={overlap} with costs of actions; allowed: with costs of sub-ops")
    return simulate(program, model)


def played(
    candidate: Candidate,
    model: Model,
    *,
    ranks: int,
    microbatches: int,
    forward_only: bool = False,
    peak_activations: float | None = None,
) -> tuple[Program, Played]:
    """Return the program of a candidate and its timeline.

    Raises:
        ValueError: The combination is impossible.
    """
    program = candidate.build(ranks, microbatches, forward_only=forward_only)
    if candidate.schedule != AUTO:
        return program, play(program, model, candidate.overlap)
    if candidate.overlap is not None:
        raise ValueError(f"overlap={candidate.overlap} with auto; allowed: none, since all orders are tried")
    if not isinstance(model, NodeModel):
        raise ValueError("auto with costs of actions; allowed: with costs of sub-ops")
    timeline = model.synthesized(ranks, microbatches, candidate.options.get("chunks", 1), peak_activations)
    return timeline.plan.program, timeline


@dataclass(frozen=True)
class Ranking:
    """The result of a search.

    Args:
        found: Candidates within the memory limit, fastest first; among equally fast ones first the one with less
            memory, then with fewer copies of the parameters, then the one that was tried earlier.
        over: Candidates that need more memory, with their peak activations, smallest first.
        refused: Candidates that are impossible for these sizes, and why.
        pruned: Candidates that were not played, since they cannot be among the fastest, with a lower bound of their
            time, smallest first.
    """

    found: tuple[tuple[Candidate, Outcome], ...]
    over: tuple[tuple[Candidate, float], ...]
    refused: tuple[tuple[Candidate, str], ...]
    pruned: tuple[tuple[Candidate, float], ...] = ()


def candidates(
    *,
    schedules: Sequence[str] = SCHEDULES,
    chunks: Sequence[int] = CHUNKS,
    extra_warmup: Sequence[int] = EXTRA_WARMUP,
    overlaps: Sequence[Overlap | None] = (None,),
) -> Iterator[Candidate]:
    """Yield every combination that the schedules accept; a schedule without an option appears at most once for it.

    >>> [str(candidate) for candidate in candidates(schedules=["zb_h1", "zb_v"], chunks=[1, 2])]
    ['zb_h1', 'zb_h1:chunks=2', 'zb_v:chunks=2']
    """
    for schedule, options in variants(schedules, chunks=chunks, extra_warmup=extra_warmup):
        yield from (Candidate(schedule, options, overlap) for overlap in overlaps)


def search(
    tried: Sequence[Candidate],
    *,
    ranks: int,
    microbatches: int,
    model: Model,
    forward_only: bool = False,
    peak_activations: float | None = None,
    top: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Ranking:
    """Simulate the candidates and rank them.

    >>> ranking = search(list(candidates()), ranks=4, microbatches=8, model=Costs(), peak_activations=4)
    >>> [(str(candidate), round(outcome.makespan, 6)) for candidate, outcome in ranking.found[:2]]
    [('zb_h1:chunks=4', 24.75), ('zb_h1:chunks=3', 25.0)]

    Args:
        tried: The candidates.
        ranks: Pipeline ranks.
        microbatches: Microbatches of a step.
        model: Costs of actions, or a :class:`NodeModel` with costs of nodes.
        forward_only: Whether the forwards alone are played.
        peak_activations: Limit of live activations on any rank, in microbatches of a rank's whole share of the model.
        top: Number of wanted candidates. A candidate that by the model's bound cannot be among the fastest ``top`` is
            not played. Candidates with the smallest bound are played first. None plays all.
        progress: Called with the number of candidates done, after each.

    Raises:
        ValueError: ``peak_activations`` is not above 0, or ``top`` is under 1.
    """
    if peak_activations is not None and not (isinstance(peak_activations, Real) and peak_activations > 0):
        raise ValueError(f"peak_activations={peak_activations!r}; allowed: more than 0")
    if top is not None:
        check_size("top", top)
    limit = float("inf") if peak_activations is None else peak_activations + 1e-9
    step: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches, "forward_only": forward_only}
    found: dict[int, Outcome] = {}
    over: list[tuple[float, int]] = []
    refused: list[tuple[int, str]] = []
    pruned: list[tuple[float, int]] = []
    bounds = [0.0] * len(tried)
    if top is not None and isinstance(model, NodeModel):  # playing actions is as fast as finding a bound
        bounds = [model.bound(candidate, **step) for candidate in tried]
    fastest: list[float] = []
    for done, index in enumerate(sorted(range(len(tried)), key=bounds.__getitem__), 1):
        if top is not None and len(fastest) >= top and bounds[index] > fastest[top - 1] * (1 + 1e-8):
            pruned.append((bounds[index], index))
        else:
            try:
                outcome = Outcome.of(*played(tried[index], model, peak_activations=peak_activations, **step))
            except ValueError as error:
                refused.append((index, str(error)))
            else:
                if outcome.peak_activations <= limit:
                    found[index] = outcome
                    insort(fastest, outcome.makespan)
                else:
                    over.append((outcome.peak_activations, index))
        progress(done)

    def order(index: int) -> tuple[float, float, int, int]:
        outcome = found[index]  # rounded, so that the noise of float sums does not order equal times
        return float(f"{outcome.makespan:.9g}"), outcome.peak_activations, outcome.copies, index

    ranked = sorted(found, key=order)
    return Ranking(
        tuple((tried[index], found[index]) for index in ranked),
        tuple((tried[index], peak) for peak, index in sorted(over)),
        tuple((tried[index], why) for index, why in sorted(refused)),
        tuple((tried[index], least) for least, index in sorted(pruned)),
    )
