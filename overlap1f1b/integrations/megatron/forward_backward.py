"""Megatron-Core's forward-backward functions, played by the engine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import nn

from overlap1f1b.engine import Engine, EngineOptions, Feed
from overlap1f1b.integrations.megatron.chunk import Chunk
from overlap1f1b.integrations.megatron.config import (
    PARALLEL_STATE,
    Config,
    ProcessGroups,
    attribute_of,
    check_options,
    check_sizes,
    class_names,
    each,
    group_of,
    limit_inner,
    playing_alike,
    size_of,
)
from overlap1f1b.integrations.megatron.step import MOE_LOSS, ChunkStep, GradientSync, Losses, Rewound, inside, logged
from overlap1f1b.integrations.rows import Dispatcher
from overlap1f1b.play.observers import Observer
from overlap1f1b.schedule import AUTO, Placement, Program, auto, build_schedule, schedule_of
from overlap1f1b.schedule import SCHEDULES as FIXED
from overlap1f1b.schedule.values import check_each, check_size, checked
from overlap1f1b.transport.exchange import CollectiveExchange, Exchange, own_exchange
from overlap1f1b.transport.mesh import grid_of

NO_PIPELINING = "forward_backward_no_pipelining"
WITHOUT_INTERLEAVING = "forward_backward_pipelining_without_interleaving"
WITH_INTERLEAVING = "forward_backward_pipelining_with_interleaving"
COMBINED_NO_PIPELINING = "combined_1f1b_schedule_for_no_pipelining"
COMBINED_INTERLEAVED = "combined_1f1b_schedule_for_interleaved_pipelining"

SCHEDULES = {
    NO_PIPELINING: "sequential",
    WITHOUT_INTERLEAVING: "1f1b",
    WITH_INTERLEAVING: "interleaved_1f1b",
    COMBINED_NO_PIPELINING: "combined_1f1b",
    COMBINED_INTERLEAVED: "combined_1f1b",
}
"""The Program of each function; with ``overlap_moe_expert_parallel_comm`` every function plays ``combined_1f1b``."""
PROGRAMS = tuple(name for name in (*FIXED, AUTO) if name != "dualpipe")
"""Programs that are played under any chunks; ``dualpipe`` would need each chunk twice."""

CHUNKED = (WITH_INTERLEAVING, COMBINED_INTERLEAVED)
UNPIPELINED = (NO_PIPELINING, COMBINED_NO_PIPELINING)


@checked
def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    schedule_pg_collection: object = None,
    *,
    pg_collection: object = None,
    schedule: str | None = None,
    options: EngineOptions | None = None,
    split_rank: int | None = None,
    dispatcher: Dispatcher = "own",
) -> ForwardBackward:
    """Return the function that runs the forwards and backwards of a step. Keep it: plans and costs end with it.

    >>> groups = ProcessGroups(pp=pp_group, ep=ep_group)
    >>> forward_backward = get_forward_backward_func(pp_size=4, vp_size=2, pg_collection=groups)
    >>> reports = forward_backward(
    ...     forward_step_func=forward_step, data_iterator=iterators, model=chunks, num_microbatches=16,
    ...     seq_length=4096, micro_batch_size=1,
    ... )  # gradients are in .grad

    As in Megatron-Core, ``pp_size`` and ``vp_size`` choose among ``forward_backward_no_pipelining``,
    ``…_pipelining_without_interleaving`` and ``…_pipelining_with_interleaving``. The function's first call finds where
    chunks exchange rows along "ep", the second measures the nodes; neither hides any exchange.

    Args:
        pp_size: Number of pipeline ranks; by default the size of the group ``pp``.
        vp_size: Number of chunks of a rank, if interleaved. If ``pp_size``, ``vp_size`` and ``pg_collection`` are all
            missing, Megatron-Core's ``parallel_state`` gives it, if it is initialised.
        schedule_pg_collection: What Megatron-LM's training loop passes, in the place of a missing ``pg_collection``.
        pg_collection: Groups of this rank: :class:`ProcessGroups`, or any object with ``pp``, ``ep``, ``cp``, ``tp``
            and ``dp``. By default the groups of Megatron-Core's ``parallel_state`` if this is initialised; else this
            rank alone.
        schedule: One of ``SCHEDULES``, instead of this choice; or a program, one of ``PROGRAMS``. ``zb_v`` and
            ``dualpipev`` play two chunks a rank in a V: of P ranks, rank r holds stages r and 2P − 1 − r.
        options: How the engine plays; ``reduce`` and ``dynamic_shapes`` follow from Megatron-Core's config. Groups in
            which layers communicate ("tp", "cp", "ep", and the experts' groups of ``pg_collection``) get its
            ``timeout``, too, and keep it. With a ``no_sync_func`` or a ``grad_sync_func`` a step that is compared with
            a plain loop is played three times.
        split_rank: First pipeline rank of the decoder in an encoder-decoder model. From there on, the last input of a
            chunk (the encoder's output) is appended to its output.
        dispatcher: What exchanges the rows of Megatron-Core's own MoE layers: ``"own"``, the layer's; or ``"rows"``,
            ours, which sends a token once to each rank, and has ``parts`` and ``capacity``. Results then differ by
            rounding, since the experts' rank adds the results of a token first.

    Raises:
        ValueError: The sizes do not fit the groups, or the schedule or the dispatcher is unknown.
    """
    for name, size in (("pp_size", pp_size), ("vp_size", vp_size), ("split_rank", split_rank)):
        if size is not None:
            check_size(name, size)
    if "MultiModuleProcessGroupCollection" in class_names(schedule_pg_collection):
        raise ValueError(
            "schedule_pg_collection of type MultiModuleProcessGroupCollection; "
            "allowed: None, or the groups of one module"
        )
    default = ProcessGroups.default() if pg_collection is None else None
    groups = next(one for one in (pg_collection, schedule_pg_collection, default) if one is not None)
    held = size_of(groups, "pp")
    if pp_size is None and vp_size is None and not isinstance(default, ProcessGroups | None):
        vp_size = sys.modules[PARALLEL_STATE].get_virtual_pipeline_model_parallel_world_size()
    if pp_size not in (None, held):
        raise ValueError(f"pp_size={pp_size} with a group pp of {held} ranks; allowed: {held}")
    program = schedule if schedule in PROGRAMS else None
    if program is not None or schedule is None:
        chunked = vp_size is not None or (program is not None and schedule_of(program).fixed_chunks > 1)
        piped = WITH_INTERLEAVING if chunked else WITHOUT_INTERLEAVING
        schedule = piped if held > 1 or program is not None else NO_PIPELINING
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}; allowed: {', '.join((*SCHEDULES, *PROGRAMS))}")
    if schedule in UNPIPELINED and held > 1:
        raise ValueError(f"{schedule} over {held} pipeline ranks; allowed: 1")
    if split_rank is not None and (schedule in CHUNKED or not 0 < split_rank < held):
        raise ValueError(
            f"split_rank={split_rank} with {schedule} over {held} ranks; allowed: 1 to {held - 1} without interleaving"
        )
    return ForwardBackward(schedule, groups, vp_size, options or EngineOptions(), split_rank, program, dispatcher)


@dataclass(eq=False, repr=False)
class ForwardBackward:
    """One of Megatron-Core's forward-backward functions; made by :func:`get_forward_backward_func`."""

    name: str
    groups: object
    vp_size: int | None
    options: EngineOptions
    split_rank: int | None
    program: str | None
    dispatcher: Dispatcher

    def __post_init__(self) -> None:
        self.__name__ = self.name  # as of a function
        self._engines: WeakValueDictionary[tuple[Any, ...], ChunkEngine] = WeakValueDictionary()
        self._forget()

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: nn.Module | list[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: object = None,
        pg_collection: object = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run a step and add its gradients to ``.grad``; only ``finalize_model_grads_func`` reduces them over ranks.

        ``forward_step_func`` is suspended at each exchange of rows, and other microbatches run in between. So it must
        read the model's state before the first MoE layer. The only timer is ``forward-backward``.

        Args:
            forward_step_func: ``(data_iterator, chunk) → (output, loss_func)``, called once for each microbatch of
                each chunk, in order. ``output`` is a tensor or a list of tensors, which the next chunk's
                ``set_input_tensor`` receives; on the last stage ``loss_func`` is called with it, see :class:`Losses`.
            data_iterator: First argument of ``forward_step_func``; if interleaved, a list of one for each chunk.
            model: A chunk, or a list of chunks, with ``set_input_tensor([tensor, …])``, on the first stage ``[None]``.
                Its ``config`` has Megatron-Core's fields; the fields of :class:`Config` have an effect.
            num_microbatches: Number of microbatches, 1 or more; another from call to call has a plan at once.
            seq_length: Tokens of a sequence. The sizes of tensors between stages may change from call to call only if
                this or the next two change, or with ``config.variable_seq_lengths``.
            micro_batch_size: Sequences of a microbatch.
            decoder_seq_length: Tokens of a decoder's sequence.
            forward_only: Whether to run no backward.
            collect_non_loss_data: Whether to call ``loss_func(output, non_loss_data=True)`` and return its results.
            first_val_step: With ``forward_only``: whether to call the chunk's ``set_is_first_microbatch``.
            adjust_tensor_shapes_fn: Accepted, but not called: the engine needs no shapes ahead.
            p2p_communicator: None, or Megatron-Core's for the group ``pp``, as Megatron-Bridge passes it; not used.
            pg_collection: The same groups as before; passed to ``finalize_model_grads_func``.
            force_all_reduce: Passed to ``finalize_model_grads_func``.

        Returns:
            On the last stage's rank, the report of ``loss_func`` for each microbatch in order; elsewhere nothing.

        Raises:
            ValueError: A value does not fit; the message names it.
            RuntimeError: Another rank failed, or did not answer within the limit.
        """
        # 1. Check the arguments.
        groups = self._checked_groups(pg_collection, p2p_communicator)
        models = self._checked_models(model)
        iterators = self._checked_iterators(data_iterator, len(models))
        sizes = {
            "seq_length": seq_length,
            "micro_batch_size": micro_batch_size,
            "decoder_seq_length": decoder_seq_length,
        }
        for name, value in {"num_microbatches": num_microbatches, **sizes}.items():
            if value is not None:
                check_size(name, value)
        for chunk in models:
            check_options(chunk)
            check_sizes(chunk, groups)
        config = Config.of(models[0])
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        try:
            # 2. Find the engine for these models, or make it.
            key = (config.variable_seq_lengths, self._program_name(config), *map(id, models))
            engine = self._engines.get(key)
            if engine is None:
                engine = self._engines[key] = self._engine(models, config, num_microbatches)
                engines_of(models[0]).setdefault(self, []).append(engine)
            # 3. Play the step.
            cp, trains = size_of(groups, "cp"), not forward_only
            losses = Losses(config, num_microbatches, cp, engine.device, training=trains, collect=collect_non_loss_data)
            marks_first = trains or first_val_step is None or first_val_step
            steps = [ChunkStep(forward_step_func, iterator, losses, marks_first) for iterator in iterators]
            engine.play(steps, sizes, grad=trains)
        except BaseException:  # transfers under way may still arrive in the exchange that all engines share
            self._forget()
            raise
        # 4. Let the user reduce the gradients.
        if config.finalize_model_grads_func is not None and not forward_only:
            tokens = losses.tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(models, tokens, pg_collection=groups, force_all_reduce=force_all_reduce)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return losses.reports

    def close(self) -> None:
        """Release threads and communicators; all ranks must call this, with the same models alive.

        A later call makes new ones.
        """
        gc.collect()  # on all ranks the engines of models that are gone have ended then
        for engine in list(self._engines.values()):
            engine.engine.close()
        if isinstance(self._exchange, CollectiveExchange):
            self._exchange.close()
        self._forget()

    def _forget(self) -> None:
        for engine in list(self._engines.values()):
            engines_of(next(iter(engine.chunks.values())).model).pop(self, None)
        self._engines.clear()
        self._exchange: Exchange | None = None

    def _program_name(self, config: Config) -> str:
        overlapped = config.overlap_moe_expert_parallel_comm
        return self.program or ("combined_1f1b" if overlapped else SCHEDULES[self.__name__])

    def _program(self, config: Config, microbatches: int, chunks: int) -> Program:
        name, ranks = self._program_name(config), size_of(self.groups, "pp")
        if name == AUTO:  # its own chunks would be in a V
            return auto(microbatches, Placement.loop(ranks, chunks))
        grouped = chunks > 1 and schedule_of(name).takes("group_size")
        size = config.microbatch_group_size_per_vp_stage if grouped else None
        return build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks, group_size=size)

    def _engine(self, models: list[nn.Module], config: Config, microbatches: int) -> ChunkEngine:
        """Make the engine of this rank's chunks, which are checked against the stages of the program."""
        program = self._program(config, microbatches, len(models))
        pp, ep = group_of(self.groups, "pp"), group_of(self.groups, "ep")
        rank = 0 if pp is None else pp.rank()
        passes = self.split_rank is not None and rank >= self.split_rank
        chunks: dict[int, Chunk] = {}
        for (_, stage), model in zip(program.placement.places(rank), models, strict=True):
            last = stage == program.placement.stages - 1
            for name, wanted in (("pre_process", stage == 0), ("post_process", last)):
                found = attribute_of(model, name) if len(models) > 1 else None
                if isinstance(found, bool) and found != wanted:  # it embeds, or computes a loss, where others should
                    raise ValueError(
                        f"{name}={found} of the chunk of stage {stage} of {program.name}, whose stages are on ranks "
                        f"{program.placement.pipes[0]}; allowed: {wanted}"
                    )
            chunks[stage] = chunk = Chunk(model, stage, last=last, exchanges=ep is not None, dispatcher=self.dispatcher)
            chunk.passes_last_input = passes and not last
        limit = self.options.limit
        limit_inner(self.groups, limit)
        mesh = grid_of(pp, ep, next(iter(chunks.values())).device, limit)
        if self._exchange is None:
            self._exchange = own_exchange(ep, limit=limit)
        engine = Engine(
            {stage: [chunk] for stage, chunk in chunks.items()},
            program,
            mesh=mesh,
            options=replace(self.options, reduce=False, dynamic_shapes=config.variable_seq_lengths),
            exchange=self._exchange,
        )
        return ChunkEngine(engine, chunks, self.groups)

    def _checked_groups(self, pg_collection: object, p2p_communicator: object) -> object:
        """Return the process groups of a call, whose pipeline and expert groups must be the first call's."""
        pp = group_of(self.groups, "pp")
        if p2p_communicator is not None and (
            getattr(p2p_communicator, "pp_group", None) is None or group_of(p2p_communicator, "pp_group") is not pp
        ):
            what = type(p2p_communicator).__name__
            raise ValueError(f"p2p_communicator of type {what}; allowed: None, or one whose pp_group is the group pp")
        groups = self.groups if pg_collection is None else pg_collection
        for name in ("pp", "ep"):
            if group_of(groups, name) is not group_of(self.groups, name):
                raise ValueError(
                    f"pg_collection with another group {name}; allowed: the one of get_forward_backward_func"
                )
        return groups

    def _checked_models(self, model: nn.Module | list[nn.Module]) -> list[nn.Module]:
        models = each(model, 1)
        allowed = (self.vp_size or "1 or more") if self.__name__ in CHUNKED else 1
        if not models or allowed not in (len(models), "1 or more"):
            raise ValueError(f"{len(models)} model chunks for {self.__name__}; allowed: {allowed}")
        return check_each("model", models, nn.Module)

    def _checked_iterators(self, data_iterator: Any, chunks: int) -> list[Any]:
        iterators = each(data_iterator, 1)
        if len(iterators) != chunks:
            raise ValueError(
                f"{len(iterators)} data iterators for {chunks} model chunks of {self.__name__}; "
                f"allowed: a list of {chunks}"
            )
        return iterators


class Engines(WeakKeyDictionary[ForwardBackward, list["ChunkEngine"]]):
    """The engines of a model, by the function that has made them; the model holds them, since they keep it alive."""

    def __deepcopy__(self, memo: object) -> Engines:
        return Engines()

    def __reduce__(self) -> tuple[type[Engines], tuple[()]]:
        return Engines, ()


def engines_of(model: nn.Module) -> Engines:
    """Return the engines that a model holds; a copy of the model holds none."""
    return vars(model).setdefault("_overlap1f1b_engines", Engines())


class ChunkEngine:
    """An engine whose stages are chunks, which fetch their own data and divide their own losses."""

    def __init__(self, engine: Engine, chunks: Mapping[int, Chunk], groups: object) -> None:
        self.engine, self.chunks = engine, dict(chunks)
        engine.tuner.share_plans_with(playing_alike(groups))
        engine.verification.watch(lambda: chain.from_iterable(map(inside, logged())))
        self.device = next(iter(self.chunks.values())).device
        self._sizes: Mapping[str, int | None] | None = None

    def play(self, steps: Sequence[ChunkStep], sizes: Mapping[str, int | None], *, grad: bool) -> None:
        """Play a step, and let data-parallel wrappers reduce gradients in it; without ``grad`` play its forwards.

        Tensors between stages may change their sizes if ``sizes`` are not the last call's.
        """
        losses, engine = steps[0].losses, self.engine
        config, engine.microbatches = losses.config, losses.microbatches
        if self._sizes not in (None, sizes):
            engine.forget_sizes()
        self._sizes, last = sizes, engine.program.placement.stages - 1
        verifies = engine.tuner.verifies_next(grad=grad)
        if verifies:
            for step, iterator in zip(steps, Rewound.of([step.data_iterator for step in steps]), strict=True):
                step.data_iterator, step.before = iterator, dict(getattr(iterator, "__dict__", ()))

        def feed() -> Feed:
            """Begin the chunks' calls; return the feed: a chunk reads its own data, and the last computes the loss."""
            for step in steps:
                step.begin()

            def arguments_of(stage: int, _: int) -> dict[str, Any]:
                # The last chunk computes the loss itself.
                return {"inputs": () if stage == 0 else None, "loss_fn": (lambda loss: loss) if stage == last else None}

            shares = dict.fromkeys(range(losses.microbatches), 1.0)
            return Feed(arguments_of, shares, aux_scale=float(losses.scale_of(MOE_LOSS)))

        observers: list[Observer] = []
        with ExitStack() as stepping:
            if grad:
                models = {stage: chunk.model for stage, chunk in self.chunks.items()}
                for gather, model in zip(each(config.param_sync_func, len(steps)), models.values(), strict=True):
                    if gather is not None:
                        gather(model.parameters())
                    # Forwards would bring other ranks' new weights, which the plays of one step would not share.
                    if verifies and getattr(attribute_of(model, "ddp_config"), "overlap_param_gather", False):
                        attribute_of(model, "start_param_sync")(force_sync=True)
                nodes = engine.plan.ranks[engine.mesh.rank("pp")]
                sync = stepping.enter_context(GradientSync(config, models, nodes, losses.microbatches - 1))
                observers += [sync] if sync.acts else []
            stepping.enter_context(losses.scaling_attached())
            for chunk, step in zip(self.chunks.values(), steps, strict=True):
                stepping.enter_context(chunk.stepping(step))
            engine.play(feed, grad=grad, observers=observers)
