"""A model in training: its engine, its optimizer, its checkpoints."""

from __future__ import annotations

import hashlib
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from overlap1f1b.checkpoint import Saving, load_checkpoint, save_checkpoint
from overlap1f1b.engine import Engine
from overlap1f1b.learn.purpose import Purpose
from overlap1f1b.plan import Overlap
from overlap1f1b.running.exchanges import PacedExchange
from overlap1f1b.running.options import DEFAULT_LINK, TrainOptions
from overlap1f1b.running.ranks import Rank, waited_s
from overlap1f1b.running.text import Corpus
from overlap1f1b.running.workload import build, fed
from overlap1f1b.schedule import Program
from overlap1f1b.schedule.values import counted
from overlap1f1b.simulation import OverlapFigures
from overlap1f1b.terminal.output import refused
from overlap1f1b.transport.exchange import own_exchange

EVAL_WINDOWS = 128  # of held-out text, over all ranks


@dataclass(frozen=True)
class StepFigures:
    """Figures of one step of all ranks."""

    loss: float  # mean over ranks and microbatches
    grad_norm: float  # of the whole model, before clipping
    seconds: float  # from the batch to the updated weights
    exposed: float  # seconds in which an exchange had no compute beside it, on the rank with most of them
    hidden: float | None  # share of the exchange beside compute, on the rank with the least; None without an exchange
    waited: float  # seconds without a free processor, on the rank with most of them
    purpose: Purpose  # what the engine used it for
    by_cause: dict[str, float] = field(default_factory=dict)  # seconds of what is exposed, on the same rank as those
    by_name: dict[str, float] = field(default_factory=dict)  # further metrics of the first rank


