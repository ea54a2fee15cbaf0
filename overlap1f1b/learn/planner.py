"""Plans of an engine's blocks for costs and a limit of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from overlap1f1b import plan as planning
from overlap1f1b.cut.options import EngineOptions, parse_memory
from overlap1f1b.learn.purpose import Setting
from overlap1f1b.plan import NodeCosts, Overlap, Plan, StageShape, found_orders
from overlap1f1b.schedule import Placement, Program, build_schedule, one_by_one

Shapes = tuple[StageShape, ...]
Measured = Mapping[Setting, tuple[NodeCosts, Shapes]]
"""Costs of the nodes, and the shapes of the blocks, in each setting."""

LEAST_WARMUP_GAIN = 0.01
"""Least predicted gain, as a share of the step, for which memory is used for another forward to warm up."""
SPARE = 0.03
"""Part of the room that is left by plans with several open microbatches: not all are as large as the median."""
LEAST_GAIN = 0.02
"""Least predicted gain, as a share of the step, for which more parts are used: a smaller one may be noise."""
TRIED_PLANS = 3
"""How many plans are tried at most."""
TRIED_WITHIN = 1.1
"""Plans are tried whose predicted time is at most this multiple of the fastest's."""


class Choice(NamedTuple):
    """What was chosen by measured costs."""

    costs: NodeCosts
    plans: list[Plan]
    """The one that is predicted to be the fastest first."""
    predicted: dict[int, float]
    """Predicted seconds of a step, by numbers of parts."""


