"""A forward-backward function of Megatron-Core, played by the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap1f1b.integrations.megatron.chunk import Chunk, Step
from overlap1f1b.integrations.megatron.config import Config, each, group_of, mesh_of, size_of
from overlap1f1b.integrations.megatron.engine import ChunkEngine
from overlap1f1b.integrations.megatron.layers import Layers
from overlap1f1b.integrations.megatron.losses import Losses
from overlap1f1b.integrations.megatron.names import CHUNKED, SCHEDULES, WITHOUT_INTERLEAVING
from overlap1f1b.integrations.megatron.options import SIZES, check_options, check_sizes
from overlap1f1b.integrations.megatron.sync import GradientSync
from overlap1f1b.moe import Experts
from overlap1f1b.plan import NodeCosts, Overlap
from overlap1f1b.schedule import Program, build_schedule
from overlap1f1b.transport.exchange import Exchange, build_exchange, lane_groups


@dataclass
class _Prepared:
    """An engine for a model and a number of microbatches."""

    models: list[nn.Module]
    engine: ChunkEngine
    sizes: tuple[int | None, ...] = ()  # of the last call's tensors


class ForwardBackward:
    """One of Megatron-Core's schedules; made by :func:`get_forward_backward_func`."""

    def __init__(
        self,
        name: str,
        groups: object,
        *,
        vp_size: int | None,
        overlap: Overlap,
        costs: NodeCosts | None,
        layers: Layers,
        split_rank: int | None,
        timeout: float,
    ) -> None:
        self.__name__ = name
        self.groups, self.vp_size, self.overlap, self.costs = groups, vp_size, overlap, costs
        self.layers, self.split_rank, self.timeout = layers, split_rank, timeout
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}
        self._exchange: Exchange | None = None

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
        p2p_communicator: None = None,
        pg_collection: object = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Runs a step; adds gradients to ``.grad``, reduced over no ranks but by ``finalize_model_grads_func``.

        Dropout draws from a stream of random numbers of each microbatch. ``forward_step_func`` is left and taken up
        again wherever a layer begins or experts are called, other microbatches running in between: what it needs of the
        model's state it reads before. The timer is ``forward-backward`` alone, since forwards and backwards interleave.

        Args:
            forward_step_func: ``(data_iterator, chunk) → (output, loss_func)``, called once a microbatch of each chunk,
                in their order. ``output`` is a tensor or a list of them, which the next chunk's ``set_input_tensor`` is
                given; ``loss_func`` is called with it on the last stage: see :class:`Losses`.
            data_iterator: Passed to it; a list of one for each chunk when interleaved.
            model: A chunk, or a list of them, with ``set_input_tensor([tensor, …])``, ``[None]`` on the first stage.
                Its ``config`` has Megatron-Core's fields; those of :class:`Config` have an effect.
            num_microbatches: M, 1 or more.
            seq_length, micro_batch_size, decoder_seq_length: Of this call. Sizes are taken from what passes between
                stages, which may change from call to call only with these, or with ``config.variable_seq_lengths``.
            forward_only: Runs no backward.
            collect_non_loss_data: Calls ``loss_func(output, non_loss_data=True)`` and returns what that gives.
            first_val_step: With ``forward_only``, whether ``set_is_first_microbatch`` is called, where a chunk has it.
            adjust_tensor_shapes_fn: Accepted without interleaving and not called, since no shape is foretold.
            p2p_communicator: None; the engine has its own.
            pg_collection: The same groups as before; handed to ``finalize_model_grads_func``.
            force_all_reduce: Handed to ``finalize_model_grads_func``.

        Returns:
            What ``loss_func`` reported of each microbatch in order, on the last stage's rank; elsewhere nothing.

        Raises:
            ValueError: Values that do not fit, named.
            RuntimeError: Another rank failed, or did not answer within the limit.
        """
        groups = self._checked_groups(pg_collection, p2p_communicator)
        models = self._checked_models(model)
        iterators = self._checked_iterators(data_iterator, len(models))
        sizes = (seq_length, micro_batch_size, decoder_seq_length)
        named = zip(("seq_length", "micro_batch_size", "decoder_seq_length"), sizes, strict=True)
        for name, value in (("num_microbatches", num_microbatches), *named):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; allowed: 1 or more")
        if adjust_tensor_shapes_fn is not None and self.__name__ != WITHOUT_INTERLEAVING:
            raise ValueError(f"adjust_tensor_shapes_fn with {self.__name__}; allowed: with {WITHOUT_INTERLEAVING}")
        for chunk in models:
            check_options(chunk, suspends=False)
            # Costs that are given the same on all ranks need no group to agree on them.
            check_sizes(chunk, groups, [name for name in SIZES if name != "tp" or self.costs is None])
        config = Config.of(models[0])
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        key = (num_microbatches, config.variable_seq_lengths, self._program_name(config), *map(id, models))
        prepared = self._prepared.get(key)
        if prepared is None:
            with self._ending():
                prepared = self._prepared[key] = self._prepare(models, config, num_microbatches)
        elif prepared.sizes != sizes:
            prepared.engine.boundary.forget()
        prepared.sizes = sizes
        losses = Losses(
            config,
            num_microbatches,
            size_of(groups, "cp"),
            training=not forward_only,
            collect=collect_non_loss_data,
            device=next(iter(prepared.engine.chunks.values())).device,
        )
        marks_first = not forward_only or first_val_step is None or first_val_step
        steps = [Step(forward_step_func, iterator, config, losses, marks_first) for iterator in iterators]
        with self._ending():
            self._run(prepared, steps, config, forward_only=forward_only)
        if config.finalize_model_grads_func is not None and not forward_only:
            tokens = losses.tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(models, tokens, pg_collection=groups, force_all_reduce=force_all_reduce)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return losses.reports

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """After a failure no engine plays any more: what was under way may still arrive in the exchange they share."""
        try:
            yield
        except BaseException:
            self._prepared, self._exchange = {}, None
            raise

    def _run(self, prepared: _Prepared, steps: list[Step], config: Config, *, forward_only: bool) -> None:
        engine = prepared.engine
        if forward_only:
            engine.run(steps, None)
            return
        for sync, model in zip(each(config.param_sync_func, len(steps)), prepared.models, strict=True):
            if sync is not None:
                sync(model.parameters())
        models = {stage: chunk.model for stage, chunk in engine.chunks.items()}
        sync = GradientSync(config, models, engine.plan.ranks[engine.rank], engine.program.microbatches - 1)
        with sync.stepping():
            engine.run(steps, sync.around)

    def _program_name(self, config: Config) -> str:
        return "combined_1f1b" if config.overlap_moe_expert_parallel_comm else SCHEDULES[self.__name__]

    def _prepare(self, models: list[nn.Module], config: Config, microbatches: int) -> _Prepared:
        program = self._program(config, microbatches, len(models))
        rank = group.rank() if (group := group_of(self.groups, "pp")) is not None else 0
        passes = self.split_rank is not None and rank >= self.split_rank
        chunks: dict[int, Chunk] = {}
        for (_, stage), model in zip(program.placement.places(rank), models, strict=True):
            last = stage == program.placement.stages - 1
            chunks[stage] = Chunk(
                model, self.layers(model), stage=stage, last=last, passes_last_input=passes and not last
            )
            if len(chunks[stage].parts) > 1 or any(isinstance(module, Experts) for module in model.modules()):
                check_options(model, suspends=True)
        limit = timedelta(seconds=self.timeout)
        mesh = mesh_of(self.groups, next(iter(chunks.values())).device, limit)
        if self._exchange is None:
            ep = group_of(self.groups, "ep")
            self._exchange = build_exchange(ep, *([] if ep is None else lane_groups(ep, 3, timeout=limit)))
        engine = ChunkEngine(
            chunks,
            program,
            groups=self.groups,
            mesh=mesh,
            overlap=self.overlap,
            costs=self.costs,
            dynamic_shapes=config.variable_seq_lengths,
            timeout=self.timeout,
            exchange=self._exchange,
        )
        return _Prepared(models, engine)

    def _program(self, config: Config, microbatches: int, chunks: int) -> Program:
        name = self._program_name(config)
        group_size = config.microbatch_group_size_per_vp_stage if chunks > 1 else None
        ranks = size_of(self.groups, "pp")
        return build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks, group_size=group_size)

    def _checked_groups(self, pg_collection: object, p2p_communicator: object) -> object:
        if p2p_communicator is not None:
            raise ValueError(f"p2p_communicator of type {type(p2p_communicator).__name__}; allowed: None")
        groups = self.groups if pg_collection is None else pg_collection
        for name in ("pp", "ep"):
            if group_of(groups, name) is not group_of(self.groups, name):
                raise ValueError(f"pg_collection with another group {name}; allowed: that of get_forward_backward_func")
        return groups

    def _checked_models(self, model: nn.Module | list[nn.Module]) -> list[nn.Module]:
        models = list(model) if isinstance(model, list | tuple) else [model]
        allowed = (self.vp_size or "1 or more") if self.__name__ in CHUNKED else 1
        if not models or allowed not in (len(models), "1 or more"):
            raise ValueError(f"{len(models)} model chunks for {self.__name__}; allowed: {allowed}")
        for chunk in models:
            if not isinstance(chunk, nn.Module):
                raise ValueError(f"a model chunk of type {type(chunk).__name__}; allowed: nn.Module")
            if isinstance(chunk, DistributedDataParallel):  # its reducer needs whole backwards
                raise ValueError(
                    "a model chunk in DistributedDataParallel; allowed: one that finalize_model_grads_func sums"
                )
        return models

    def _checked_iterators(self, data_iterator: Any, chunks: int) -> list[Any]:
        iterators = data_iterator if isinstance(data_iterator, list | tuple) else [data_iterator] * chunks
        several = isinstance(data_iterator, list | tuple)
        if len(iterators) != chunks or (chunks > 1 and not several):
            what = f"{len(iterators)} data iterators" if several else f"one {type(data_iterator).__name__}"
            raise ValueError(f"{what} for {chunks} model chunks of {self.__name__}; allowed: a list of {chunks}")
        return list(iterators)
