"""Compile the plans of an engine when they are needed, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from overlap1f1b import plan as planning
from overlap1f1b.engine.play.trials import Trials, Tried, worth_trying
from overlap1f1b.plan import NodeCosts, Overlap, Plan, StageShape
from overlap1f1b.schedule import Program, forwards_of, one_by_one
from overlap1f1b.simulation import found_orders
from overlap1f1b.transport.mesh import Mesh


class Plans:
    """The plans of a program's steps and evaluations.

    Args:
        program: Schedule of a step; with ``search_seconds`` another order is found when there are costs.
        shapes: Shapes of all stages.
        overlap: Of the compiled plans.
        counts_block: Whether the host waits for counts.
        rendezvous: Whether both ends of a transfer start it at one place in an order of all ranks, for a device.
        mesh: Ranks that must have the same plan.
        costs: Of the nodes; None until they are measured.
        plan: Plan of the steps, instead of a compiled one.
        tries: Steps of each of the fastest plans for measured costs, which are tried in turns.

    Attributes:
        tried: The plans that were tried, the fastest first; empty before, and if there was one alone.
        given: Whether the plan of a step was set.

    Raises:
        ValueError: ``plan`` is for another program or other blocks.
    """

    def __init__(
        self,
        program: Program,
        shapes: tuple[StageShape, ...],
        overlap: Overlap,
        *,
        counts_block: bool,
        rendezvous: bool,
        mesh: Mesh,
        costs: NodeCosts | None,
        plan: Plan | None,
        tries: int = 0,
    ) -> None:
        self.program, self.shapes, self.overlap, self.counts_block = program, shapes, overlap, counts_block
        self.rendezvous, self.mesh, self._costs = rendezvous, mesh, costs
        self._tries = tries
        self.tried: Sequence[Tried] = ()
        self._plan: Plan | None = None
        self._trials: Trials | None = None
        self._ordered: Sequence[Plan] = ()  # for the costs, the predicted fastest first
        self.given = False
        self._evaluation: Plan | None = None
        self._agreed: set[str] = set()
        self._serials: dict[tuple[str, bool], Plan] = {}  # by the plan of the same step
        if plan is not None:
            self.of_step = plan

    @property
    def costs(self) -> NodeCosts | None:
        """Costs of the nodes; None until they are measured. If they are set, the plan for them is not tried."""
        return self._costs

    @costs.setter
    def costs(self, costs: NodeCosts | None) -> None:
        self._costs, self._plan, self._trials, self._evaluation = costs, None, None, None
        self._ordered, self.tried, self.given = (), (), False
        self._agreed.clear()  # a step of the same order may measure now

    def try_plans(self) -> None:
        """Let the next steps try the plans that the costs predict to be the fastest."""
        if self._tries and self._costs is not None:
            found = worth_trying(self._ordered or self._compiled_all(self._costs))
            self._trials = Trials([self._checked(plan, self._costs) for plan in found], self._tries)
            self._plan = self._trials.plans[0]

    @property
    def trying(self) -> bool:
        """Whether the next step tries a plan."""
        return self._trials is not None and self._trials.open

    def note(self, seconds: float, share: Callable[[list[float]], list[float]] = list) -> None:
        """Note the time of a step that has tried a plan, and after the last one keep the fastest.

        ``share`` makes times the same on ranks outside of the mesh, too.
        """
        assert self._trials is not None
        assert self._plan is not None
        self._trials.note(seconds)
        if not self._trials.open:
            self.tried, before = self._trials.tried(self.mesh, share), self._plan.program
            self._plan, self._trials = self.tried[0].plan, None
            if self._plan.program != before:
                self._evaluation = None

    @property
    def measuring(self) -> bool:
        """Whether the next step measures the nodes."""
        return self._costs is None and self._plan is None

    @property
    def of_step(self) -> Plan:
        """Plan of the next step: the compiled one, or the serial one as long as there are no costs."""
        if self._plan is None and self._costs is not None:
            self._ordered = self._compiled_all(self._costs)
            self._plan = self._checked(self._ordered[0], self._costs)
        if self._trials is not None and self._trials.open:
            return self._trials.plan
        return self._plan or self._serial

    @of_step.setter
    def of_step(self, plan: Plan) -> None:
        if plan.program != self.program or plan.shapes != self.shapes:
            raise ValueError(
                f"a plan of {plan.program.name!r} for other blocks, reductions or microbatches; "
                f"allowed: one of {self.program.name!r} with {self.program.microbatches} for {self.shapes}"
            )
        self._plan, self._trials = self._checked(plan, self._costs or NodeCosts()), None
        self.tried, self.given = (), True

    @cached_property
    def _serial(self) -> Plan:
        return self._compiled(self.program, self.shapes, NodeCosts(), "serial")

    @property
    def of_evaluation(self) -> Plan:
        """Plan of the forwards alone."""
        if self._evaluation is None:
            # Exchanges that blocks make by themselves are hidden in training alone: without gradients nothing tells
            # them from other collectives.
            shapes = tuple(tuple(block._replace(exchanges=()) for block in stage) for stage in self.shapes)
            program = forwards_of(self.program if self._plan is None else self._plan.program)
            self._evaluation = self._compiled(program, shapes, self._costs or NodeCosts(), self.overlap)
        return self._evaluation

    def serial(self, plan: Plan, *, plain: bool = False) -> Plan:
        """Return the plan of the same step in which actions follow one another.

        Their order is the program's, or one microbatch after another through all stages, as a plain loop has it.
        """
        key = plan.fingerprint, plain
        if key not in self._serials:
            program = plan.program
            if plain:
                program = one_by_one(program.microbatches, program.placement)
                program = forwards_of(program) if plan.program.forward_only else program
            self._serials[key] = self._compiled(program, plan.shapes, NodeCosts(), "serial")
        return self._serials[key]

    def _compiled(self, program: Program, shapes: tuple[StageShape, ...], costs: NodeCosts, overlap: Overlap) -> Plan:
        plan = planning.compile(program, shapes, costs, overlap, counts_block=self.counts_block)
        return self._checked(plan, costs)

    def _compiled_all(self, costs: NodeCosts) -> list[Plan]:
        """Return plans of a step for some costs, the one that is predicted to be the fastest first."""
        if not self.program.search_seconds:
            return planning.fastest(self.program, self.shapes, costs, self.overlap, counts_block=self.counts_block)
        placement = self.program.placement
        return found_orders(
            placement,
            self.program.microbatches,
            self.shapes,
            costs,
            peak_activations=min(self.program.peak_activations) * placement.share,
            seconds=self.program.search_seconds,
            counts_block=self.counts_block,
        )

    def _checked(self, plan: Plan, costs: NodeCosts) -> Plan:
        """Check a plan; return it with both ends of its transfers at one place if the device needs that."""
        planning.check(plan)
        if not self.rendezvous:
            return plan
        plan = planning.with_rendezvous(plan, costs, counts_block=self.counts_block)
        planning.check(plan)
        planning.check_rendezvous(plan)
        return plan

    def agree(self, plan: Plan) -> None:
        """Compare a plan over the ranks, once.

        Raises:
            ValueError: Ranks have different plans, or not all of them measure.
            LostRankError: A rank failed, or did not answer within the limit.
        """
        if plan.fingerprint not in self._agreed:
            self.mesh.agree({"plan": plan.fingerprint, "measuring": self.measuring})
            self._agreed.add(plan.fingerprint)
