"""Train a model by a Program, its exchanges hidden behind compute."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from overlap1f1b.cut.blocks import refuse_graphs, refuse_zero
from overlap1f1b.cut.options import EngineOptions
from overlap1f1b.cut.places import places_of
from overlap1f1b.cut.stage import Stage
from overlap1f1b.engine.agreement import CallSizes, FirstRows, check_tensor_group, compare_batches, values
from overlap1f1b.engine.capacity import Capacity
from overlap1f1b.engine.connection import Call, Connection
from overlap1f1b.engine.finite import FiniteCheck
from overlap1f1b.engine.gate import Gate
from overlap1f1b.engine.stages import Model
from overlap1f1b.kernels.choice import choosing
from overlap1f1b.learn.check import Verification
from overlap1f1b.learn.discovery import Discovery
from overlap1f1b.learn.measure import BackToBack, OneByOne
from overlap1f1b.learn.memory import NodeBytes
from overlap1f1b.learn.purpose import Coming, Purpose
from overlap1f1b.learn.tuner import Tuner
from overlap1f1b.plan import NodeCosts, Plan, StageShape
from overlap1f1b.play.feed import Batch, Feed, feed_batch
from overlap1f1b.play.microbatch import LossFunction, check_gradients_possible, check_loss
from overlap1f1b.play.observers import Observer
from overlap1f1b.play.random import take_number
from overlap1f1b.play.result import StepResult
from overlap1f1b.play.step import PlayedStep, Step
from overlap1f1b.reduce.clipping import check_norm, clip
from overlap1f1b.reduce.fsdp import gathered_in
from overlap1f1b.schedule import Program
from overlap1f1b.schedule.values import check_each, check_kind, check_number, checked, quoted
from overlap1f1b.transport.exchange import Exchange
from overlap1f1b.transport.mesh import Comparison, Mesh

_COMPARED = 1024
"""Steps between two comparisons of parameters over ranks; the first ones are at 0, 1, 2, 4, 8, ... steps."""
_SETTABLE = "costs", "loss_fn", "microbatches", "plan"
"""Attributes of an engine that may be set between steps."""
_DRAWS = {False: 0, None: 1, True: 2}
"""Whether a rank's blocks draw random numbers, as a number of which ranks know the largest."""


class _Made(NamedTuple):
    """What a model was when its engine was made: the engine does not follow changes of it."""

    children: list[torch.nn.Module]
    trained: dict[int, list[list[torch.nn.Parameter]]]  # of each block of each stage
    trains: bool  # whether anything on any rank does


