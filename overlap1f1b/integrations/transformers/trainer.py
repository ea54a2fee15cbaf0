"""transformers' Trainer, and any subclass of it, whose optimizer steps are played by an engine.

Trainer's loop stays: it collects the microbatches of an optimizer step, and the last one plays them all. On the last
stage Trainer's own ``training_step`` runs for each microbatch, with the rest of the model in place of the model. So the
loss, its normalisation, metrics and hooks are Trainer's or the subclass's own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from accelerate.utils.operations import convert_to_fp32, send_to_device
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from overlap1f1b.checkpoint import load_checkpoint, save_checkpoint
from overlap1f1b.checkpoint.state import RandomState
from overlap1f1b.cut.replacement import replaced
from overlap1f1b.engine import Engine, Feed, StepResult
from overlap1f1b.engine.agreement import compare_batches
from overlap1f1b.integrations.transformers.adapters import base_of
from overlap1f1b.integrations.transformers.arguments import OverlapArguments, check_arguments, with_checkpointing
from overlap1f1b.integrations.transformers.split import RankModule, SplitModel, split_model
from overlap1f1b.integrations.transformers.stage import LossOfModel
from overlap1f1b.integrations.transformers.standins import Ahead, Inputs, Prediction, RestOfModel, ShardedAccelerator
from overlap1f1b.play.feed import split_batch

CHECKPOINT = "overlap1f1b"
"""Folder of a checkpoint with the optimizer and the learning rate's scheduler."""
INPUTS = ("input_ids", "attention_mask", "position_ids")
"""Columns of a batch that layers read; others than these are for the loss."""
_OF_TRAINING = {"loss", "learning_rate"}  # entries of Trainer's line on optimizer steps

logger = logging.get_logger(__name__)
Named = Mapping[str, Any]
Finish = Callable[[Named], Any]
Compute = Callable[[int, RestOfModel, Inputs], Tensor]
"""Number of a microbatch, the rest of the model and the batch → loss."""


