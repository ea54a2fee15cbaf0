"""Decides which plan a step plays, by what the steps before it have shown. All ranks decide alike.

Costs are measured in serial steps. Where compute and exchanges slow each other down, or the host is late, the plan that
is predicted to be the fastest need not be it, so the fastest few are tried. Costs are those of one microbatch, so they
hold for any number: the first step with another number has a plan for them, and none is serial.

    coming = [show, warm, …, count, measure, …]     made at the start, for any number of microbatches; "show" alone
                                                 if costs are known. Tries are each for one number
    each step:  plan = that of the first entry for its number, or the settled one
                played;  the entry leaves the list
                the last "measure" of a setting: the next setting's shapes; behind the last one costs, plans,
                                                 and a "try" for each turn of each plan
                the last "try": the fastest plan stays
                no entry is left: the step is "settled". With drift, when node times leave what the plan was made for,
                                                 it is an "adapt" while another plan is searched beside it; then a "try"
                                                 for each turn, of the plan before as well

Costs that are set end a search and what was tried; a plan that is set ends the tries of its number, which is not
measured then. A plan that needs more memory than there is gets no entry.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from statistics import median
from typing import NamedTuple

import torch

from overlap1f1b.cut.bits import local_part
from overlap1f1b.cut.exchanges import OwnExchanges
from overlap1f1b.cut.options import EngineOptions, parse_memory
from overlap1f1b.cut.stage import Stage, all_shapes, parameters_of
from overlap1f1b.learn.discovery import Found
from overlap1f1b.learn.drift import WINDOWS, Drift, Search
from overlap1f1b.learn.loops import Loops
from overlap1f1b.learn.measure import measured_costs
from overlap1f1b.learn.memory import ByteCount, Counted, counted
from overlap1f1b.learn.peers import Peers
from overlap1f1b.learn.planner import LEAST_GAIN, Choice, Planner, megabytes, worth_trying
from overlap1f1b.learn.pooling import Pooling
from overlap1f1b.learn.purpose import Coming, Purpose, Setting, first_steps
from overlap1f1b.plan import MOVES, CostKey, Held, NodeCosts, Plan, Span, StageShape
from overlap1f1b.play.result import StepResult
from overlap1f1b.schedule import Program, forwards_of, one_by_one
from overlap1f1b.schedule.values import check_size
from overlap1f1b.transport import devices
from overlap1f1b.transport.exchange import LocalExchange
from overlap1f1b.transport.mesh import Mesh

WARM_STEPS = 3
"""Steps of a device before the one that is measured: kernels are compiled and memory is allocated in them."""
LONE_STEPS = 4
"""Steps that are measured if each has a single microbatch."""
MOST_NUMBERS = 32
"""Numbers of microbatches whose plans are kept: those of the last steps."""


class Tried(NamedTuple):
    """A plan that was tried, with the median of its steps in seconds, of the slowest rank."""

    plan: Plan
    seconds: float

    def __str__(self) -> str:
        """Return name and times of the plan."""
        return f"{self.plan.program.name} {self.plan.order}: {milliseconds(self.seconds)}"


@dataclass(eq=False)
class Numbered:
    """What is played with one number of microbatches: its program, and the plans for the present costs."""

    program: Program
    plan: Plan | None = None  # compiled when it is needed
    is_set: bool = False  # whether a user has set the plan
    search: Search | None = None  # that has found the plans which are tried now
    untimed: int = 0  # nodes of the last step that had no times of their own
    spans: list[Sequence[Span]] = field(default_factory=list)  # of each step that was measured
    times: list[tuple[Plan, float]] = field(default_factory=list)  # of the steps that tried plans
    tried: Sequence[Tried] = ()
    others: dict[tuple[str, ...], Plan] = field(default_factory=dict)  # of evaluations and plain loops
    agreed: set[str] = field(default_factory=set)  # plans that ranks have compared
    pooling: Pooling = field(default_factory=Pooling)
    drift: Drift = field(default_factory=Drift)  # of the steps of the settled plan


class Tuner:
    """Decides which plan a step plays.

    ``program`` is the schedule of the first step; ``counts_block`` says whether the host waits for counts.

    Attributes:
        coming: Steps in which something is learned, in order; those of one number of microbatches wait for its turn.
        steps: Number of steps so far.
        shapes: Of the blocks of all stages.
        standing: Lines about exchanges that run where they stand, as the first step has shown.
        counted: What nodes hold, and how much there is room for.
        predicted: Predicted seconds of a step, by the numbers of parts that were measured.
        loops: Which steps were compared with a plain loop.
    """

    def __init__(
        self, program: Program, stages: Mapping[int, Stage], mesh: Mesh, options: EngineOptions, *, counts_block: bool
    ) -> None:
        self.stages, self.options, self.peers = stages, options, Peers(mesh)
        self.planner = Planner(
            program, options, rendezvous=not mesh.on_gloo, counts_block=counts_block, progress=self.peers.go_on
        )
        first, *more = options.settings
        self.shapes = self._shaped({number: stage.shape for number, stage in stages.items()}, first)
        self.steps = 0
        self.standing: tuple[str, ...] = ()
        self.loops = Loops()
        self.predicted: dict[int, float] = {}
        self.counted = Counted()
        if options.memory == "auto" and not self._on_gpu:
            raise ValueError(f"memory='auto' on {self._device}; allowed: on a GPU, else bytes such as 70GB")
        if isinstance(limit := parse_memory(options.memory), int):
            parameters = {parameter for _, _, parameter, _ in parameters_of(stages)}
            least = sum((1 + p.requires_grad) * local_part(p).nbytes for p in parameters)
            if limit < least:
                what = f"{megabytes(least)} of parameters and gradients on this rank, before any activations"
                raise ValueError(f"memory={options.memory!r} for {what}; allowed: more, or a smaller model")
        if options.memory is not None and options.costs is not None:  # no step counts what there is already
            with ByteCount(self._device) as count:
                pass
            self._count(count)
        self._costs, self._rounds = options.costs, 0 if options.costs is not None else options.tries
        self._search: Search | None = None  # of a plan for node times that have changed
        self._said: str | None = None  # a line of another plan, until it is said
        self._measured: dict[Setting, tuple[NodeCosts, tuple[StageShape, ...]]] = {}
        self._numbers: dict[int, Numbered] = {}  # the last one played comes last
        self._now = self._numbered(program.microbatches)
        cuts = any(block.expert_calls for stage in self.shapes for block in stage)
        shows, settings = mesh.exchanging is not None, [first, *(one for one in more if cuts or one[1] == first[1])]
        # Bytes are counted by a GPU's allocator, or under a limit.
        warm, counts = WARM_STEPS if self._on_gpu else 1 + self._counts, self._counts
        self.coming = list(first_steps(settings, shows=shows, warm=warm, counts=counts, measured=self._times))
        if options.costs is not None:
            self._drop_unless(lambda step: step.purpose is Purpose.SHOW)
        if options.plan is not None:
            self.plan = options.plan

    # ------------------------------------------------------------------------------------------- what is played

    def next_step(self) -> Coming:
        """Return the next step, with its plan and that of the loop with which it is compared.

        Plans that there are not yet are compiled, and those to be tried are added to :attr:`coming`.
        """
        now, program = self._now, self.program
        if now.plan is None and self._costs is not None:
            self._queue_tries(self._limited().ranked(program, self.shapes, self._costs))
        elif now.plan is None:  # under a limit of memory steps that measure hold one microbatch at a time
            alone = one_by_one(program.microbatches, program.placement, split=True)
            now.plan = self.planner.serial(program if self.options.memory is None else alone, self.shapes)
        remaining = Purpose.SETTLED if self._search is None else Purpose.ADAPT
        step = next(iter(self._coming_now), Coming(remaining))
        plan = step.plan if step.purpose is Purpose.TRY else now.plan
        assert plan is not None
        # One step cannot be compared and counted at once.
        return step._replace(plan=plan, loop=None if step.purpose is Purpose.COUNT else self.loop_of(plan))

    @property
    def _coming_now(self) -> list[Coming]:
        """The coming steps with the present number of microbatches; no plan that was set is measured."""
        every = () if self._now.is_set else (None,)
        return [step for step in self.coming if step.microbatches in (self.microbatches, *every)]

    def _drop_unless(self, wanted: Callable[[Coming], bool]) -> None:
        self.coming = [step for step in self.coming if wanted(step)]

    @property
    def settling(self) -> bool:
        """Whether there is a step to come in which something is learned."""
        return self.next_step().purpose is not Purpose.SETTLED

    @property
    def plan(self) -> Plan:
        """Plan of the next step; see :attr:`Engine.plan`."""
        plan = self.next_step().plan
        assert plan is not None
        return plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        pairs = [zip(*stage, strict=False) for stage in zip(self.shapes, plan.shapes, strict=False)]
        cut = tuple(tuple(block.cut(other.exchanges) for block, other in stage) for stage in pairs)
        shows = self.coming and self.coming[0].purpose is Purpose.SHOW
        if shows and plan.shapes != self.shapes and plan.shapes == cut:
            self.coming[0] = self.coming[0]._replace(plan=plan)
            return
        self._set(plan, self._now)
        if shows:
            self.coming[:1] = [Coming(Purpose.WARM)] if self._costs is None else []

    def _set(self, plan: Plan, of: Numbered) -> None:
        """Play a plan for one number of microbatches from now on, which is then not measured or tried."""
        if plan.program != of.program or plan.shapes != self.shapes:
            raise ValueError(
                f"a plan of {plan.program.name!r} for other blocks, reductions or microbatches; "
                f"allowed: one of {of.program.name!r} with {of.program.microbatches} for {self.shapes}"
            )
        self.close()
        self._drop_unless(lambda step: step.microbatches != plan.program.microbatches)
        of.plan, of.tried, of.is_set = self.planner.with_rendezvous(plan, self._costs), (), True

    @property
    def costs(self) -> NodeCosts | None:
        """Seconds of every node; None until they are measured. If they are set, the plan for them is not tried."""
        return self._costs

    @costs.setter
    def costs(self, costs: NodeCosts | None) -> None:
        self._costs, self._rounds = costs, 0 if costs is not None else self.options.tries
        self.close()
        if costs is not None:
            self._drop_unless(lambda step: step.purpose is Purpose.SHOW)
        elif not any(step.purpose is Purpose.MEASURE for step in self.coming):
            counts, setting = self._counts and not self.counted.held, (self.options.settings[0][0], self.parts)
            steps = [Purpose.COUNT] * counts + [Purpose.MEASURE] * self._times
            self.coming += [Coming(purpose, setting) for purpose in steps]
        self._forget()

    @property
    def _times(self) -> int:
        """Steps in which nodes are measured: with a single microbatch a median needs several."""
        return LONE_STEPS if self.microbatches == 1 else 1

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the next step."""
        return self._now.program.microbatches

    @microbatches.setter
    def microbatches(self, count: int) -> None:
        self._now = self._numbered(count)

    def _numbered(self, count: int) -> Numbered:
        """Return what is played with a number of microbatches; only those of the last steps are kept."""
        check_size("microbatches", count)  # 2.0 and True would be found, too
        found = self._numbers.pop(count, None) or Numbered(self.planner.program.of(count))
        old = next((number for number, one in self._numbers.items() if not one.is_set), None)
        if len(self._numbers) >= MOST_NUMBERS and old is not None:
            del self._numbers[old]
            self._drop_unless(lambda step: step.microbatches != old)
        self._numbers[count] = found
        return found

    def _forget(self) -> None:
        count = self.microbatches
        self._numbers = {}
        self._drop_unless(lambda step: step.microbatches is None)
        self._now = self._numbered(count)

    @property
    def program(self) -> Program:
        """Schedule of the next step."""
        return self._now.program

    @property
    def standing_uncut(self) -> tuple[str, ...]:
        """Lines as :attr:`standing`, of first steps and evaluations: there no block is cut at exchanges of its own."""
        cut = any(block.exchanges for stage in self.shapes for block in stage)
        line = "exchanges that blocks make by themselves are not hidden in the first step, nor in evaluations"
        return (*self.standing, line) if cut else self.standing

    def evaluation_of(self, microbatches: int) -> Plan:
        """Return the plan of the forwards alone."""
        of = self._numbered(microbatches)
        program = forwards_of(of.program if of.plan is None else of.plan.program)
        if (key := (program.name,)) not in of.others:
            # Exchanges that blocks make by themselves are hidden in training alone: without gradients nothing tells
            # them from other collectives.
            shapes = tuple(tuple(block._replace(exchanges=()) for block in stage) for stage in self.shapes)
            costs = self._costs or NodeCosts()
            of.others[key] = self.planner.compiled(program, shapes, costs, self.planner.overlap)
        return of.others[key]

    # ------------------------------------------------------------------------------------------- what is said of it

    @property
    def parts(self) -> int:
        """Parts of a call of experts in the next step."""
        return max((block.parts for stage in self.shapes for block in stage), default=1)

    @property
    def held(self) -> Mapping[CostKey, Held]:
        """What nodes hold, by the last count or by the costs; empty if nobody has counted."""
        return self.counted.held or (self._costs.bytes if self._costs is not None else {})

    @property
    def tried(self) -> Sequence[Tried]:
        """The plans that were tried, the fastest first; empty before, and if there was one alone."""
        return self._now.tried

    @property
    def choice(self) -> str:
        """Name of the plan of the next step, and the times by which it was chosen, or the steps to come."""
        plan, purpose, now = self.plan, self.next_step().purpose, self._now
        untimed, name = now.untimed, f"{plan.program.name} {plan.order}"
        left = f", {untimed} nodes in calls of several, without times of their own" if untimed else ""
        if now.tried:
            return f"{name} (measured step: {', '.join(map(str, now.tried))}){left}"
        if purpose is Purpose.TRY:
            return f"{name} (tried with others in turns; the fastest stays)"
        if purpose is not Purpose.SETTLED:
            return f"{name} (to come: {', '.join(step.purpose for step in self._coming_now)})"
        return f"{name} ({'given' if now.is_set else f'predicted step: {milliseconds(plan.predicted)}'}){left}"

    @property
    def parts_choice(self) -> str:
        """Number of parts, and the predicted steps by which it was chosen."""
        if len(self.predicted) < 2:
            return str(self.parts)
        steps = ", ".join(f"{parts}: {1e3 * step:.0f} ms" for parts, step in self.predicted.items())
        return f"{self.parts} (predicted step by number of parts: {steps})"

    @property
    def travels(self) -> bool:
        """Whether rows leave this rank."""
        return any(not isinstance(stage.exchange, LocalExchange) for stage in self.stages.values())

    # ------------------------------------------------------------------------------------------- around a step

    def agree(self, plan: Plan) -> None:
        """Compare the plan of a step or an evaluation over the ranks, once; ValueError if they differ.

        All must call this.
        """
        agreed = self._numbers[plan.program.microbatches].agreed
        if plan.fingerprint not in agreed:
            self.peers.mesh.agree({"plan": plan.fingerprint, "measuring": self._measures})
            agreed.add(plan.fingerprint)
        if not self.steps:
            self.peers.begin()

    @property
    def _measures(self) -> bool:
        return self._costs is None and not self._now.is_set

    def verifies_next(self, *, grad: bool = True) -> bool:
        """Return whether the next step, or evaluation, is compared with a plain loop, so its batch is read again."""
        return (self.next_step().loop if grad else self.loop_of(self.evaluation_of(self.microbatches))) is not None

    def loop_of(self, plan: Plan) -> Plan | None:
        """Return the plan of the plain loop with which a step of a plan is compared; None if it is not.

        Steps that measure nodes are not.
        """
        return None if not self.options.verify or self._measures else self.loops.loop_of(plan, self._serial)

    def _serial(self, program: Program, like: Plan) -> Plan:
        key, others = (program.name, like.fingerprint), self._numbers[program.microbatches].others
        if key not in others:
            shapes = tuple(tuple(block._replace(offload=False) for block in stage) for stage in like.shapes)
            others[key] = self.planner.serial(program, shapes)
        return others[key]

    def count_next(self) -> None:
        """Count in the next step the bytes that each node holds, though no plan needs them; it is not compared."""
        self.next_step()  # the plans are made that may have to be tried
        self.coming.insert(0, Coming(Purpose.COUNT, microbatches=self.microbatches))

    def name_limit(self, plan: Plan, error: torch.OutOfMemoryError) -> None:
        """Add to the error of a step of a plan, for which there is no memory, which limit would do."""
        does = f"memory={megabytes(self.counted.fits)!r}, which a step before it held, " if self.counted.fits else ""
        text, *_ = str(error).splitlines() or [""]
        what = f"no memory for {plan.program.name} {plan.order}"
        error.args = (f"{what}; allowed: {does}recompute='block', or smaller microbatches; {text}",)

    def learn(
        self,
        step: Coming,
        result: StepResult,
        time_transfers: Callable[[], Mapping[CostKey, float]],
        count: ByteCount | None = None,
        found: Found | None = None,
    ) -> None:
        """Note what a step has shown: it decides how the next ones are played. All ranks must call this.

        ``step`` is what :meth:`next_step` returned; ``count`` is of one that counts, ``found`` of one that shows
        exchanges of blocks. ``time_transfers`` times the transfers between stages, in seconds.
        """
        self.peers.end()
        self.steps, self._now.untimed = self.steps + 1, result.times.untimed
        self._now.pooling.steps += 1
        plan = step.plan
        assert plan is not None
        if plan.peak_bytes:
            fits = self.counted.before + plan.peak_bytes[self.peers.mesh.rank("pp")]
            self.counted = self.counted._replace(fits=fits)
        entry = next(iter(self._coming_now), step)
        if entry is not step:
            self.coming.remove(entry)
        if found is not None:
            self.standing = found.standing
        match step.purpose:
            case Purpose.SHOW:
                self._adopt_exchanges(entry.plan, {} if found is None else found.exchanges)
            case Purpose.COUNT:
                assert count is not None
                self._count(count)
            case Purpose.MEASURE:
                assert entry.setting is not None
                self._note_nodes(plan, entry.setting, result, time_transfers)
            case Purpose.TRY:
                self._note_time(plan, result.overlap.makespan)
            case Purpose.SETTLED | Purpose.ADAPT:
                self._watch(result)

    def _adopt_exchanges(self, cut: Plan | None, found: Mapping[tuple[int, int], OwnExchanges]) -> None:
        """Cut blocks at the exchanges that they have shown; play a plan for these blocks, if one was given."""
        shapes = self._gathered({n: stage.cut_at(self.shapes[n], found) for n, stage in self.stages.items()})
        if shapes != self.shapes or cut is not None:
            self.shapes = shapes
            self._forget()
        if cut is not None:
            self._set(cut, self._numbered(cut.program.microbatches))

    def _note_nodes(
        self, plan: Plan, setting: Setting, result: StepResult, time_transfers: Callable[[], Mapping[CostKey, float]]
    ) -> None:
        """Note the times of the nodes of a step; go on to the next setting, or to the plans for the costs."""
        every, mesh = self._now.spans, self.peers.mesh
        every.append(result.times.spans())
        while self.coming and self.coming[0].purpose is Purpose.MEASURE:
            self.coming.pop(0)
        if more := max(0, self._times - len(every)):  # the number of microbatches may be another one since
            self.coming[:0] = [Coming(Purpose.MEASURE, setting)] * more
            return
        costs = measured_costs(
            plan.ranks[mesh.rank("pp")],
            chain.from_iterable(every),
            mesh,
            shared_links=mesh.on_gloo,  # it uses one network interface for all groups
            launches=result.times.launches,
            transfers=time_transfers(),
        )
        self._measured[setting] = replace(self.peers.agreed(costs), bytes=self.counted.held), self.shapes
        following = next((step.setting for step in self.coming if step.setting is not None), None)
        if following is not None:
            self._reshape(self._shaped({number: self.shapes[number] for number in self.stages}, following))
            return
        moved = (time for of, _ in self._measured.values() for key, time in of.by_node.items() if key[0] in MOVES)
        if self.options.offload is True and not any(moved):
            raise ValueError(
                f"offload=True where no block saves {self.options.offload_threshold} bytes or more that nothing else "
                "holds; allowed: offload=False, a smaller offload_threshold, or another recompute"
            )
        choice = self.peers.made(self._chosen)
        self.predicted, self._costs, self._measured = choice.predicted or self.predicted, choice.costs, {}
        self._reshape(choice.plans[0].shapes)
        self._queue_tries(choice.plans)

    def _chosen(self) -> Choice:
        """Return the plans for what was measured; of all that fit those alone are sent to the other ranks."""
        choice = replace(self._limited(), timed=True).chosen(self.program, self._measured)
        return choice._replace(plans=worth_trying(choice.plans, self.counted.rooms))

    def _shaped(self, mine: Mapping[int, StageShape], setting: Setting) -> tuple[StageShape, ...]:
        """Return the shapes of all stages in a setting, by those of this rank's before."""
        leaves = bool(self.options.offload)
        return self._gathered(
            {
                n: tuple(block._replace(offload=leaves) for block in stage.shaped(mine[n], *setting))
                for n, stage in self.stages.items()
            }
        )

    def _reshape(self, shapes: tuple[StageShape, ...]) -> None:
        if shapes != self.shapes:
            self.shapes, self.counted = shapes, self.counted._replace(held={})
        self._forget()

    def _gathered(self, mine: Mapping[int, StageShape]) -> tuple[StageShape, ...]:
        return all_shapes(mine, self.planner.program.placement, self.peers.mesh)

    def _queue_tries(self, plans: Sequence[Plan], *beside: Plan) -> None:
        """Queue plans for the present costs as coming steps, in turns; without measured costs the first one stays."""
        chosen = [*worth_trying(plans, self.counted.rooms), *beside] if self._rounds else plans[:1]
        turns = [self.planner.with_rendezvous(plan, self._costs) for plan in chosen]
        rounds = self._rounds if len(turns) > 1 else 0
        self._now.plan = turns[0]
        count = turns[0].program.microbatches
        self.coming += [Coming(Purpose.TRY, None, count, plan) for plan in turns] * rounds

    def _note_time(self, plan: Plan, seconds: float) -> None:
        """Note the time of a step in turns, and after the last one keep the plan that was the fastest."""
        now = self._now
        now.times.append((plan, seconds))
        if any(step.purpose is Purpose.TRY for step in self._coming_now):
            return
        plans = list({plan.fingerprint: plan for plan, _ in now.times}.values())
        slowest = self.peers.slowest([seconds for _, seconds in now.times])
        times = [median(slowest[turn :: len(plans)]) for turn in range(len(plans))]
        now.tried = sorted(map(Tried, plans, times), key=lambda one: one.seconds)
        best, search, now.search = now.tried[0], now.search, None
        before = search and search.before.fingerprint
        kept = next((one for one in now.tried if one.plan.fingerprint == before), None)
        if kept is not None:  # what gains less than this over the plan before may be noise
            best = best if best.seconds < (1 - LEAST_GAIN) * kept.seconds else kept
        now.plan = best.plan
        if search is not None and best is not kept:
            self._say_of_other(search)

    def pooled(self, step: Coming, result: StepResult, *, on_device: bool) -> StepResult:
        """Return the result of a step with what the other ranks saw of its exchanges, where they pool it now.

        All ranks must call this.
        """
        if not self.travels or step.purpose.looks or self.standing or step.plan is None:
            return result
        return self._now.pooling.pooled(result, step.plan, self._costs, self.peers, on_device=on_device)

    def _watch(self, result: StepResult) -> None:
        """Note the node times of a settled step. When they leave what its plan was made for, search another.

        It is tried when it still gains at the tables behind the search.
        """
        now, costs, search = self._now, self._costs, self._search
        if not self.options.drift or costs is None or now.plan is None:
            return
        if any(of.is_set for of in self._numbers.values()):
            return
        if search is not None and not search.found():
            return
        if result.costs is None or not now.drift.note(self.steps, result.overlap):
            return
        if search is None:
            if self._has_drifted(now.drift):
                scaled = self._scaled(now.drift, costs)
                self._search = Search(partial(self._searched, self.program, scaled), scaled, now.plan, self.peers)
            return
        assert search.plans is not None
        tried, blocks = len(worth_trying(search.plans, self.counted.rooms)), self.planner.counts_block
        if not search.gains(self._scaled(now.drift, costs), tried=tried, counts_block=blocks):
            self._search = None
            for of in self._numbers.values():
                of.drift.keep()
            return
        search.windows += 1
        if search.windows == WINDOWS:
            search.changes = self.peers.mesh.every(now.drift.changes)
            self._go_over(search)

    def _scaled(self, drift: Drift, costs: NodeCosts) -> NodeCosts:
        return replace(self.peers.agreed(drift.scaled(costs, self.peers.mesh)), bytes=costs.bytes)

    def _searched(self, program: Program, costs: NodeCosts, progress: Callable[[float], None]) -> list[Plan]:
        return replace(self._limited(), timed=True, progress=progress).ranked(program, self.shapes, costs)

    def _has_drifted(self, drift: Drift) -> bool:
        every = self.peers.mesh.every(drift.left)
        return self.peers.agreed(any(every.values()))

    def _go_over(self, search: Search) -> None:
        """Try the plans that were searched in turns with the one before."""
        assert search.plans is not None
        self._search, self._costs, self._rounds = None, search.costs, self.options.tries
        self._forget()
        if search.plans[0].program.microbatches != self.microbatches:
            return  # another number of microbatches is played since
        self._queue_tries(search.plans, search.before)
        if self._coming_now:
            self._now.search = search
        else:
            self._say_of_other(search)

    def _say_of_other(self, search: Search) -> None:
        """Say once, on the first rank, that another plan is played since node times have changed."""
        if not self.peers.mesh.is_first:
            return
        exchange, compute = (max(of, key=lambda one: abs(one - 1)) for of in zip(*search.changes.values(), strict=True))
        self._said = (
            f"node times have left what the plan was made for, exchanges take {exchange:.2f} and compute "
            f"{compute:.2f} times as long: from step {self.steps + 1} on {self.choice}"
        )

    def close(self) -> None:
        """End what runs beside the steps."""
        search, self._search = self._search, None
        if search is not None:
            search.end()

    def say(self) -> None:
        """Say of another plan, between calls of the engine: a filter may make an error of a warning."""
        said, self._said = self._said, None
        if said is not None:
            warnings.warn(said, stacklevel=4)

    def share_plans_with(self, groups: Sequence[Sequence[int]]) -> None:
        """Play the same plans as ranks outside of the mesh; all ranks of these groups must call this before a step."""
        self.peers.outside = groups
        self._costs = self.peers.agreed(self._costs)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.stages.values())).device

    @property
    def _on_gpu(self) -> bool:
        return devices.gpu_of(self._device) is not None

    @property
    def _counts(self) -> bool:
        return self.options.memory is not None or self._on_gpu

    def _count(self, count: ByteCount) -> None:
        limit = parse_memory(self.options.memory)
        if not isinstance(limit, int):  # what there is limits trials, too
            limit = devices.obtainable(self._device) if self._on_gpu else None
        self.counted = counted(count, math.inf if limit is None else limit, self.peers)

    def _limited(self) -> Planner:
        """Return the planner under the limit of memory.

        Without one, what a GPU has limits only which plans are tried, not which are made.
        """
        rooms = self.counted.rooms if self.options.memory is not None else ()
        return replace(self.planner, rooms=rooms, sparing=self._on_gpu and self._rounds > 0)


def milliseconds(seconds: float) -> str:
    """Return a time as text, with three digits or whole milliseconds.

    >>> milliseconds(4.2149), milliseconds(0.0051234)
    ('4215 ms', '5.12 ms')
    """
    return f"{1e3 * seconds:.0f} ms" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