class Engine:
    """Plays a Program over a model.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    >>> program = build_schedule("combined_1f1b", ranks=2, microbatches=8)
    >>> engine = Engine(model, program, mesh=mesh, loss_fn=loss_fn)
    >>> result = engine.step(inputs, target=labels)  # gradients are in .grad
    >>> engine.clip_gradients(1.0); optimizer.step(); optimizer.zero_grad()

    The first two steps, on a GPU four, run serially, and the last of them measures every node; with a single microbatch
    three more do. Then plans are compiled, the same on all ranks, and the fastest are tried. In the first step,
    whose times are not used, ``kernels="auto"`` compiles and chooses.

    Args:
        model: The whole model as an ``nn.Sequential`` or a list of blocks, which is split into stages of equal weight;
            or the stages of this rank by their number, each a list of blocks, or a module with ``blocks`` (a list or an
            ``nn.ModuleList``) and perhaps parameters ``tied`` over stages. A block maps one tensor or several to one
            or a tuple; it may hold Experts.
        program: Schedule of the step over the mesh's pipeline ranks; ``auto`` to find an order for the measured costs.
        mesh: Any of the dimensions "pp" (stages), "dp" (data), "ep" (data, sharing the experts), "cp" (each rank has a
            part of every sequence) and "tp" (each rank has the same data; DTensors over "tp" say which part of a
            parameter it has); None for one rank. Blocks may communicate along "cp" and "tp": all ranks play one plan.
        loss_fn: ``(output, target) → scalar`` of one microbatch; with several tensors ``(*outputs, *targets)``. None
            on a rank without the last stage, and for an engine whose feeds have losses: see :meth:`play`.
        options: How it plays, see :class:`EngineOptions`.
        exchange: An exchange to share between engines (a failure of one ends all of them), or to measure with; by
            default one over groups of the engine's own.

    All communicators are made here, and released by :meth:`close`, at the end of a ``with`` block, or with the engine.

    Raises:
        ValueError: Model, program, overlap, recompute, parts, capacity, mesh or limit do not fit, or differ between
            ranks.
        LostRankError: Another rank failed, or did not make its Engine within the limit.

    Attributes:
        connection: The stages of this rank, and its links to other ranks.
        tuner: Decides which plan a step plays.
        observers: Who looks on at every step; others may be added between steps, the first is the outermost. At
            evaluations only those look on that have ``rehearses`` set.
    """

    options: EngineOptions
    model: Model
    connection: Connection
    mesh: Mesh
    stages: dict[int, Stage]
    tuner: Tuner
    verification: Verification
    observers: list[Observer]

    @checked
    def __init__(
        self,
        model: Model,
        program: Program,
        *,
        mesh: DeviceMesh | None = None,
        loss_fn: LossFunction | None = None,
        options: EngineOptions | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        # 1. What was given.
        options = EngineOptions() if options is None else options
        _check_trains(program)
        self.loss_fn, self.options, self.model = loss_fn, options, model
        # 2. Groups, stages, lanes, sums.
        self.connection = connection = Connection(self, model, program, mesh, options, exchange)
        self.mesh, self.stages = connection.mesh, connection.stages
        with connection.guarded("another call", place="in the construction of its Engine"):
            # A rank's own stages may all be frozen; a model that is frozen on all ranks can only be evaluated.
            trains = any(self.mesh.every(any(p.requires_grad for p in self.parameters())).values())
            holders = connection.sharding.holders
            trained = {number: stage.trained(holders) for number, stage in self.stages.items()}
            self._made = _Made(_children_of(model), trained, trains)
            # 3. What decides about plans, and their comparison with a plain loop.
            self.tuner = Tuner(
                program,
                self.stages,
                self.mesh,
                options,
                counts_block=not connection.exchange.background and options.capacity is None,
            )
        if options.gate is not None and not self.tuner.travels:
            raise ValueError(
                f"gate={options.gate!r} where nothing is exchanged; allowed: ranks that share experts, or None"
            )
        self._gate = Gate(options.gate, self.mesh, counts_block=self.tuner.planner.counts_block)
        self.verification = Verification(self.stages, self.mesh, connection.sharding, partial(_tables_of, loss_fn))
        # 4. Who looks on.
        self.observers = [CallSizes(self.mesh)]
        if options.capacity is not None:
            self.observers.append(Capacity(options.capacity, self.mesh, partial(_parameters_of, self.stages)))
        self._finite = FiniteCheck(options.finite, self.mesh)
        self._played = 0  # microbatches of the last step or evaluation
        self._settle: Callable[[], None] | None = None

    @checked
    def step(
        self,
        inputs: Batch | None = None,
        target: Batch | None = None,
        *,
        loss_scale: float = 1.0,
        return_outputs: bool = False,
        microbatches: int | None = None,
    ) -> StepResult:
        """Run forward and backward of a batch; add the gradients of the mean loss to ``.grad``.

        The loss is the mean over microbatches and over the ranks that hold data ("dp" × "ep" × "cp"); a rank reports
        the mean over its own microbatches.

        Args:
            inputs: ``[B, …]``, this rank's batch, split into equal microbatches along the first dimension; a tuple of
                such tensors; or a list with an entry for each microbatch. If the model names its inputs, also a
                mapping by these names, with None for an input that is not given: over pipeline ranks the same inputs in
                every step, unless ``dynamic_shapes`` is set. Needed on ranks with the first stage, ignored elsewhere.
            target: The same for the loss, () for a loss of outputs alone. Needed on ranks with the last stage, ignored
                elsewhere.
            loss_scale: Factor of all gradients, as of a gradient scaler; the same on all ranks.
            return_outputs: Whether the result has the outputs of the last stage, the arguments of ``loss_fn``.
            microbatches: Number of microbatches, the same on all ranks; by default as before. Once costs are measured,
                a number that is played for the first time has a plan for them at once.

        Raises:
            ValueError: A batch that is missing or cannot be split, a model without a parameter to train, or a number of
                microbatches that the program's schedule does not allow, or that differs over ranks.
            RuntimeError: Another rank failed, or did not answer within the limit; a :class:`CapacityOverflowError`,
                :class:`NotFiniteError` or :class:`NotHiddenError`.
        """
        if not self.tuner.steps and self._compares:
            ends = {"inputs": 0, "target": self.program.placement.stages - 1}
            needed = [name for name, stage in ends.items() if stage in self.stages]
            with self.guarded("step", place="before its first step"):
                other = compare_batches({"inputs": inputs, "target": target}, self.mesh, needed)
            if other:
                warnings.warn(
                    f"ranks of one pipeline were given different {' and '.join(other)}: targets may belong to other "
                    "inputs; allowed: the same rows on all ranks of a pipeline, or None where they are ignored",
                    stacklevel=2,
                )
        if microbatches is not None:
            self.microbatches = microbatches
        make_feed = self._feed_of(inputs, target, self.program, return_outputs)
        return self.play(make_feed, loss_scale=loss_scale).result

    @checked
    def evaluate(
        self,
        inputs: Batch | None = None,
        target: Batch | None = None,
        *,
        return_outputs: bool = False,
        microbatches: int | None = None,
    ) -> StepResult:
        """Return the loss of a batch that divides into the microbatches, without gradients; see :meth:`step`.

        Another number of microbatches than the next step's holds for this evaluation alone.
        """
        count = self.microbatches if microbatches is None else microbatches
        program = self.tuner.evaluation_of(count).program
        make_feed = self._feed_of(inputs, target, program, return_outputs)
        return self.play(make_feed, grad=False, microbatches=count).result

    def _feed_of(
        self, inputs: Batch | None, target: Batch | None, program: Program, return_outputs: bool
    ) -> Callable[[], Feed]:
        """Return what makes the feed of a batch."""
        return partial(
            feed_batch,
            self.stages,
            program,
            self.mesh,
            inputs,
            target,
            loss_fn=self.loss_fn,
            count_tokens=self.options.count_tokens,
            return_outputs=return_outputs,
        )

    def play(
        self,
        make_feed: Callable[[], Feed],
        *,
        grad: bool = True,
        loss_scale: float = 1.0,
        microbatches: int | None = None,
        observers: Iterable[Observer] = (),
    ) -> PlayedStep:
        """Run a step whose microbatches get their inputs, targets and losses from a feed.

        :meth:`step` and :meth:`evaluate` are this with the feed of a batch.

        Args:
            make_feed: Makes the feed; an error in it is told to the other ranks as any other of the step.
            grad: Whether a backward follows; else the forwards alone are played.
            loss_scale: Factor of all gradients, which multiplies what the feed gives; the same on all ranks. Auxiliary
                losses have it where the feed has an ``aux_scale``.
            microbatches: Number of microbatches, by default as before; another stays for the next steps, but that of
                an evaluation holds for it alone.
            observers: Who looks on at this step, beside :attr:`observers`.

        Raises:
            ValueError: A model without a parameter to train; gradients in inference mode; whatever the feed raises.
            RuntimeError: As of :meth:`step`.
        """
        check_number("loss_scale", loss_scale, float("-inf"))
        looking, wrong = list[Observer](), None
        try:
            looking = [one for of in (self.observers, observers) for one in check_each("observers", of, Observer)]
            check_kind("make_feed", make_feed, Callable)
            check_kind("grad", grad, bool)
        except ValueError as error:  # the other ranks are told it below
            wrong = error
        if grad and microbatches is not None:
            self.microbatches = microbatches
        if grad and not self._made.trains:
            raise ValueError("no parameter of the model requires a gradient; allowed: at least one that does")
        coming = self.tuner.next_step() if grad else None
        plan = self.tuner.evaluation_of(microbatches or self.microbatches) if coming is None else coming.plan
        assert plan is not None
        every = tuple(one for one in looking if grad or one.rehearses)
        links = self.connection.links
        by_node = self.options.memory is not None or (coming is not None and coming.purpose.looks)
        step = Step(
            plan, make_feed, self.stages, links, grad=grad, loss_scale=loss_scale, observers=every, by_node=by_node
        )
        call: Call = "step" if grad else "evaluate"
        facts, place = self._facts(step), "before the first node of its plan"
        draws = max(_DRAWS[stage.draws.any] for stage in self.stages.values())
        with self.guarded(call, place=place, facts=facts | {"draws": draws}) as comparison:
            if wrong is not None:
                raise wrong
            self._agree(step, comparison)
            if not self.tuner.steps:
                self._check_devices()
            try:
                played = self._evaluate(step) if coming is None else self._train(step, coming)
            except torch.OutOfMemoryError as error:
                self.tuner.name_limit(plan, error)
                raise
            # Have all ranks played the same step, and scaled alike?
            if comparison.differ(here=not grad) & facts.keys():  # as by a gradient scaler on some rank
                self.mesh.agree(facts)
            if self._draws(comparison.extremes("draws", "pp")[1]):
                take_number()
            if grad:
                ended = played.microbatches.of_stage(self.program.placement.stages - 1)
                self._finite.note(self.tuner.steps, [one.index for one in ended], played.result.losses)
                line = self._finite.found(self.tuner.steps)
                settled = coming is not None and coming.purpose is Purpose.SETTLED
                below = self._gate.found(self.tuner.steps, plan, played.result) if settled else None
        if grad:
            self._finite.say(line, played.result)
            self._gate.say(below, played.result)
            self.tuner.say()
        return played

    def _draws(self, before: float) -> bool:
        """Return whether blocks draw random numbers, alike along a pipeline; ``before`` is the most that ranks knew."""
        draws = max(_DRAWS[stage.draws.any] for stage in self.stages.values())
        if self.mesh.size("pp") > 1:
            draws = max(self.mesh.gathered("pp", draws)) if before == _DRAWS[None] else int(before)
        return draws == _DRAWS[True]

    def _train(self, step: Step, coming: Coming) -> PlayedStep:
        """Play a step with a backward, with those who look on because of its purpose; learn from it."""
        tuner, purpose, first = self.tuner, coming.purpose, not self.tuner.steps
        # 1. All ranks have the same parameters.
        self._check_parameters()
        # 2. Who looks on because of what the step is for.
        rows = FirstRows()
        extra: list[Observer] = [rows] if first and "tp" in self.mesh.experts_over else []
        discovery = Discovery(self.mesh) if first or purpose is Purpose.SHOW else None
        extra += [] if discovery is None else [discovery]
        measuring = self.costs is None and purpose in (Purpose.SHOW, Purpose.WARM, Purpose.MEASURE)
        if measuring and (tuner.travels or step.links.watch is not None):
            extra.append(OneByOne(self._barrier))
        count = NodeBytes(self.connection.device) if purpose is Purpose.COUNT else None
        if count is not None:
            extra.append(count)
        if extra:
            step = replace(step, observers=(*step.observers, *extra))
        if measuring and tuner.travels:
            step = replace(step, links=replace(step.links, exchange=BackToBack(step.links.exchange)))
        # 3. Forwards, backwards, exchanges, reductions.
        blocks = (block for stage in self.stages.values() for block in stage.blocks)
        with choosing(blocks) if first and self.mesh.group("tp") is None else contextlib.nullcontext():
            played = step.run() if coming.loop is None else self._compared(step, coming.loop)
        if count is not None:
            played = played._replace(result=replace(played.result, peak_bytes=count.count.peak))
        if first and self._compares:
            check_tensor_group(self.stages, self.mesh, rows.found)
        # 4. What the step has shown decides how the next ones are played.
        found = None if discovery is None else discovery.found(self.stages)
        counted = None if count is None else count.count
        result = tuner.pooled(coming, played.result, on_device=step.links.watch is not None)
        tuner.learn(coming, result, self.connection.boundary.timed, counted, found)
        standing = tuner.standing_uncut if first else tuner.standing
        return played._replace(result=replace(result, standing=standing) if standing else result)

    def _evaluate(self, step: Step) -> PlayedStep:
        loop = self.tuner.loop_of(step.plan)
        with self.connection.sharding.gathered(gathered_in(step.plan.ranks[step.links.rank])):
            played = step.run() if loop is None else self._compared(step, loop)
        return played._replace(result=replace(played.result, standing=self.tuner.standing_uncut))

    def _compared(self, step: Step, loop: Plan) -> PlayedStep:
        played = self.verification.play(step, loop)
        self.tuner.loops.note(step.plan)
        return played

    def _agree(self, step: Step, comparison: Comparison) -> None:
        """Compare the plan of a step over ranks, and its number of microbatches if it is another one here."""
        plan, count = step.plan, step.plan.program.microbatches
        if count != self._played:
            # Ranks whose number has not changed do not wait here: they play, and learn of this error there.
            if "microbatches" in comparison.differ(here=True):
                raise ValueError(
                    f"microbatches={count} on {self.mesh.label}, after {self._played}, and another number on a rank "
                    "beside it; allowed: the same on all ranks"
                )
            for stage in self.stages.values() if plan.program.peak_activations[step.links.rank] > 1 else ():
                refuse_graphs(stage.blocks, stage.names)
        self._played = count
        self.tuner.agree(plan)

    def _facts(self, step: Step) -> dict[str, float]:
        return {
            "microbatches": step.plan.program.microbatches,
            "loss_scale": step.loss_scale,
            "the number of steps so far": self.tuner.steps,
        }

    @property
    def _compares(self) -> bool:
        return self.options.reduce and self.mesh.several

    def _barrier(self) -> None:
        """Let all ranks come to the same place, with nothing in flight: nodes are measured."""
        self.connection.settle()
        self.mesh.barrier()

    def _check_parameters(self) -> None:
        """Check that parameters can be trained, and now and then that ranks hold the same, as do their routers."""
        check_gradients_possible()
        if _children_of(self.model) != self._made.children:
            raise ValueError("a block of the model was replaced, added or removed; allowed: a new Engine after that")
        connection = self.connection
        for number, stage in self.stages.items() if connection.links.reductions else ():
            stage.check_trained(self._made.trained[number], connection.sharding.holders)
        steps = self.tuner.steps
        if self._compares and (steps & (steps - 1) == 0 or steps % _COMPARED == 0):
            marks = "allreduce = False on experts of your own, tensor_model_parallel = True on slices over 'tp'"
            cause = f"one torch.manual_seed before the model is made, or {marks}"
            if steps:
                cause = "the same optimizer, and update_correction_bias over all ranks that hold a router"
            self.mesh.agree(values(self.stages, connection.tied.parameters, self.mesh), f", as by {cause}")

    def _check_devices(self) -> None:
        """Raise a ValueError for a parameter without values, or on another device than the engine."""
        device = self.connection.device
        for stage in self.stages.values():
            refuse_zero(stage.blocks, stage.names)  # as of a deepspeed.initialize behind the Engine
            for block, place in zip(stage.blocks, stage.names, strict=True):
                for name, parameter in block.named_parameters():
                    if parameter.is_meta:
                        raise ValueError(
                            f"{name} of {place} is on the meta device in a step; allowed: parameters with values"
                        )
                    # The engine takes the streams and random numbers of one device. FSDP2 may keep shards on another.
                    if parameter.device != device and not isinstance(parameter, DTensor):
                        raise ValueError(
                            f"{name} of {place} is on {str(parameter.device)!r}, in an Engine for a model on "
                            f"{str(device)!r}; allowed: a model that is on one device before its Engine is made"
                        )

    @property
    def program(self) -> Program:
        """Schedule of the next step."""
        return self.tuner.program

    @property
    def loss_fn(self) -> LossFunction | None:
        """Loss of a microbatch. Another may be set between steps."""
        return self._loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: LossFunction | None) -> None:
        check_loss(loss_fn)
        self._loss_fn = loss_fn

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the next step. Another may be set between steps, on all ranks alike.

        Raises:
            ValueError: One that is set is impossible for the program.
        """
        return self.tuner.microbatches

    @microbatches.setter
    def microbatches(self, count: int) -> None:
        self.tuner.microbatches = count

    @property
    def costs(self) -> NodeCosts | None:
        """Seconds of every node. May be set between steps, on all ranks alike; with None they are measured anew."""
        return self.tuner.costs

    @costs.setter
    @checked
    def costs(self, costs: NodeCosts | None) -> None:
        self.tuner.costs = costs

    @property
    def plan(self) -> Plan:
        """Plan of the next step. Another may be set between steps, on all ranks alike; it stays until costs are set.

        One that is set before the first step decides whether blocks are cut at the exchanges that they make by
        themselves; if they are, it is played from the second step on.
        """
        return self.tuner.plan

    @plan.setter
    @checked
    def plan(self, plan: Plan) -> None:
        self.tuner.plan = plan

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        """Shapes of the blocks of all stages, for which a plan of the next step is made."""
        return self.tuner.shapes

    @checked
    def mean_loss(self, result: StepResult) -> float:
        """Return the loss of a step over all ranks. All of them must call this."""
        with self.guarded("mean_loss"):
            losses = (
                torch.stack([x.detach().double().reshape(()) for x in result.losses]).tolist() if result.losses else []
            )
            mine = sum(loss * share for loss, share in zip(losses, result.shares, strict=True))
            total, share = self.mesh.sums(mine, sum(result.shares))
            line = self._finite.found(self.tuner.steps)  # losses were read
        self._finite.say(line)
        return total / share

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients to a norm of at most ``max_norm`` over the whole model; return the norm before, a scalar.

        All ranks must call this. ``norm_type`` is as of torch's ``clip_grad_norm_``: ``math.inf`` for the largest.
        """
        max_norm, norm_type = check_norm("max_norm", max_norm), check_norm("norm_type", norm_type)
        with self.guarded("clip_gradients"):
            repeated = self.connection.tied.repeated
            norm = clip(self.stages, self.program.placement, self.mesh, max_norm, norm_type, repeated)
            line = self._finite.found(self.tuner.steps, float(norm))
        self._finite.say(line)
        return norm

    def forget_sizes(self) -> None:
        """Let tensors that pass between stages have other sizes from the next step on; all ranks must call this."""
        self.connection.boundary.forget()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the parameters of this rank's stages, each once."""
        return iter(_parameters_of(self.stages))

    def modules(self) -> Iterator[torch.nn.Module]:
        """Return the modules of this rank's stages, each once."""
        blocks = (block for stage in self.stages.values() for block in stage.blocks)
        return iter(dict.fromkeys(chain.from_iterable(block.modules() for block in blocks)))

    @property
    def guarded(self) -> Callable[..., contextlib.AbstractContextManager[Comparison]]:
        """Guard of a call that all ranks make: :meth:`overlap1f1b.engine.connection.Connection.guarded`."""
        return self.connection.guarded

    def close(self) -> None:
        """Release communicators and threads; all ranks must call this. The engine cannot be used again.

        On gloo the connections of the exchange end when the engine is dropped.
        """
        self._finite.end()
        self.tuner.close()
        self.connection.close(before=self.wait_for_checkpoint)

    def wait_for_checkpoint(self) -> None:
        """Wait until no checkpoint is written in the background.

        Raises:
            OSError: It cannot be written, and nobody has asked for its result.
            RuntimeError: A rank failed meanwhile, in the same case.
        """
        settle, self._settle = self._settle, None
        if settle is not None:
            settle()

    def wait_later(self, settle: Callable[[], None]) -> None:
        """Let :meth:`wait_for_checkpoint`, and with it :meth:`close`, call what waits for a checkpoint."""
        self._settle = settle

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            of_class = getattr(type(self), name, None)
            is_read = isinstance(of_class, property) and of_class.fset is None
            is_option = name in EngineOptions.__dataclass_fields__
            is_made = name in Engine.__annotations__ and vars(self).get(name, value) is not value
            known = hasattr(self, name) or type(self) is not Engine  # a subclass, or a user, has attributes of its own
            meant = [] if known else get_close_matches(name, _SETTABLE, 1, 0.8)
            if name not in _SETTABLE and (is_read or is_option or is_made or meant):
                nearest = "".join(f"; nearest: {one}" for one in meant)
                raise ValueError(
                    f"engine.{name}={quoted(value)}, which changes nothing; allowed: {', '.join(_SETTABLE)}{nearest}"
                )
        super().__setattr__(name, value)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.tuner.close()
        self.connection.close(failed=kind is not None, before=self.wait_for_checkpoint)


def _parameters_of(stages: Mapping[int, Stage]) -> dict[torch.nn.Parameter, None]:
    every = (block.parameters() for stage in stages.values() for block in stage.blocks)
    return dict.fromkeys(chain.from_iterable(every))


def _tables_of(loss_fn: object) -> list[MutableMapping[Any, Any]]:
    """Return the tables of what a loss keeps if it is a module or a module's method."""
    held = [of for of in (loss_fn, getattr(loss_fn, "__self__", None)) if isinstance(of, torch.nn.Module)]
    return [table.values for module in held for table in places_of(module).values() if not table.shared]


def _children_of(model: Model) -> list[torch.nn.Module]:
    if isinstance(model, torch.nn.Sequential):
        return list(model.children())
    return list(model) if isinstance(model, list) else []


def _check_trains(program: Program) -> None:
    program.check()
    if program.forward_only:
        raise ValueError(f"program {program.name!r} has no backward; allowed: one that trains; evaluate() needs none")