@dataclass(frozen=True)
class Planner:
    """Compiles plans."""

    program: Program  # schedule of the first step
    options: EngineOptions  # ``overlap``; ``memory`` and ``recompute`` for messages
    rendezvous: bool  # whether both ends of a transfer start it at one place in an order of all ranks, for a device
    counts_block: bool  # whether the host waits for counts
    progress: Callable[[float], None] = lambda _: None  # called while plans are searched
    sparing: bool = False  # whether another forward warms up only if that gains; else the schedule is as it was given
    rooms: tuple[float, ...] = ()  # bytes that each pipeline rank may hold beyond those before a step; empty: any
    timed: bool = False  # whether the clock ends a search: only where one rank searches for all

    @property
    def overlap(self) -> Overlap:
        """How actions overlap."""
        return planning.parse_overlap(self.options.overlap)

    # ---------------------------------------------------------------------------------------------- one plan

    def compiled(self, program: Program, shapes: Shapes, costs: NodeCosts, overlap: Overlap) -> Plan:
        """Return the plan of a program that is predicted to be the fastest."""
        plan = planning.compile(program, shapes, costs, overlap, counts_block=self.counts_block)
        return self.with_rendezvous(plan, costs)

    def with_rendezvous(self, plan: Plan, costs: NodeCosts | None) -> Plan:
        """Return a plan with both ends of its transfers at one place, if the device needs that."""
        if not self.rendezvous:
            return plan
        return planning.with_rendezvous(plan, costs or NodeCosts(), counts_block=self.counts_block)

    def serial(self, program: Program, shapes: Shapes) -> Plan:
        """Return the plan in which the actions of a program follow one another."""
        return self.compiled(program, shapes, NodeCosts(), "serial")

    # ---------------------------------------------------------------------------------------------- of several

    def ranked(self, program: Program, shapes: Shapes, costs: NodeCosts) -> list[Plan]:
        """Return plans of a step, the predicted fastest first; ValueError if none fits, or costs have no bytes."""
        return self._fitting(program, shapes, costs) or self._refuse(program, shapes, costs)

    def _fitting(self, program: Program, shapes: Shapes, costs: NodeCosts) -> list[Plan]:
        """Return plans as :meth:`ranked` does, and none where none keeps within the limit."""
        rooms, spared = self.rooms, tuple((1 - SPARE) * room for room in self.rooms)
        placement, blocks = program.placement, self.counts_block
        if rooms and not costs.bytes:
            raise ValueError("memory with costs that have no bytes; allowed: costs of an engine with it, or none")
        kept = list[Plan]()
        if program.search_seconds:
            most = min(program.peak_activations)
            for live in range(most, 0, -max(1, placement.stages // placement.ranks)) if rooms else (most,):
                kept = found_orders(
                    placement,
                    program.microbatches,
                    shapes,
                    costs,
                    peak_activations=live * placement.share,
                    seconds=program.search_seconds,
                    counts_block=blocks,
                    timed=self.timed,
                    progress=self.progress,
                )
                if any(block.offload for stage in shapes for block in stage):
                    kept = planning.leaving(kept, costs, spared, every=self._every, counts_block=blocks)
                if kept := [plan for plan in kept if plan.fits(spared)]:
                    return kept
        others = lighter(program) if rooms else warmups(program) if self.sparing else (program,)
        for number, other in enumerate(others):
            options: Any = {"counts_block": blocks, "every": self._every, "progress": self.progress}
            options["rooms"] = spared if number else rooms  # the lightest holds one microbatch at a time
            found = planning.fastest(other, shapes, costs, self.overlap, **options)
            gain = 0.0 if self.options.offload else LEAST_WARMUP_GAIN  # memory is there for other plans
            if found and (not kept or found[0].predicted < (1 - gain) * kept[0].predicted):
                first, *more = found  # of those as fast it holds the least
                kept = [first, *sorted((*more, *kept), key=lambda plan: plan.predicted)]
        return kept

    @property
    def _every(self) -> bool:
        """Whether all activations leave to host memory where they may."""
        return self.options.offload is True

    def _refuse(self, program: Program, shapes: Shapes, costs: NodeCosts) -> NoReturn:
        """Raise the ValueError of a limit under which no plan fits, with one that would do."""
        program = one_by_one(program.microbatches, program.placement)
        # Where nothing takes time, the first plan is kept, and it gathers the fewest blocks at once.
        plan = planning.compile(program, shapes, NodeCosts(bytes=costs.bytes), "serial")
        over, rank = max((peak - self.rooms[rank], rank) for rank, peak in enumerate(plan.peak_bytes))
        limit = parse_memory(self.options.memory)
        enough = f"{megabytes(limit + over)} or more, " if isinstance(limit, int) else ""
        other = "" if self.options.recompute in ("block", "auto") else "recompute='auto', "
        other += "" if self.options.offload else "offload='auto', "
        raise ValueError(
            f"memory={self.options.memory!r}: one microbatch after another holds {over / 1e6:.1f} MB more on pipeline "
            f"rank {rank}; allowed: {enough}{other}smaller microbatches"
        )

    # ---------------------------------------------------------------------------------------------- of settings

    def chosen(self, program: Program, measured: Measured) -> Choice:
        """Choose what each block recomputes, or the parts of a call; ValueError if no plan keeps within the limit."""
        if len({mode for mode, _ in measured}) > 1:
            return self._with_recompute(program, measured)
        found = {parts: (costs, self.ranked(program, of, costs)) for (_, parts), (costs, of) in measured.items()}
        predicted = {parts: plans[0].predicted for parts, (_, plans) in found.items()}
        best, *more = found
        for parts in more:
            if predicted[parts] < (1 - LEAST_GAIN) * predicted[best]:
                best = parts
        return Choice(*found[best], predicted)

    def _with_recompute(self, program: Program, measured: Measured) -> Choice:
        best: Choice | None = None
        for costs, shapes in planning.choices({mode: found for (mode, _), found in measured.items()}):
            plans = self._fitting(program, shapes, costs)
            if plans and (best is None or plans[0].predicted < best.plans[0].predicted):
                best = Choice(costs, plans, {})
        return best or self._refuse(program, shapes, costs)


def lighter(program: Program) -> Iterator[Program]:
    """Yield one microbatch after another, and the program with fewer forwards to warm up and with all, lightest first.

    >>> [other.name for other in lighter(build_schedule("combined_1f1b", microbatches=4, extra_warmup=2))]
    ['sequential', 'combined_1f1b', 'combined_1f1b+1', 'combined_1f1b+2']
    """
    placement = program.placement
    yield one_by_one(program.microbatches, placement)
    if placement.ranks > 1 and placement == Placement.loop(placement.ranks):
        yield build_schedule("1f1b", ranks=placement.ranks, microbatches=program.microbatches)
    yield from warmups(program)


def warmups(program: Program) -> Iterator[Program]:
    """Yield the program with fewer forwards to warm up and with all, fewest first.

    >>> [other.name for other in warmups(build_schedule("combined_1f1b", microbatches=4))]
    ['combined_1f1b', 'combined_1f1b+1']
    """
    placement, (name, _, extra) = program.placement, program.name.partition("+")
    for less in range(int(extra) if extra.isdecimal() else 0):
        sizes: dict[str, Any] = {"ranks": placement.ranks, "chunks": placement.stages // placement.ranks}
        yield build_schedule(name, microbatches=program.microbatches, extra_warmup=less, **sizes)
    yield program


def worth_trying(plans: Sequence[Plan], rooms: Sequence[float] = ()) -> list[Plan]:
    """Return the plans to try, of plans in the order of their predicted times: near the first, each order once.

    Plans that hold more bytes than there are, ``rooms`` on each pipeline rank, are left out. If all do, the one that
    holds the fewest is kept.
    """
    fitting = [plan for plan in plans if plan.fits(rooms)] or [min(plans, key=lambda plan: sum(plan.peak_bytes))]
    found: dict[str, Plan] = {}
    for plan in fitting:
        if plan.predicted <= TRIED_WITHIN * fitting[0].predicted:
            found.setdefault(plan.fingerprint, plan)
    return list(found.values())[:TRIED_PLANS]


def megabytes(size: float) -> str:
    """Return a number of bytes as a limit of memory has it, rounded up.

    >>> megabytes(1_230_001)
    '1.3MB'
    """
    return f"{math.ceil(size / 1e5) / 10:g}MB"