class Overlapped(Trainer):
    """Trainer whose optimizer step is one step of an engine, for any subclass of Trainer.

    >>> class OverlapSFTTrainer(Overlapped, SFTTrainer): pass
    >>> trainer = OverlapSFTTrainer(model, args, train_dataset=data, overlap_args=OverlapArguments(pp=2, ep=2))

    The microbatches of a step are the batches of its ``gradient_accumulation_steps``. Ranks along "dp" and "ep" read
    data of their own, ranks of one pipeline the same. The model is split when the trainer is made. Trainer's arguments
    keep their meaning; an argument that cannot be honoured is refused.

    Args:
        overlap_args: Ranks, schedule and recomputation; by default all ranks share the experts.

    Raises:
        ValueError: An argument cannot be honoured, the sizes do not fit the ranks, the schedule is unknown or does not
            fit ``gradient_accumulation_steps``, or the model cannot be split.
    """

    accelerator: ShardedAccelerator
    _model_built: BuiltModel | None = None
    _ahead: Ahead | None = None
    _mesh: DeviceMesh | None = None
    _computing = _evaluating = False  # whether a loss is computed, and whether an evaluation runs
    _finishing = False  # whether the model that a loss has got runs

    def __init__(self, *args: Any, overlap_args: OverlapArguments | None = None, **kwargs: Any) -> None:
        self.overlap_args = overlap_args or OverlapArguments()
        self._collected: list[Inputs] = []
        self._last: StepResult | None = None
        self._tokens: Tensor | float = 0.0
        self._said: dict[str, float] = {}  # logged while a loss was computed
        self._met = False  # whether the line that is being logged is on all ranks
        super().__init__(*args, **kwargs)
        if (made := self.optimizer or self.lr_scheduler) is not None:
            raise ValueError(
                f"optimizers with a {type(made).__name__} of the whole model; "
                "allowed: optimizer_cls_and_kwargs, or create_optimizer and create_scheduler of a subclass"
            )
        if self.overlap_args.pp > 1:
            self.callback_handler.callbacks.insert(0, _LogsOfLastStage(self))
        self._check_router()
        self._built()

    def _check_router(self) -> None:
        """Raise ValueError where a trainer of TRL asks for router logits that layers will not have kept."""
        kind: Any = self._mixed()
        model: Any = self.model
        samples = kind._prepare_inputs is not Trainer._prepare_inputs  # its own batches, which the first step refuses
        asks = getattr(self, "aux_loss_enabled", False) and not samples
        if asks and not model.config.get_text_config().output_router_logits:
            raise ValueError(
                f"{kind.__name__} asks for router logits, by router_aux_loss_coef, of a model whose config "
                "has output_router_logits=False; allowed: True, set before the trainer, or router_aux_loss_coef=0.0"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, and make the accelerator of the ranks with data of their own."""
        self.args._n_gpu = min(1, self.args.n_gpu)  # as Trainer does where the model manages its devices
        self.args, self.overlap_args = args, parallel = with_checkpointing(self.args, self.overlap_args)
        check_arguments(args, parallel)
        sizes = parallel.sizes(args.world_size)
        # The class of the accelerator that Trainer makes.
        with replaced([(vars(transformers.trainer), "Accelerator", ShardedAccelerator)]):
            super().create_accelerator_and_postprocess()
        if args.world_size > 1:
            self._mesh = init_device_mesh(args.device.type, sizes, mesh_dim_names=("pp", "dp", "ep"))
        self.accelerator.share(self._mesh)

    def _mixed(self) -> type[Trainer]:
        kinds = type(self).__mro__
        found: type[Trainer] = kinds[kinds.index(Overlapped) + 1]
        return found

    def _keeps_loss(self) -> bool:
        """Return whether the last layer keeps its activations: a subclass's loss, which may count, would run twice."""
        if self.overlap_args.recompute == "experts":
            return False
        pairs = ((self._mixed(), "training_step"), (type(self), "compute_loss"))
        return any(getattr(kind, name) is not getattr(Trainer, name) for kind, name in pairs)

    # ------------------------------------------------------------------------------------------------------- model

    @property
    def engine(self) -> Engine:
        """The engine that plays the optimizer steps."""
        return self._built().engine

    @property
    def stages(self) -> SplitModel:
        """The stages of this rank."""
        return self._built().stages

    def _built(self) -> BuiltModel:
        """Return the split model and its engine; made again where ``model_init`` has made another model."""
        if self._model_built is None or self.model not in (self._model_built.model, self._model_built.module):
            if self._model_built is not None:
                self._model_built.engine.close()
            self._model_built = BuiltModel(self)
            # A subclass counts and logs in its losses.
            self._model_built.engine.verification.watch(lambda: [vars(self)])
        return self._model_built

    def _refuse_part(self, *_: Any) -> None:
        mesh = self.engine.mesh
        if not self._finishing and mesh.size("pp") * mesh.size("ep") > 1:
            raise ValueError(
                f"{type(self).__name__} calls its own model in a loss, of which a rank has a part; allowed: the model "
                "that compute_loss gets, another whole model, or precompute_ref_log_probs=True of TRL"
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the whole model where it is: each rank moves its part."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self._built().module

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # Before the optimizer: model_init may have made another model.
        with replaced([(vars(self), "create_optimizer", self._divided()(self.create_optimizer))]):
            return super()._prepare_for_training(*args, **kwargs)

    def _divided(self) -> Any:
        """Return a context, or a decorator, in which ``self.model`` is the module of this rank's parameters.

        An optimizer is made in it, also by a subclass.
        """
        return replaced([(vars(self), "model", self._built().module)])

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer of this rank's parameters, in the groups of the whole model."""
        with self._divided():
            return super().create_optimizer()

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of sequences of an optimizer step."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes

    def floating_point_ops(self, inputs: Inputs) -> int:
        """Return this rank's part of Trainer's estimate for a microbatch."""
        whole = self._built().parameters
        return 6 * inputs["input_ids"].numel() * whole // self.overlap_args.pp if "input_ids" in inputs else 0

    # ---------------------------------------------------------------------------------------------------- training

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        # Workers of all ranks of a pipeline draw the same random numbers, for collators that draw.
        prepared = super()._get_dataloader(*args, **kwargs)
        loader = getattr(prepared, "base_dataloader", prepared)
        if isinstance(seed := loader.worker_init_fn, partial) and "rank" in seed.keywords:
            loader.worker_init_fn = partial(seed, rank=self.accelerator.process_index)
        return prepared

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Collect the batches of an optimizer step, and count its tokens over all ranks."""
        if self._collected:
            logger.warning(f"{len(self._collected)} batches at the end of an epoch made no optimizer step")
            self._collected = []
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if items is not None:
            # Kept as a tensor: reading it would wait for the device.
            self._tokens += items
        return samples, items

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Collect a microbatch; with the last one of an optimizer step, play them all.

        Returns:
            The loss of the whole step over all ranks, a scalar; zero before the last microbatch.
        """
        batch: Any = self._prepare_input(inputs)
        self._collected.append(batch)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._collected = self._collected, []
        built = self._built()
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):  # Trainer calls it on the last stage alone
            train()

        def compute(_: int, rest: RestOfModel, batch: Inputs) -> Tensor:
            super(Overlapped, self).training_step(rest, batch, num_items_in_batch)
            loss, self.accelerator.loss = self.accelerator.loss, None
            assert loss is not None
            return loss

        scale = 1.0 / self.accelerator.num_processes
        with self.accelerator.autocast():
            built.engine.microbatches = len(batches)
            make_feed = partial(self._feed, dict(enumerate(batches)), len(batches), compute, scale)
            self._last = built.engine.play(make_feed).result
        total = built.engine.mean_loss(self._last) * len(batches)
        return torch.tensor(total, device=self.args.device)

    def _prepare_input(self, data: Any) -> Any:
        # Moving a tensor to a CPU with a number would copy it.
        return data if self.args.device.type == "cpu" else super()._prepare_input(data)

    def _feed(self, batches: Mapping[int, Inputs], count: int, compute: Compute, scale: float) -> Feed:
        """Return the feed of the batches by microbatch; microbatches without one get a token that does not count."""
        engine, names = self.engine, self._built().names
        for batch in batches.values():
            # Trainers that sample their own rows have lists, losses that join columns have names of their own.
            named = isinstance(batch, Mapping)
            if not named or batch.get(names[0]) is None:
                found = ", ".join(map(str, batch)) if named else f"type {type(batch).__name__}"
                raise ValueError(
                    f"{type(self).__name__}, a {self._mixed().__name__}, has a batch of {found or 'nothing'}; "
                    "allowed: trainers whose batches have input_ids by name"
                )
        if compare_batches({"batches": list(batches.values())}, engine.mesh):
            raise ValueError(
                "ranks of a pipeline have read different batches; allowed: the same rows, for which a data set and a "
                "collator draw the same random numbers on all of them"
            )
        inputs = {index: {name: batch.get(name) for name in names} for index, batch in batches.items()}
        token = {name: None if value is None else _first(value) for name, value in next(iter(inputs.values())).items()}
        part = split_batch([inputs.get(index, token) for index in range(count)], count, "inputs", names)
        last = engine.program.placement.stages - 1

        def arguments_of(stage: int, index: int) -> dict[str, Any]:
            arguments: dict[str, Any] = {"inputs": part(index)} if stage == 0 else {}
            if stage == last:
                loss = partial(self._own_loss, batches.get(index), partial(compute, index))
                arguments |= {"loss_fn": LossOfModel(loss), "loss_grad": scale}
            return arguments

        return Feed(arguments_of, dict.fromkeys(range(count), 1.0 / count), None)

    def _own_loss(
        self, batch: Inputs | None, compute: Callable[[RestOfModel, Inputs], Tensor], named: Named, finish: Finish
    ) -> Tensor:
        """Return the loss of a microbatch, as :class:`LossOfModel` asks for it; zero without a batch.

        ``compute`` is Trainer's own code. It calls a model: a stand-in, which runs the last part of it by ``finish``.
        """
        if batch is None:
            return finish(named).logits.flatten()[:0].sum()
        built = self._built()

        def finished(arguments: Named) -> Any:
            with replaced([(vars(self), "_finishing", True)]), self.accelerator.autocast():
                output = finish(arguments)
            return output if self.accelerator.mixed_precision == "no" else convert_to_fp32(output)

        rest = RestOfModel(built.model, built.names, batch, finished, type(self).__name__)
        # No longer than the loss: callbacks copy and save the model, with what hangs on it. Losses also call its body.
        owner = next(iter(built.stages.values())).part.shell.owner
        refusals = [module.register_forward_pre_hook(self._refuse_part) for module in (built.model, owner)]
        plain = torch.autocast(self.args.device.type, enabled=False)  # Trainer's model alone has it
        try:
            with replaced([(vars(self), "_computing", True)]), plain:
                return compute(rest, dict(batch))
        finally:
            for refusal in refusals:
                refusal.remove()

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.engine.clip_gradients(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.engine.clip_gradients(math.inf) if grad_norm is None else grad_norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the loss of a step how many tokens counted, and which part of the exchange was hidden.

        While a loss is computed, entries are kept for the next line: ranks of other stages would not meet this one.
        """
        if self._computing:
            self._said |= logs
            return
        # Trainer's own lines are on all ranks. A rank may log any other alone, so ranks do not meet in it.
        ends = "train_runtime" in logs or (self._evaluating and any(name.endswith("_runtime") for name in logs))
        self._met = logs.keys() >= _OF_TRAINING or ends
        if self._met:
            if logs.keys() >= _OF_TRAINING and self._last is not None:
                logs |= self._figures(self._last)
            for name, value in self._said.items():
                logs.setdefault(name, value)
            self._said = {}
        super().log(logs, start_time)

    def is_world_process_zero(self) -> bool:
        """Return whether this is the first rank; while a loss is computed, the first rank that computes one."""
        if self._computing:
            return self.accelerator.process_index == 0 and self.engine.mesh.rank("pp") == self._built().loss_rank
        return super().is_world_process_zero()

    def _figures(self, result: StepResult) -> dict[str, float]:
        """Return what a step's line of the log says of tokens and of the exchange, over all ranks."""
        mesh = self.engine.mesh
        tokens, self._tokens = float(self._tokens), 0.0
        if not self.args.average_tokens_across_devices:  # they are this rank's
            tokens = mesh.sums(tokens)[0] / self.overlap_args.pp
        figures = {"tokens": tokens}
        if mesh.size("ep") > 1 and not result.standing:
            every = mesh.every(result.overlap.figures).values()
            figures["exchange_exposed_s"] = max(rank.exposed for rank in every)
            figures["exchange_hidden"] = min(rank.hidden_fraction for rank in every)
        return figures

    # -------------------------------------------------------------------------------------------------- evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as Trainer does, and log the metrics on all ranks."""
        with replaced([(vars(self), "_evaluating", True)]):
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as Trainer does; as many batches as a step has microbatches pass the pipeline together."""
        ahead: Any = Ahead(dataloader, self._built().ahead, whole=self.accelerator.num_processes == 1)
        with replaced([(vars(self), "_ahead", ahead)]):
            return super().evaluation_loop(ahead, *args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Prediction:
        """Play a batch forwards as one microbatch; every rank of the pipeline gets loss, logits and labels.

        With the first of the batches that :meth:`evaluation_loop` has read together, all of them are played.
        """
        ahead, number = self._ahead, None if self._ahead is None else self._ahead.number(inputs)
        if ahead is None or number is None:  # a subclass's own batch
            ahead, number = Ahead((), 1), 0
            ahead.batches = [inputs]
        if number not in ahead.steps:
            model.eval()
            self._play_forwards(ahead, prediction_loss_only, ignore_keys)
            ahead.at(number)
        step = ahead.steps.pop(number)
        if self.overlap_args.pp > 1:
            every = self.engine.mesh.gathered("pp", send_to_device(step, "cpu"))
            step = step or next(one for one in every if one is not None)
        return send_to_device(step, self.accelerator.device)

    def _play_forwards(self, ahead: Ahead, prediction_loss_only: bool, ignore_keys: list[str] | None) -> None:
        """Play the batches that were read together, and keep what the last stage computes of each."""
        built = self._built()
        placement = built.engine.program.placement
        count = len(ahead.batches) * len(placement.pipes)  # of two pipes one gets tokens alone
        slots = placement.microbatches(built.pipe, count)
        numbers = {slot: number for number, slot in enumerate(slots)}

        def compute(slot: int, rest: RestOfModel, batch: Inputs) -> Tensor:
            ahead.at(numbers[slot])
            step = super(Overlapped, self).prediction_step(rest, batch, prediction_loss_only, ignore_keys)
            # Logits of several batches may not fit into a GPU where the logits of one batch do.
            ahead.steps[numbers[slot]] = step if prediction_loss_only else send_to_device(step, "cpu")
            return torch.zeros(()) if step[0] is None else step[0]

        ahead.steps = dict.fromkeys(range(len(slots)))
        batches = {slot: self._prepare_input(batch) for slot, batch in zip(slots, ahead.batches, strict=True)}
        with self.accelerator.autocast():
            make_feed = partial(self._feed, batches, count, compute, 1.0)
            built.engine.play(make_feed, grad=False, microbatches=count)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._saved = False
        super().save_model(output_dir, _internal_call)
        if not self._saved:  # older versions of transformers call it on the main rank alone
            self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the whole model from all ranks, and on the one that saves what Trainer writes beside it."""
        folder = Path(output_dir or self.args.output_dir or ".")
        self.stages.save_pretrained(folder)
        self._saved = True
        if self.args.should_save:
            kept = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if kept is not None:
                kept.save_pretrained(str(folder))
            torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder, kept = Path(output_dir) / CHECKPOINT, self._kept()
        # The weights are in the folder around it.
        save_checkpoint(self.engine, folder, self.state.global_step, **kept, keep=1, model="none")

    def _kept(self) -> dict[str, Any]:
        # Trainer keeps random numbers itself: it restores them when it has skipped the batches that were read before.
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # inside accelerate's
        return {"optimizer": optimizer, "state": {"scheduler": self.lr_scheduler, "random": None}}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.stages.load_pretrained(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self.stages.load_pretrained(self.state.best_model_checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and self.overlap_args.pp > 1:  # ranks of a pipeline read the same rows
            random = RandomState()
            with self.engine.guarded("another call", place="in the resumption of random numbers"):
                first = self.engine.mesh.gathered("pp", random.state_dict())[0]
            random.load_state_dict({name: first[name] for name in ("python", "numpy", "cpu")})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Resume optimizer, schedule and counters; a folder of weights alone begins them anew."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if not (folder / CHECKPOINT).exists():
            if (folder / "optimizer.pt").exists():
                raise ValueError(
                    f"{folder} has the optimizer of a plain Trainer; allowed: a checkpoint of an overlapped trainer, "
                    "or from_pretrained of this one, which begins a new optimizer"
                )
            logger.warning(f"{folder} has weights alone: optimizer and learning rate begin anew")
            return
        load_checkpoint(self.engine, folder / CHECKPOINT, **self._kept())


class OverlapTrainer(Overlapped):
    """transformers' Trainer for a mixture of experts, its exchanges hidden behind compute: see :class:`Overlapped`."""


class _LogsOfLastStage(TrainerCallback):
    """Gives all ranks of a pipeline the log of a rank that computes the loss: another rank may report."""

    def __init__(self, trainer: Overlapped) -> None:
        self.trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Replace the entries of a line before the other callbacks see it."""
        if not self.trainer._met:
            return
        theirs = self.trainer.engine.mesh.gathered("pp", logs)[self.trainer._built().loss_rank]
        if logs is not None and theirs is not None:
            logs |= theirs
            state.log_history[-1] |= theirs


class BuiltModel:
    """This rank's part of a trainer's model, ``model``, and the engine that plays it.

    Attributes:
        parameters: Number of the whole model's parameters without embeddings.
        names: Inputs of the model that its layers read.
        loss_rank: The first pipeline rank that computes losses, from which a subclass's log entries come.
        pipe: The pipe whose microbatches end there.
        ahead: Batches of an evaluation that are played together.
    """

    def __init__(self, trainer: Overlapped) -> None:
        model: Any = trainer.model
        mesh, parallel, device = trainer._mesh, trainer.overlap_args, trainer.accelerator.device
        program = parallel.program(trainer.args.gradient_accumulation_steps)
        if getattr(model, "is_distributed_loading_by_transformers", False):
            raise ValueError(f"a {type(model).__name__} that from_pretrained has sharded; allowed: a whole model")
        self.model = model
        self.parameters = model.num_parameters(exclude_embeddings=True)
        known = signature(type(base_of(model)).forward).parameters  # PEFT's model passes most on by **kwargs
        self.names = tuple(name for name in INPUTS if name == INPUTS[0] or name in known)
        self.stages = split_model(model, program, mesh, inputs=self.names)
        for stage in self.stages.values():
            stage.blocks[-1].keeps = stage.blocks[-1].is_last and trainer._keeps_loss()
        if any(p.is_meta for p in self.stages.parameters()):
            if parallel.pretrained is None:
                raise ValueError("a model on the meta device; allowed: with pretrained= a folder of its weights")
            self.stages.load_pretrained(parallel.pretrained, device)
        if parallel.adapter is not None:
            self.stages.load_pretrained(parallel.adapter, device)
        unfilled = [name for name, p in self.stages.named_parameters() if p.is_meta]
        if unfilled:
            raise ValueError(
                f"{unfilled[0]} has no values on the meta device; allowed: adapter= a folder of the adapter, or LoRA "
                "that begins without its base (init_lora_weights=True or gaussian)"
            )
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        self.module = RankModule(self.stages)
        placement, last = program.placement, program.placement.stages - 1
        self.loss_rank = placement.replicas(last)[0]
        self.pipe = next(pipe for pipe, stage in placement.places(self.loss_rank) if stage == last)
        self.ahead = len(program.microbatches_of(self.pipe))
        self.engine = Engine(self.stages, program, mesh=mesh, options=parallel.options)


def _first(value: Tensor) -> Tensor:
    """Return the first token of an input [B, S] or of a mask [B, H, S, S], or the first row of another."""
    if value.dim() == 4:
        return value[:1, :, :1, :1]
    return value[:1, :1] if value.dim() == 2 else value[:1]