class Trainer:
    """A model in training by one program.

    >>> trainer = Trainer(options, rank, corpus, program, overlap=3)
    >>> start = trainer.load(folder / "step-00000100")  # or 0, to begin
    >>> for index in range(start, options.steps):
    ...     print(trainer.step(index).loss)

    A step is a function of the weights, the optimizer's state and (seed, index, rank), so a run that resumes from a
    checkpoint goes on exactly as if it had never stopped.
    """

    def __init__(
        self, options: TrainOptions, rank: Rank, corpus: Corpus, program: Program, *, overlap: Overlap
    ) -> None:
        self.options, self.rank, self.corpus = options, rank, corpus
        self.model, model, loss, weights = build(options, rank, program)
        engine_options = options.engine_options(block_weights=weights, overlap=overlap)
        self.link = link_of(options, rank)
        exchange = PacedExchange(own_exchange(rank.group), self.link) if self.link else None
        self.engine = Engine(model, program, mesh=rank.mesh, loss_fn=loss, options=engine_options, exchange=exchange)
        held = {block for stage in self.engine.stages.values() for block in stage.blocks}
        # blocks of other ranks stay as they were built
        mine = {n: b for n, b in self.model.named_children() if b in held}
        trained = self.model if options.hf_config else nn.ModuleDict(mine)
        self.optimizer = build_optimizer(trained, lr=options.lr)

    def step(self, index: int) -> StepFigures:
        """Make step ``index``, from 0; ValueError if loss or gradient is not finite."""
        options, rank, start, waited = self.options, self.rank, time.perf_counter(), waited_s()
        purpose = self.engine.tuner.next_step().purpose
        batch = self.corpus.batch(index, rank.data_rank, batch=options.batch, seed=options.seed)
        inputs, target = fed(options, rank, *batch)
        # The stream of a step's random numbers, dropout for example.
        key = hashlib.blake2b(f"{options.seed} {index} {rank.rank}".encode(), digest_size=7).digest()
        torch.manual_seed(int.from_bytes(key, "little"))
        result = self.engine.step(inputs, target=target)
        # An expert without tokens gets a gradient of zeros, so that its optimizer state exists on every rank.
        for parameter in self.engine.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        loss = self.engine.mean_loss(result)
        norm = float(self.engine.clip_gradients(options.clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ValueError(
                f"step {index + 1} has loss {loss} and a gradient of norm {norm} with --lr {options.lr:g}; "
                "allowed: finite ones (use a smaller --lr or --clip)"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(index, options.steps, options.lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # A single rank sends rows only to itself.
        overlap = OverlapFigures(result.overlap.exchange if rank.group is not None else 0.0, result.overlap.exposed)
        by_cause = result.overlap.by_cause if rank.group is not None else {}
        of_ranks = self.engine.mesh.every((overlap, waited_s() - waited, by_cause))
        every, waits, causes = zip(*of_ranks.values(), strict=True)
        metrics = result.metrics() if rank.group is not None else {}
        return StepFigures(
            loss=loss,
            grad_norm=norm,
            seconds=time.perf_counter() - start,
            exposed=max(of.exposed for of in every),
            hidden=min((of.hidden_fraction for of in every if of.exchange), default=None),
            waited=max(waits),
            purpose=purpose,
            by_cause=max(zip(every, causes, strict=True), key=lambda one: one[0].exposed)[1],
            by_name={name: value for name, value in metrics.items() if "/" in name},
        )

    def evaluate(self) -> float:
        """Return the mean loss on held-out text, on the same windows each time."""
        options, rank = self.options, self.rank
        batches = self.corpus.held_out_batches(rank.data_rank, rank.data_ranks, options.batch, EVAL_WINDOWS)
        self.model.eval()
        try:
            losses = [
                self.engine.mean_loss(self.engine.evaluate(inputs, target=target))
                for inputs, target in (fed(options, rank, *batch) for batch in batches)
            ]
        finally:
            self.model.train()
        loss = math.fsum(losses) / len(losses)
        if not math.isfinite(loss):
            raise ValueError(
                f"held-out loss {loss} with --lr {options.lr:g}; allowed: a finite one (use a smaller --lr)"
            )
        return loss

    def save(self, folder: Path, step: int, history: Stateful) -> Saving:
        """Begin to write a checkpoint, which the next steps do not wait for; the next save does."""
        content: dict[str, Any] = {"state": {"history": history}, "config": self._identity()}
        with refused("checkpoint", folder):
            return save_checkpoint(self.engine, folder, step, self.optimizer, **content, background=True)

    def load(self, path: Path, history: Stateful | None = None) -> int:
        """Load a checkpoint, with its history if there is an object for it, and return the number of its steps."""
        state = {"random": None, "history": history}  # every step seeds its own random numbers
        return load_checkpoint(self.engine, path, self.optimizer, state=state, config=self._identity())

    def _identity(self) -> dict[str, object]:
        """Return the options that a resumed run must share; ranks, batch and optimizer may change."""
        of_text = {"sequence": self.options.sequence, "seed": self.options.seed, "text": self.corpus.digest}
        return self.model.identity | of_text


def link_of(options: TrainOptions, rank: Rank) -> float:
    """Return the rate of the link to imitate, in GB/s; 0 for none.

    By default one is imitated between ranks on one machine's CPUs, unless the training is kept.
    """
    here = rank.device.type == "cpu" and rank.group is not None
    if options.link and not here:
        on = f"{counted(rank.size, 'rank')}, {rank.device.type}"
        raise ValueError(f"--link {options.link:g} on {on}; allowed: several ranks on CPUs")
    local = here and int(os.environ.get("LOCAL_WORLD_SIZE", rank.size)) == rank.size
    return (DEFAULT_LINK if local and options.checkpoint is None else 0.0) if options.link is None else options.link


def build_optimizer(model: nn.Module, *, lr: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices alone: not on embeddings, norms and biases."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: dict[str, Any] = {"params": [], "weight_decay": 0.1}
    others: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for parameter in model.parameters():
        group = decayed if parameter.dim() > 1 and parameter not in embeddings else others
        group["params"].append(parameter)
    return torch.optim.AdamW([decayed, others], lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: a linear warm-up in a tenth of the steps, then a cosine down to a tenth of ``peak``.

    It depends on the arguments alone, so that a resumed run needs no state.

    >>> [round(learning_rate(step, 100, 1.0), 2) for step in (0, 9, 55, 99)]
    [0.1, 1.0, 0.54, 0.1]
    """
    warmup = max(1, round(0.1 * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step + 1 - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
