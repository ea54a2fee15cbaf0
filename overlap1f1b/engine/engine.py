"""Train a model by a Program, its exchanges hidden behind compute."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from overlap1f1b.cut.blocks import refuse_graphs
from overlap1f1b.cut.options import EngineOptions
from overlap1f1b.cut.places import places_of
from overlap1f1b.cut.segment import check_gradients_possible
from overlap1f1b.engine.agreement import (
    check_tensor_group,
    compare_batches,
    described,
    structure,
    values,
)
from overlap1f1b.engine.stages import Model, stages_of, tensor_mesh_of
from overlap1f1b.kernels.choice import choosing
from overlap1f1b.learn.check import Verification
from overlap1f1b.learn.measure import BackToBack
from overlap1f1b.learn.memory import ByteCount
from overlap1f1b.learn.tuner import State, Tuner
from overlap1f1b.plan import NodeCosts, Plan, StageShape
from overlap1f1b.play.capacity import Capacity, CapacityOverflowError
from overlap1f1b.play.feed import Batch, Feed, Microbatches, feed_batch
from overlap1f1b.play.microbatch import LossFunction
from overlap1f1b.play.player import Player, carved_out
from overlap1f1b.play.result import PlayedStep, StepResult, result_of
from overlap1f1b.reduce.clipping import check_norm, clip
from overlap1f1b.reduce.fsdp import Gathers, ShardedReducer, gathered_in
from overlap1f1b.reduce.reduction import Reduction
from overlap1f1b.reduce.sums import Reducer
from overlap1f1b.reduce.tensor import TensorGradients
from overlap1f1b.reduce.ties import TiedReduction, ties_in
from overlap1f1b.schedule import Program
from overlap1f1b.schedule.values import check_kind, quoted
from overlap1f1b.transport.boundary import Boundary
from overlap1f1b.transport.communicators import Communicators
from overlap1f1b.transport.devices import watch_of
from overlap1f1b.transport.exchange import Exchange, LocalExchange
from overlap1f1b.transport.groups import Group
from overlap1f1b.transport.lanes import Lane
from overlap1f1b.transport.mesh import DATA, Mesh
from overlap1f1b.transport.suspension import Forward, Kept

Failing = type[BaseException] | tuple[type[BaseException], ...]


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
            or the stages of this rank by their number, each a list of blocks, or a module with a list ``blocks`` and
            perhaps parameters ``tied`` over stages. A block maps one tensor or several to one or a tuple; it may hold
            Experts.
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
    """

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
        options = EngineOptions() if options is None else options
        check_kind("program", program, Program)
        check_kind("options", options, EngineOptions)
        check_kind("exchange", exchange, Exchange, None)
        if loss_fn is not None and not callable(loss_fn):
            raise ValueError(f"loss_fn={quoted(loss_fn)}; allowed: a function, or None")
        self.loss_fn, self.options, self.model, self._children = loss_fn, options, model, _children_of(model)
        self._settle: Callable[[], None] | None = None
        self._connect(program, mesh, exchange)
        self.verification.tables = partial(_tables_of, loss_fn)

    def _connect(
        self,
        program: Program,
        mesh: DeviceMesh | None,
        exchange: Exchange | None = None,
    ) -> None:
        """Make the groups of this engine and all that uses them."""
        options, placement = self.options, program.placement
        self.mesh = Mesh(mesh, options.limit, options.experts_over)
        self._communicators = Communicators(self, self.mesh, options.device, exchange)
        self._failed = self._closed = self._entered = False
        self._played = 0  # microbatches of the last step or evaluation
        self.failures, self._compares = self.mesh.failures, options.reduce and self.mesh.several
        with self._reporting(lambda: "in the construction of its Engine"):
            # 1. All ranks were given the same options.
            _check_trains(program)
            shared = None if exchange is None else type(exchange).__name__
            self.mesh.agree(
                {"program": described(program), "exchange": shared}
                | options.facts
                | {"experts_over": self.mesh.experts_over}
            )
            # 2. Groups of ranks: for exchanges, and for sums of gradients over ranks that hold the same stages.
            self.mesh.check(program)
            self.rank = rank = self.mesh.rank("pp")
            self.exchange = self._communicators.make_exchange()
            self._replicas = sorted({r for _, stage in placement.places(rank) for r in placement.replicas(stage)})
            dense, experts = (
                self.mesh.new_group(purpose, pp=self._replicas, over=over, ctas=options.device.sums)
                if options.reduce
                else None
                for purpose, over in (("reduce", DATA), ("reduce experts", self.mesh.expert_copies))
            )
            # 3. The stages of this rank, the same on all ranks that hold them.
            self.stages, self.sharding = stages_of(
                self.model,
                placement,
                self.mesh,
                self.exchange,
                options,
                reduce_dense=dense is not None,
                reduce_experts=experts is not None,
            )
            if options.memory is not None and len(self._replicas) == 1:  # others play other plans
                self.sharding.divide(self.stages)
            self.sharding.limit(options.limit)
            if self.sharding.groups and not options.reduce:
                raise ValueError("reduce=False over FSDP2; allowed: set_requires_gradient_sync(False) on its modules")
            self.mesh.agree(structure(self.stages))
            self._capacity = Capacity(options.capacity, self.stages.values(), self.mesh)
            # A rank's own stages may all be frozen; a model that is frozen on all ranks can only be evaluated.
            self._trains = any(self.mesh.every(any(p.requires_grad for p in self.parameters())).values())
            # 4. Transfers between stages, and sums of gradients.
            device = self._device = next(iter(self.stages.values())).device
            watch = watch_of(device)
            stamp = watch and watch.stamp
            self._communicators.use(device)
            self.boundary = Boundary(
                self.mesh,
                placement,
                device=device,
                dynamic=options.dynamic_shapes,
                tensor_mesh=tensor_mesh_of(self.stages.values(), self.mesh),
            )
            self._reduce_lane = Lane(
                "reduce", self.failures, background=self.mesh.on_gloo, stamp=stamp, abort=self.mesh.abort
            )
            self._shard_lane = Lane(
                "shards", self.failures, background=watch is None, stamp=stamp, abort=self.sharding.abort
            )
            self._gathers = Gathers(self.sharding, self._shard_lane, device) if self.sharding.of_block else None
            tied = self.model.items() if options.reduce and isinstance(self.model, Mapping) else ()
            self._tied = TiedReduction({number: ties_in(stage) for number, stage in tied}, placement, self.mesh)
            self.reductions = self._new_reductions(dense, experts)
            self._trained = {number: stage.trained(self.sharding.holders) for number, stage in self.stages.items()}
            self._communicators.warm_up()
            # 5. The player, what decides about its plans, and their comparison with a plain loop.
            # Weight gradients keep the places that a program, or the search of an order, has given them. Ranks of a
            # tensor or context group run collectives inside blocks, so they keep one order.
            self.player = Player(
                self.failures,
                exchange=self.exchange,
                boundary=self.boundary,
                reductions=self.reductions,
                gathers=self._gathers,
                watch=watch,
                fills=not (program.splits(rank) or program.search_seconds > 0 or self.mesh.inner),
            )
            self.tuner = Tuner(
                program,
                self.stages,
                self.mesh,
                options,
                self.player,
                self.boundary,
                counts_block=not self.exchange.background and options.capacity is None,
            )
            self.verification = Verification(self.stages, self.mesh, self.player, self.sharding)
            ep = self.mesh.exchanging
            for stage in self.stages.values():
                stage.exchange = self.exchange
                stage.agree = partial(self.mesh.agree, over=("dp", "ep", "cp", "tp"))  # a dropped engine ends at once
                # Blocks may exchange rows by themselves: the first step shows where.
                stage.foreign.ranks = [] if ep is None else dist.get_process_group_ranks(ep)

    def _new_reductions(self, dense: Group | None, experts: Group | None) -> list[Reduction]:
        """Return FSDP2's reduction for the parameters that it holds, and the engine's own for all others."""
        sharded: ShardedReducer | None = None
        if self.sharding.groups:
            if len(self._replicas) > 1:  # these play other plans
                self.sharding.ahead = None
            ranks, copies = (self.mesh.ranks(pp=self._replicas, over=over) for over in (DATA, self.mesh.expert_copies))
            with self.sharding.gathered():
                sharded = ShardedReducer(self.sharding, self.stages, self._shard_lane, ranks=ranks, expert_ranks=copies)
        tensors = TensorGradients(self.stages, self.mesh, sharded)
        apart = frozenset[torch.nn.Parameter]() if sharded is None else sharded.parameters
        plain = Reducer(self.stages, dense, experts, self._reduce_lane, apart=apart)
        # Tied parameters are the first to be set aside, so they are summed last; tensor groups sum before other ranks.
        found: list[Reduction] = [one for one in (self._tied, tensors) if one.reduces]
        found += [] if sharded is None else [sharded]
        return found + ([plain] if plain.reduces else [])

    def step(
        self,
        inputs: Batch | None = None,
        *,
        target: Batch | None = None,
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
            RuntimeError: Another rank failed, or did not answer within the limit; a :class:`CapacityOverflowError`.
        """
        if not self.tuner.steps and self._compares:
            ends = {"inputs": 0, "target": self.program.placement.stages - 1}
            needed = [name for name, stage in ends.items() if stage in self.stages]
            with self.guarded(lambda: "before its first step"):
                other = compare_batches({"inputs": inputs, "target": target}, self.mesh, needed)
            if other:
                warnings.warn(
                    f"ranks of one pipeline were given different {' and '.join(other)}: targets may belong to other "
                    "inputs; allowed: the same rows on all ranks of a pipeline, or None where they are ignored",
                    stacklevel=2,
                )
        if microbatches is not None:
            self.microbatches = microbatches
        make_feed = self._feed_maker(inputs, target, self.program, loss_scale, return_outputs)
        return self.play(make_feed, loss_scale=loss_scale).result

    def evaluate(
        self,
        inputs: Batch | None = None,
        *,
        target: Batch | None = None,
        return_outputs: bool = False,
        microbatches: int | None = None,
    ) -> StepResult:
        """Return the loss of a batch that divides into the microbatches, without gradients; see :meth:`step`.

        Another number of microbatches than the next step's holds for this evaluation alone.
        """
        program = self.tuner.evaluation_of(microbatches or self.microbatches).program
        make_feed = self._feed_maker(inputs, target, program, 1.0, return_outputs)
        return self.play(make_feed, grad=False, microbatches=microbatches).result

    def _feed_maker(
        self, inputs: Batch | None, target: Batch | None, program: Program, loss_scale: float, return_outputs: bool
    ) -> Callable[[], Feed]:
        return partial(
            feed_batch,
            self.stages,
            program,
            self.mesh,
            inputs,
            target,
            loss_fn=self.loss_fn,
            count_tokens=self.options.count_tokens,
            loss_scale=loss_scale,
            return_outputs=return_outputs,
        )

    def play(
        self,
        make_feed: Callable[[], Feed],
        *,
        grad: bool = True,
        loss_scale: float = 1.0,
        microbatches: int | None = None,
    ) -> PlayedStep:
        """Run a step whose microbatches get their inputs, targets and losses from a feed.

        :meth:`step` and :meth:`evaluate` are this with the feed of a batch.

        Args:
            make_feed: Makes the feed; an error in it is told to the other ranks as any other of the step.
            grad: Whether a backward follows; else the forwards alone are played.
            loss_scale: Factor of gradients that the feed has applied, to be compared over the ranks.
            microbatches: Number of microbatches of an evaluation; a step has :attr:`microbatches`.

        Raises:
            ValueError: A model without a parameter to train; gradients in inference mode; whatever the feed raises.
            RuntimeError: As of :meth:`step`.
        """
        play_nodes: Callable[[Plan], PlayedStep] = partial(self._play_nodes, make_feed=make_feed, grad=grad)
        if self._capacity.factor is not None:
            play_nodes = self._capacity.refusing(play_nodes, self.parameters() if grad else ())
        if not grad:
            return self._play_forwards(play_nodes, microbatches or self.microbatches)
        if not self._trains:
            raise ValueError("no parameter of the model requires a gradient; allowed: at least one that does")
        play_nodes, tuner = self.player.recorded(play_nodes), self.tuner
        plan, measuring, first = tuner.plan, tuner.state is State.MEASURING, not tuner.steps
        self.mesh.same = {"the number of steps so far": tuner.steps, "loss_scale": loss_scale}
        blocks = (block for stage in self.stages.values() for block in stage.blocks)
        with (
            self.guarded(lambda: self._at(plan)),
            choosing(blocks) if first and self.mesh.group("tp") is None else contextlib.nullcontext(),
        ):
            # 1. All ranks have the same plan and the same parameters.
            differ = self._agree(plan, loss_scale)
            self._check_parameters(first=first)
            # 2. Forwards, backwards, exchanges, reductions.
            notes, compared = tuner.notes, tuner.must_verify(plan)
            counts = notes or (tuner.tries_memory and self.player.watch is not None)
            count = ByteCount(self._device) if counts and not compared else None
            with (
                self._one_after_another() if measuring and not notes else contextlib.nullcontext(),
                self.player.counting(count, notes=notes),
            ):
                played = self._play_compared(plan, play_nodes) if compared else play_nodes(plan)
            # 3. All ranks have scaled alike.
            if differ()[1]:  # a gradient scaler of its own on some rank
                self.mesh.agree({"loss_scale": loss_scale})
            if first and self._compares:
                check_tensor_group(self.stages, self.mesh)
            # 4. What the step has shown decides how the next ones are played.
            tuner.learn(plan, played.result, count if notes else None)
        return played

    def _agree(self, plan: Plan, loss_scale: float = 1.0) -> Callable[..., list[bool]]:
        """Compare number of microbatches, loss scale and plan over ranks; return what waits for the first two."""
        self.player.position, count = None, plan.program.microbatches
        differ = self.mesh.compared(count, loss_scale)
        if count != self._played:
            # Ranks whose number has not changed do not wait here: they play, and learn of this error there.
            if differ(here=True)[0]:
                raise ValueError(
                    f"microbatches={count} on {self.mesh.label}, after {self._played}, and another number on a rank "
                    "beside it; allowed: the same on all ranks"
                )
            for stage in self.stages.values() if plan.program.peak_activations[self.rank] > 1 else ():
                refuse_graphs(stage.blocks, stage.names)
        self._played = count
        self.tuner.agree(plan)
        return differ

    def _play_nodes(self, plan: Plan, make_feed: Callable[[], Feed], *, grad: bool) -> PlayedStep:
        if not self.tuner.steps:
            self._check_devices()
        feed, nodes, placement = make_feed(), plan.ranks[self.rank], plan.program.placement
        microbatches = Microbatches(self.stages, plan.program, self.rank, feed, grad=grad)
        for stage in self.stages.values() if grad and self.tuner.looks else ():
            stage.look_for_exchanges()
        # 1. Set gradients of earlier steps aside; post the first receives.
        reductions = self.reductions if grad else []
        for reduction in reductions:
            reduction.begin(plan.ranks[self._replicas[0]])
        self.boundary.begin(nodes, plan.program.microbatches, remember=grad)
        # 2. Play the nodes, with the modules' calls of experts and linear layers replaced.
        # Backwards run on this thread: handing each to autograd's thread of the device costs more than launching it.
        here = torch.autograd.set_multithreading_enabled(False)
        with here, Kept(self._device), contextlib.ExitStack() as installed, torch.no_grad():
            installed.enter_context(carved_out(self.exchange.sms if self.options.device.carveout else 0))
            for stage in self.stages.values():
                installed.enter_context(stage.installed(feed.aux_scale))
            self.player.play(nodes, microbatches)
        ended = microbatches.of_stage(placement.stages - 1)
        result = result_of(ended, [feed.shares[m.index] for m in ended], self.player)
        # 3. Wait for the reductions, the last to set gradients aside first.
        for reduction in reversed(reductions):
            reduction.finish()
        # 4. A device that waits for a lost rank would let the caller wait for ever, in a call that cannot be ended.
        self._communicators.settle(self._pending)
        return PlayedStep(result, microbatches)

    def _pending(self) -> str:
        node = self.player.first_pending()
        return f"{'the end of the step' if node is None else node} has not ended on the device"

    def _play_forwards(self, play_nodes: Callable[[Plan], PlayedStep], microbatches: int) -> PlayedStep:
        plan = self.tuner.evaluation_of(microbatches)
        with self.guarded(lambda: self._at(plan)):
            differ = self._agree(plan)
            with self.sharding.gathered(gathered_in(plan.ranks[self.rank])):
                compared = self.tuner.must_verify(plan)
                played = self._play_compared(plan, play_nodes) if compared else play_nodes(plan)
            differ(here=True)
        return played

    def _play_compared(self, plan: Plan, play_nodes: Callable[[Plan], PlayedStep]) -> PlayedStep:
        """Play a step of a plan, and compare it with a plain loop."""
        played = self.verification.play(plan, self.tuner.reference_of(plan), play_nodes, self.observe)
        self.tuner.note_verified(plan)
        return played

    @contextlib.contextmanager
    def _one_after_another(self) -> Iterator[None]:
        """Put a barrier before every exchange, and send each twice: nodes are measured."""
        travels = not isinstance(self.exchange, LocalExchange)

        def barrier() -> None:
            for reduction in self.reductions:
                reduction.settle()
            if self._gathers is not None:
                self._gathers.settle()
            self._communicators.settle(self._pending)  # else the hosts would wait for each other, and not the devices
            self.mesh.barrier()

        try:
            self.player.before_launch = barrier if travels or self.player.watch is not None else None
            for stage in self.stages.values():
                stage.exchange = BackToBack(self.exchange) if travels else self.exchange
            yield
        finally:
            self.player.before_launch = None
            for stage in self.stages.values():
                stage.exchange = self.exchange

    def _check_parameters(self, *, first: bool) -> None:
        """Check that parameters can be trained, and in the first step that ranks hold the same."""
        check_gradients_possible()
        if _children_of(self.model) != self._children:
            raise ValueError("a block of the model was replaced, added or removed; allowed: a new Engine after that")
        for number, stage in self.stages.items() if self.reductions else ():
            stage.check_trained(self._trained[number], self.sharding.holders)
        if first and self._compares:
            facts = values(self.stages, self._tied.parameters, self.mesh)
            marks = "allreduce = False on experts of your own, tensor_model_parallel = True on slices over 'tp'"
            self.mesh.agree(facts, f", as by one torch.manual_seed before the model is made, or {marks}")
            for stage in self.stages.values() if "tp" in self.mesh.experts_over else ():
                stage.first_rows = {}

    def _check_devices(self) -> None:
        for stage in self.stages.values():
            for block, place in zip(stage.blocks, stage.names, strict=True):
                for name, parameter in block.named_parameters():
                    if parameter.is_meta:
                        raise ValueError(
                            f"{name} of {place} is on the meta device in a step; allowed: parameters with values"
                        )
                    # The engine takes the streams and random numbers of one device. FSDP2 may keep shards on another.
                    if parameter.device != self._device and not isinstance(parameter, DTensor):
                        raise ValueError(
                            f"{name} of {place} is on {str(parameter.device)!r}, in an Engine for a model on "
                            f"{str(self._device)!r}; allowed: a model that is on one device before its Engine is made"
                        )

    @property
    def program(self) -> Program:
        """Schedule of the next step."""
        return self.tuner.program

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
    def costs(self, costs: NodeCosts | None) -> None:
        check_kind("costs", costs, NodeCosts, None)
        self.tuner.costs = costs

    @property
    def plan(self) -> Plan:
        """Plan of the next step. Another may be set between steps, on all ranks alike; it stays until costs are set.

        One that is set before the first step decides whether blocks are cut at the exchanges that they make by
        themselves; if they are, it is played from the second step on.
        """
        return self.tuner.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        check_kind("plan", plan, Plan)
        self.tuner.plan = plan

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        """Shapes of the blocks of all stages, for which a plan of the next step is made."""
        return self.tuner.shapes

    def mean_loss(self, result: StepResult) -> float:
        """Return the loss of a step over all ranks. All of them must call this."""
        with self.guarded(lambda: "in mean_loss"):
            losses = (
                torch.stack([x.detach().double().reshape(()) for x in result.losses]).tolist() if result.losses else []
            )
            mine = sum(loss * share for loss, share in zip(losses, result.shares, strict=True))
            total, share = self.mesh.sums(mine, sum(result.shares))
            return total / share

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients to a norm of at most ``max_norm`` over the whole model; return the norm before, a scalar.

        All ranks must call this. ``norm_type`` is as of torch's ``clip_grad_norm_``: ``math.inf`` for the largest.
        """
        max_norm, norm_type = check_norm("max_norm", max_norm), check_norm("norm_type", norm_type)
        with self.guarded(lambda: "in clip_gradients"):
            return clip(self.stages, self.program.placement, self.mesh, max_norm, norm_type, self._tied.repeated)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the parameters of this rank's stages, each once."""
        every = (block.parameters() for stage in self.stages.values() for block in stage.blocks)
        return iter(dict.fromkeys(chain.from_iterable(every)))

    @contextlib.contextmanager
    def guarded(self, where: Callable[[], str], of: Failing = BaseException) -> Iterator[None]:
        """After a failure in the body, put earlier gradients back, end the waits of all other ranks, and this engine.

        Args:
            where: Returns what this rank was doing, for messages.
            of: Failures that end the engine, by default all; after others it can go on.

        Raises:
            RuntimeError: The engine has failed before, or is in a step.
        """
        if self._closed:
            raise RuntimeError("this engine is closed; allowed: a new one, on all ranks")
        if self._failed:
            raise RuntimeError("this engine failed before; allowed: a new one, on all ranks")
        # A block would take the exchanges and parameters of another engine's step for its own.
        if self._entered or Forward.running() is not None:
            raise RuntimeError("an engine is used inside a block or a loss of a step; allowed: between steps")
        self._entered = True
        try:
            with self._reporting(where, of), self._communicators.watched():
                yield
        except CapacityOverflowError:  # on all ranks, after everything was played
            raise
        except of:
            self.boundary.forget()
            if self._gathers is not None:
                self._gathers.forget()
            for reduction in self.reductions:
                reduction.restore()
            raise
        finally:
            self._entered = False

    @contextlib.contextmanager
    def _reporting(self, where: Callable[[], str], of: Failing = BaseException) -> Iterator[None]:
        """Tell the other ranks of a failure in the body, and end their waits."""
        try:
            yield
        except CapacityOverflowError:
            raise
        except of as error:
            self._failed = self.mesh.several
            self.failures.tell(error, f"{self.mesh.label} failed {where()}")
            if self._failed:
                self._communicators.abort()
            self.failures.explain(error)
            raise

    def _at(self, plan: Plan) -> str:
        position = self.player.position
        if position is None:
            return "before the first node of its plan"
        return f"at {plan.ranks[self.rank][position]}, position {position} of its plan"

    def close(self) -> None:
        """Release communicators and threads; all ranks must call this. The engine cannot be used again.

        On gloo the connections of the exchange end when the engine is dropped.
        """
        if self._closed:
            return
        try:
            self.wait_for_checkpoint()
        except (OSError, RuntimeError):
            if not self._failed:
                raise
        finally:
            self._closed = True
            try:
                self._communicators.close(failed=self._failed)
            finally:
                for lane in self.lanes:
                    lane.close()
                self.boundary.close()

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

    @property
    def lanes(self) -> list[Lane]:
        """All lanes on which this rank's transfers and sums travel."""
        return [*self.player.lanes.values(), *self.boundary.lanes, self._reduce_lane, self._shard_lane]

    def observe(self, recorder: Any) -> None:
        """Let a :class:`~overlap1f1b.record.recorder.Recorder` follow the steps, or with None nobody."""
        self.player.recorder = recorder
        for lane in self.lanes:
            lane.recorder = recorder

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._failed |= kind is not None and self.mesh.several  # the other ranks may not come here
        self.close()


def _tables_of(loss_fn: object) -> list[MutableMapping[Any, Any]]:
    """Return the tables of what a loss keeps if it is a module or a module's method."""
    held = [one for one in (loss_fn, getattr(loss_fn, "__self__", None)) if isinstance(one, torch.nn.Module)]
    return [place.table for one in held for place in places_of(one).values() if not place.shared]


def _children_of(model: Model) -> list[torch.nn.Module]:
    if isinstance(model, torch.nn.Sequential):
        return list(model.children())
    return list(model) if isinstance(model, list) else []


def _check_trains(program: Program) -> None:
    program.check()
    if program.forward_only:
        raise ValueError(f"program {program.name!r} has no backward; allowed: one that trains; evaluate() needs none")
