"""What the first steps learn: where blocks exchange rows by themselves, what nodes cost, which plan is the fastest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from overlap1f1b import plan as planning
from overlap1f1b.cut.exchanges import shown_by_all
from overlap1f1b.cut.options import EngineOptions, parse_memory
from overlap1f1b.cut.stage import Stage, all_shapes
from overlap1f1b.learn.measure import measured_costs
from overlap1f1b.learn.memory import ByteCount
from overlap1f1b.plan import CostKey, Held, NodeCosts, Overlap, Plan, Recompute, Span, StageShape, found_orders
from overlap1f1b.play.result import StepResult
from overlap1f1b.schedule import Kind, Placement, Program, build_schedule, forwards_of, one_by_one
from overlap1f1b.transport import devices
from overlap1f1b.transport.groups import collectives_begun, gathered
from overlap1f1b.transport.mesh import DIMENSIONS, Mesh

T = TypeVar("T")

WARM_STEPS = 3
"""Steps of a device before the one that is measured: kernels are compiled and memory is allocated in them."""
LONE_STEPS = 4
"""Steps that are measured if each has a single microbatch: a median needs several times of each node."""
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
MOST_NUMBERS = 32
"""Numbers of microbatches whose plans are kept: those of the last steps."""


class State(StrEnum):
    """What the steps of an engine are for."""

    MEASURING = "measuring"
    """They play the serial plan, and the last of them times every node (with a single microbatch the last four). Each
    number of parts to choose from has such steps."""
    TRYING = "trying"
    """They play in turns the plans that the costs predict to be the fastest."""
    SETTLED = "settled"
    """They play one plan: the fastest in fact, the predicted one for costs that are given, or one that is set."""


class Tried(NamedTuple):
    """A plan that was tried, with the median of its steps in seconds, of the slowest rank."""

    plan: Plan
    seconds: float

    def __str__(self) -> str:
        """Return name and times of the plan."""
        return f"{self.plan.program.name} {self.plan.order}: {milliseconds(self.seconds)}"


class Choice(NamedTuple):
    """What was chosen by measured costs."""

    parts: int
    costs: NodeCosts
    plans: list[Plan]
    """Those to try, for the present number of microbatches, the one that is predicted to be the fastest first."""
    predicted: dict[int, float]
    """Predicted seconds of a step, by numbers of parts."""


@dataclass(eq=False)
class Numbered:
    """What is played with one number of microbatches: its program, and the plans for the present costs."""

    program: Program
    plan: Plan | None = None  # compiled when it is needed
    is_set: bool = False
    turns: Sequence[Plan] = ()  # plans that are tried
    seconds: list[float] = field(default_factory=list)  # of the steps in turns
    tried: Sequence[Tried] = ()
    evaluation: Plan | None = None
    serial: dict[tuple[str, bool], Plan] = field(default_factory=dict)  # by the plan of the same step

    def keep(self, plan: Plan) -> None:
        """Play a plan from the next step on."""
        if self.plan is not None and plan.program != self.plan.program:
            self.evaluation = None
        self.plan, self.turns = plan, ()


class Tuner:
    """Decides which plan a step plays, by what the steps before it have shown. All ranks decide alike.

    Costs are measured in serial steps. Where compute and exchanges slow each other down, or the host is late, the plan
    that is predicted to be the fastest need not be it, so the fastest few are tried. Costs are those of one microbatch,
    so they hold for any number: the first step with another number has a plan for them, and none is serial.

    ``program`` is the schedule of the first step. ``counts_block`` says whether the host waits for counts.

    Attributes:
        steps: Number of steps so far.
        looks: Whether the next step shows where blocks exchange rows by themselves.
        shapes: Of all stages.
        parts: Parts of a call of experts in the next step.
        predicted: Predicted seconds of a step, by the numbers of parts that were measured.
        verified: Plans whose first step was equal to a plain loop's, by their fingerprints: number of microbatches,
            whether it is of an evaluation, and most microbatches of a stage that were open at once.
        counts_next: Whether the next step that is not compared with a plain loop counts the bytes that each node holds,
            though no plan needs them.
        rendezvous: Whether both ends of a transfer start it at one place in an order of all ranks, for a device.
        outside_groups: Ranks outside of the mesh that must play the same plan, by groups; None until they are set, or
            the first step shows with which ranks blocks communicate.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        mesh: Mesh,
        options: EngineOptions,
        *,
        device: torch.device,
        counts_block: bool,
    ) -> None:
        self._first, self.stages, self.mesh, self.options = program, stages, mesh, options
        self._device, self._on_gpu = device, devices.of(device) is not None
        self.overlap: Overlap = planning.parse_overlap(options.overlap)
        self.shapes = self._gathered({number: stage.shape for number, stage in stages.items()})
        self.rendezvous, self._counts_block = not mesh.on_gloo, counts_block
        self.looks = mesh.exchanging is not None
        self.outside_groups: Sequence[Sequence[int]] | None = None
        self.steps = 0
        self.verified: dict[str, tuple[int, bool, int]] = {}
        self.counts_next = False
        self._told: float | None = None  # when ranks that wait for a search were told last; None if none waits
        self.predicted: dict[int, float] = {}
        self._setting, *more = options.settings
        self.parts = self._setting[1]
        cuts = any(block.expert_calls for stage in self.shapes for block in stage)
        self._more = [(mode, parts) for mode, parts in more if cuts or parts == self.parts]
        self._measured: dict[tuple[Recompute, int], tuple[NodeCosts, tuple[StageShape, ...]]] = {}
        # Steps that are not timed; in the last of them bytes are counted, by a GPU's allocator or under a limit.
        self._warm = WARM_STEPS if self._on_gpu else 1 + (options.memory is not None)
        self._counts = options.memory is not None or self._on_gpu
        if options.memory == "auto" and not self._on_gpu:
            raise ValueError(f"memory='auto' on {device}; allowed: on a GPU, else bytes such as 70GB")
        self._held: Mapping[CostKey, Held] = {}  # what nodes hold, by the last count
        self._rooms: tuple[float, ...] = ()  # bytes that each pipeline rank may hold beyond those before a step
        if self._counts and options.costs is not None:
            with ByteCount(device) as count:
                self._count(count)
        self._begun: Mapping[tuple[int, ...], int] = {}  # collectives before the first step, by their ranks
        self._now = Numbered(program)
        self._cut_plan: Plan | None = None  # to be played when the first step has shown where blocks are cut
        self.costs = options.costs
        if options.plan is not None:
            self.plan = options.plan

    # ------------------------------------------------------------------------------------------- what is played

    @property
    def costs(self) -> NodeCosts | None:
        """Seconds of every node; None until they are measured. If they are set, the plan for them is not tried."""
        return self._costs

    @costs.setter
    def costs(self, costs: NodeCosts | None) -> None:
        self._costs, self._tries = costs, False
        if costs is None and self._counts and not self._held:
            self._warm = max(self._warm, 1)
        self._spans: tuple[Sequence[Span], ...] = ()  # of the steps that have been measured for the costs to come
        self._numbers: dict[int | None, Numbered] = {}  # the last one played comes last
        self._agreed: set[str] = set()  # a step of the same order may measure now
        self._now = self._numbered(self.microbatches)

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the next step."""
        return self._now.program.microbatches

    @microbatches.setter
    def microbatches(self, count: int) -> None:
        self._now = self._numbered(count)

    def _numbered(self, count: int) -> Numbered:
        found = self._numbers.pop(count, None) or Numbered(self._first.of(count))
        if len(self._numbers) >= MOST_NUMBERS:
            old = next((number for number, one in self._numbers.items() if not one.is_set), None)
            self._numbers.pop(old, None)
        self._numbers[count] = found
        return found

    @property
    def program(self) -> Program:
        """Schedule of the next step."""
        return self._now.program

    @property
    def state(self) -> State:
        """What the next step is for."""
        if self._now.is_set:
            return State.SETTLED
        if self._costs is None:
            return State.MEASURING
        if self._tries:
            self._plan_now()
        return State.TRYING if self._now.turns else State.SETTLED

    @property
    def tried(self) -> Sequence[Tried]:
        """The plans that were tried, the fastest first; empty before, and if there was one alone."""
        return self._now.tried

    @property
    def plan(self) -> Plan:
        """Plan of the next step; see :attr:`Engine.plan`."""
        if self.state is State.TRYING:
            return self._now.turns[len(self._now.seconds) % len(self._now.turns)]
        return self._plan_now()

    @plan.setter
    def plan(self, plan: Plan) -> None:
        pairs = [zip(*stage, strict=False) for stage in zip(self.shapes, plan.shapes, strict=False)]
        cut = tuple(tuple(block.cut(other.exchanges) for block, other in stage) for stage in pairs)
        if self.looks and plan.shapes != self.shapes and plan.shapes == cut:
            self._cut_plan = plan
        else:
            self._set(plan, self._now)

    def _set(self, plan: Plan, of: Numbered) -> None:
        if plan.program != of.program or plan.shapes != self.shapes:
            raise ValueError(
                f"a plan of {plan.program.name!r} for other blocks, reductions or microbatches; "
                f"allowed: one of {of.program.name!r} with {of.program.microbatches} for {self.shapes}"
            )
        of.keep(self._met(plan, self._costs))
        self.looks, of.tried, of.is_set = False, (), True

    def _plan_now(self) -> Plan:
        """Return the plan of the next step, of several the one that is predicted to be the fastest."""
        if self._now.plan is None:
            if self._costs is None:
                self._now.plan = self._measured_plan()
            else:
                self._try(self._fastest(self.shapes, self._costs))
        assert self._now.plan is not None
        return self._now.plan

    def _try(self, plans: Sequence[Plan]) -> None:
        """Play plans for the present costs from the next step on: in turns if costs were measured, else the first."""
        turns = [self._met(plan, self._costs) for plan in (worth_trying(plans) if self._tries else plans[:1])]
        self._now.keep(turns[0])
        self._now.turns = turns if len(turns) > 1 else ()

    def evaluation_of(self, microbatches: int) -> Plan:
        """Return the plan of the forwards alone."""
        now = self._numbered(microbatches)
        if now.evaluation is None:
            # Exchanges that blocks make by themselves are hidden in training alone: without gradients nothing tells
            # them from other collectives.
            shapes = tuple(tuple(block._replace(exchanges=()) for block in stage) for stage in self.shapes)
            program = forwards_of(now.program if now.plan is None else now.plan.program)
            now.evaluation = self._compiled(program, shapes, self._costs or NodeCosts(), self.overlap)
        return now.evaluation

    @property
    def notes(self) -> bool:
        """Whether the next step counts the bytes that each node holds; its times are not used."""
        return self.counts_next or (self.state is State.MEASURING and self._counts and self._warm == 1)

    @property
    def held(self) -> Mapping[CostKey, Held]:
        """What nodes hold, by the last count or by the costs; empty if nobody has counted."""
        return self._held or (self._costs.bytes if self._costs is not None else {})

    @property
    def tries_memory(self) -> bool:
        """Whether the next step tries a plan that may need more memory than there is."""
        return self._counts and self.state is State.TRYING

    @property
    def settling(self) -> bool:
        """Whether the next step still measures nodes or tries a plan."""
        return self.state is not State.SETTLED

    @property
    def choice(self) -> str:
        """Name of the plan of the next step, and the times by which it was chosen."""
        name = f"{self.plan.program.name} {self.plan.order}"
        if self.tried:
            return f"{name} (measured step: {', '.join(map(str, self.tried))})"
        if self.state is State.MEASURING:
            return f"{name} (measures the nodes)"
        if self.state is State.TRYING:
            return f"{name} (tried with others in turns; the fastest stays)"
        return f"{name} ({'given' if self._now.is_set else f'predicted step: {milliseconds(self.plan.predicted)}'})"

    @property
    def parts_choice(self) -> str:
        """Number of parts, and the predicted steps by which it was chosen."""
        if len(self.predicted) < 2:
            return str(self.parts)
        steps = ", ".join(f"{parts}: {1e3 * step:.0f} ms" for parts, step in self.predicted.items())
        return f"{self.parts} (predicted step by number of parts: {steps})"

    # ------------------------------------------------------------------------------------------- around a step

    def agree(self, plan: Plan) -> None:
        """Compare the plan of a step or an evaluation over the ranks, once. All ranks must call this.

        Raises:
            ValueError: Ranks have different plans, or not all of them measure.
            LostRankError: A rank failed, or did not answer within the limit.
        """
        if plan.fingerprint not in self._agreed:
            self.mesh.agree({"plan": plan.fingerprint, "measuring": self.state is State.MEASURING})
            self._agreed.add(plan.fingerprint)
        if not self.steps and self.outside_groups is None:
            self._begun = collectives_begun()

    def verifies_next(self, *, grad: bool = True) -> bool:
        """Return whether the next step, or evaluation, is compared with a plain loop, so its batch is read again."""
        return self.must_verify(self.plan if grad else self.evaluation_of(self.microbatches))

    def must_verify(self, plan: Plan) -> bool:
        """Return whether a plan has to be verified: not while nodes are measured, nor if it is the loop's.

        A plan for another number of microbatches than the first has to be if more of them are open at once than before.
        """
        if not self.options.verify or self.state is State.MEASURING:
            return False
        if plan.fingerprint in self.verified:
            return False
        count, forwards, most = _described(plan)
        known = [(c, m) for c, f, m in self.verified.values() if f == forwards]
        if known and count != known[0][0] and most <= max(m for _, m in known):
            return False
        return self._serial_plan(plan, plain=True).fingerprint != plan.fingerprint

    def note_verified(self, plan: Plan) -> None:
        """Note that the first step of a plan was equal to a plain loop's."""
        self.verified[plan.fingerprint] = _described(plan)

    def reference_of(self, plan: Plan) -> Plan:
        """Return the plan of the loop with which a plan is compared."""
        # Over several pipeline ranks a plain loop takes as many times longer: once is enough.
        return self._serial_plan(plan, plain=plan.program.placement.ranks == 1 or not self.verified)

    def learn(
        self,
        plan: Plan,
        result: StepResult,
        transfers: Callable[[], Mapping[CostKey, float]],
        count: ByteCount | None = None,
    ) -> None:
        """Note what a step has shown: it decides how the next ones are played. All ranks must call this.

        ``transfers`` returns the seconds of those between stages, ``count`` has the bytes of nodes, if any.
        """
        state, warm = self.state, self._warm
        self._warm = max(0, warm - 1)
        if self.outside_groups is None:
            # Blocks have begun collectives with ranks outside of the mesh.
            begun = (ranks for ranks, number in collectives_begun().items() if number != self._begun.get(ranks))
            self.outside_groups = [ranks for ranks in begun if not set(ranks) <= self.mesh.labels.keys()]
        if self.looks:
            self._adopt_exchanges()
        if count is not None:
            self._count(count)
            self.counts_next = False
        if state is State.TRYING:
            self._note_time(result.overlap.makespan)
        elif state is State.MEASURING and not warm:
            self._note_nodes(plan, result, transfers)
        self.steps += 1

    def _count(self, count: ByteCount) -> None:
        """Take over what nodes hold on the ranks with the least room for a microbatch: all plans are made for these."""
        limit, held = parse_memory(self.options.memory), count.by_node()
        limit = devices.obtainable(self._device) if limit == "auto" else limit
        room = math.inf if limit is None else float(limit - count.before)
        whole = sum(one.kept for (_, kind, *_), one in held.items() if kind is Kind.F)
        fit = (room - sum(one.first for one in held.values())) / (whole or 1.0)
        every, mine = self.mesh.every((fit, -whole, room, held)), list[tuple[float, Mapping[CostKey, Held]]]()
        for at in range(self.mesh.size("pp")):
            ranks = self.mesh.ranks(pp=[at], over=DIMENSIONS)
            mine.append(min((every[rank] for rank in ranks), key=itemgetter(0, 1))[2:])
        tightest = self._agreed_outside(mine)
        self._held = {key: of for _, held in tightest for key, of in held.items()}
        self._rooms = tuple(room for room, _ in tightest) if limit is not None else ()

    def _adopt_exchanges(self) -> None:
        self.looks = False
        shown = shown_by_all({number: stage.foreign for number, stage in self.stages.items()}, self.mesh)
        shapes = self._gathered({n: stage.cut_at(self.shapes[n], shown) for n, stage in self.stages.items()})
        cut = self._cut_plan
        if shapes != self.shapes or cut is not None:
            self.shapes, self._cut_plan = shapes, None
            self.costs = self._costs
            if cut is not None:
                self._set(cut, self._numbered(cut.program.microbatches))

    def _note_nodes(self, plan: Plan, result: StepResult, transfers: Callable[[], Mapping[CostKey, float]]) -> None:
        """Note the times of the nodes of a step; go on to another number of parts, or to the plans for the costs."""
        self._spans += (result.overlap.spans,)
        if self.program.microbatches == 1 and len(self._spans) < LONE_STEPS:
            return
        measured = self._agreed_outside(
            measured_costs(
                plan.ranks[self.mesh.rank("pp")],
                chain.from_iterable(self._spans),
                self.mesh,
                shared_links=self.mesh.on_gloo,  # it uses one network interface for all groups
                launches=result.times.launches,
                transfers=transfers(),
            )
        )
        self._measured[self._setting[0], self.parts] = replace(measured, bytes=self._held), self.shapes
        if self._more:
            self._setting = mode, parts = self._more.pop(0)
            self._use([[mode] * len(blocks) for blocks in self.shapes], parts)
            self.costs = None
            return
        several = len({mode for mode, _ in self._measured}) > 1
        parts, costs, plans, self.predicted = self._made_by_one(self._with_recompute if several else self._with_parts)
        if plans[0].shapes != self.shapes:
            self._use([[block.recompute for block in blocks] for blocks in plans[0].shapes], parts)
        self._adopt(costs, plans)
        self._measured.clear()

    def _made_by_one(self, make: Callable[[], Choice]) -> Choice:
        """Return what the first rank has made: a search takes long where ranks share processors."""
        made: Choice | ValueError | None = None
        if any(map(self.mesh.rank, DIMENSIONS)):
            while made is None:
                made = self._of_first(None)
        else:
            self._told = time.monotonic()
            try:
                made = make()
            except ValueError as error:
                made = error
            self._told = None
            self._of_first(made)
        if isinstance(made, ValueError):
            raise made
        return made

    def _of_first(self, value: T) -> T:
        return self.mesh.combined(value, lambda _, every: every[0])

    def _go_on(self, *_: object) -> None:
        """Tell ranks that wait for a search that it goes on: the limit of waits is for ranks that do nothing."""
        if self._told is not None and time.monotonic() > self._told + self.mesh.failures.limit.total_seconds() / 4:
            self._told = time.monotonic()
            self._of_first(None)

    def _use(self, modes: Sequence[Sequence[Recompute]], parts: int) -> None:
        """From the next step on, recompute the blocks of each stage as these modes say, and cut calls of experts."""
        self.parts, self._warm, self._held = parts, 1, {}
        mine = {n: stage.shaped(self.shapes[n], modes[n], parts) for n, stage in self.stages.items()}
        self.shapes = self._gathered(mine)

    def _gathered(self, mine: Mapping[int, StageShape]) -> tuple[StageShape, ...]:
        return all_shapes(mine, self._first.placement, self.mesh)

    def _with_parts(self) -> Choice:
        """Choose into how many parts calls of experts are cut."""
        found = {parts: self._fastest(shapes, costs) for (_, parts), (costs, shapes) in self._measured.items()}
        predicted = {parts: plans[0].predicted for parts, plans in found.items()}
        best, *more = found
        for parts in more:
            if predicted[parts] < (1 - LEAST_GAIN) * predicted[best]:
                best = parts
        return Choice(best, self._measured[self._setting[0], best][0], worth_trying(found[best]), predicted)

    def _with_recompute(self) -> Choice:
        """Choose what each block computes again.

        Raises:
            ValueError: No plan keeps within the limit.
        """
        found: list[tuple[NodeCosts, list[Plan]]] = []
        for costs, shapes in planning.choices({mode: found for (mode, _), found in self._measured.items()}):
            plans = self._fitting(shapes, costs)
            if plans and (not found or plans[0].predicted < found[-1][1][0].predicted):
                found.append((costs, plans))
        costs, plans = found[-1] if found else (costs, self._least(shapes, costs))
        return Choice(self.parts, costs, worth_trying(plans), self.predicted)

    def _adopt(self, costs: NodeCosts, plans: Sequence[Plan]) -> None:
        """Play by measured costs from the next step on; ``plans`` are the fastest for the present number."""
        self.costs, self._tries = costs, self.options.tries > 0
        self._try(plans)

    def _note_time(self, seconds: float) -> None:
        """Note the time of a step in turns, and after the last one keep the plan that was the fastest."""
        now = self._now
        now.seconds.append(seconds)
        count = len(now.turns)
        if len(now.seconds) == self.options.tries * count:
            slowest = self.mesh.combined(now.seconds, lambda _, every: list(map(max, zip(*every, strict=True))))
            slowest = self._agreed_outside(slowest)
            times = [median(slowest[number::count]) for number in range(count)]
            now.tried = sorted(map(Tried, now.turns, times), key=lambda one: one.seconds)
            now.keep(now.tried[0].plan)

    def share_plans_with(self, groups: Sequence[Sequence[int]]) -> None:
        """Play the same plans as ranks outside of the mesh; all ranks of these groups must call this before a step."""
        self.outside_groups = groups
        self._costs = self._agreed_outside(self._costs)

    def _agreed_outside(self, measured: T) -> T:
        """Return what was measured on the first of the ranks outside of the mesh that must play the same plan."""
        for ranks in self.outside_groups or ():
            measured = gathered(ranks, measured, self.mesh.failures.limit)[0]
        return measured

    # ------------------------------------------------------------------------------------------- plans

    def _fastest(self, shapes: tuple[StageShape, ...], costs: NodeCosts) -> list[Plan]:
        """Return plans of a step for some costs, the one that is predicted to be the fastest first."""
        return self._fitting(shapes, costs) or self._least(shapes, costs)

    def _fitting(self, shapes: tuple[StageShape, ...], costs: NodeCosts) -> list[Plan]:
        """Return the same without any where none keeps within the limit."""
        program, placement, blocks = self.program, self.program.placement, self._counts_block
        rooms, spared = self._rooms, tuple((1 - SPARE) * room for room in self._rooms)
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
                    progress=self._go_on,
                )
                if kept := [plan for plan in kept if plan.fits(spared)]:
                    return kept
        # For costs that were measured: a GPU has no memory to spare for a forward that gains nothing.
        chooses = self._on_gpu and (self._tries or (self._costs is None and self.options.tries > 0))
        others = lighter(program) if rooms else warmups(program) if chooses else (program,)
        for number, other in enumerate(others):
            self._go_on()
            room = spared if number else rooms  # the lightest holds one microbatch at a time
            found = planning.fastest(other, shapes, costs, self.overlap, counts_block=blocks, rooms=room)
            if found and (not kept or found[0].predicted < (1 - LEAST_WARMUP_GAIN) * kept[0].predicted):
                kept = sorted((*found, *kept), key=lambda plan: plan.predicted)
        return kept

    def _least(self, shapes: tuple[StageShape, ...], costs: NodeCosts) -> NoReturn:
        """Raise ``ValueError``: even the plan that holds the least does not keep within the limit."""
        program = one_by_one(self.program.microbatches, self.program.placement)
        # Where nothing takes time, the first plan is kept, and it gathers the fewest blocks at once.
        plan = planning.compile(program, shapes, NodeCosts(bytes=costs.bytes), "serial")
        over, rank = max((peak - self._rooms[rank], rank) for rank, peak in enumerate(plan.peak_bytes))
        limit = parse_memory(self.options.memory)
        enough = f"{math.ceil((limit + over) / 1e5) / 10:g}MB or more, " if isinstance(limit, int) else ""
        other = "" if self.options.recompute in ("block", "auto") else "recompute='auto', "
        raise ValueError(
            f"memory={self.options.memory!r}: one microbatch after another holds {over / 1e6:.1f} MB more on pipeline "
            f"rank {rank}; allowed: {enough}{other}smaller microbatches"
        )

    def _measured_plan(self) -> Plan:
        """Return the plan of the steps that measure: serial, under a limit of memory with one microbatch at a time."""
        limited = self.options.memory is not None
        program = one_by_one(self.program.microbatches, self.program.placement, split=True) if limited else self.program
        return self._compiled(program, self.shapes, NodeCosts(), "serial")

    def _serial_plan(self, plan: Plan, *, plain: bool) -> Plan:
        """Return the plan of the same step in which actions follow one another.

        Their order is the program's, or one microbatch after another through all stages, as a plain loop has it.
        """
        key, plans = (plan.fingerprint, plain), self._numbers[plan.program.microbatches].serial
        if key not in plans:
            program = plan.program
            if plain:
                program = one_by_one(program.microbatches, program.placement)
                program = forwards_of(program) if plan.program.forward_only else program
            plans[key] = self._compiled(program, plan.shapes, NodeCosts(), "serial")
        return plans[key]

    def _compiled(self, program: Program, shapes: tuple[StageShape, ...], costs: NodeCosts, overlap: Overlap) -> Plan:
        plan = planning.compile(program, shapes, costs, overlap, counts_block=self._counts_block)
        return self._met(plan, costs)

    def _met(self, plan: Plan, costs: NodeCosts | None) -> Plan:
        """Return a plan with both ends of its transfers at one place, if the device needs that."""
        if not self.rendezvous:
            return plan
        return planning.with_rendezvous(plan, costs or NodeCosts(), counts_block=self._counts_block)


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


def worth_trying(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans to try, of plans in the order of their predicted times: near the first, each order once."""
    found: dict[str, Plan] = {}
    for plan in plans:
        if plan.predicted <= TRIED_WITHIN * plans[0].predicted:
            found.setdefault(plan.fingerprint, plan)
    return list(found.values())[:TRIED_PLANS]


def _described(plan: Plan) -> tuple[int, bool, int]:
    """Return number of microbatches, whether a plan has forwards alone, and most microbatches of a stage at once."""
    most = max(map(plan.live, range(len(plan.ranks))))
    return plan.program.microbatches, plan.program.forward_only, most


def milliseconds(seconds: float) -> str:
    """Return a time as text, with three digits or whole milliseconds.

    >>> milliseconds(4.2149), milliseconds(0.0051234)
    ('4215 ms', '5.12 ms')
    """
    return f"{1e3 * seconds:.0f} ms" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
