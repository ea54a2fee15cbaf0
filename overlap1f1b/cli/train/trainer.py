"""A model in training: its engine, its optimizer, its checkpoints."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from overlap1f1b.cli.options import TrainOptions
from overlap1f1b.cli.ranks import Rank
from overlap1f1b.cli.text import Corpus
from overlap1f1b.cli.workload import build, engine_options, fed
from overlap1f1b.engine import Engine, Saving, load_checkpoint, save_checkpoint
from overlap1f1b.moe import Router
from overlap1f1b.plan import Overlap
from overlap1f1b.schedule import Program
from overlap1f1b.simulation import OverlapFigures

BIAS_RATE = 1e-3  # change of the router's correction bias per step (DeepSeek-V3)
EVAL_WINDOWS = 128  # of held-out text, over all ranks


@dataclass(frozen=True)
class Step:
    """Figures of one step of all ranks.

    Args:
        loss: Mean loss over ranks and microbatches.
        grad_norm: Norm of the whole model's gradient, before clipping.
        seconds: Time from the batch to the updated weights.
        exposed: Seconds in which an exchange had no compute beside it, on the rank with most of them.
        hidden: Share of the exchange beside compute, on the rank with the least; None without an exchange.
        measuring: Whether the engine played the step serially, to measure nodes.
        trying: Whether the engine tried a plan in it.
    """

    loss: float
    grad_norm: float
    seconds: float
    exposed: float
    hidden: float | None
    measuring: bool
    trying: bool = False


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
        given = replace(engine_options(options), weights=weights, overlap=overlap, verify=options.verify)
        self.engine = Engine(model, program, mesh=rank.mesh, loss_fn=loss, options=given)
        held = {block for stage in self.engine.stages.values() for block in stage.blocks}
        # blocks of other ranks stay as they were built
        mine = {n: b for n, b in self.model.named_children() if b in held}
        trained = self.model if options.hf_config else nn.ModuleDict(mine)
        self.optimizer = build_optimizer(trained, lr=options.lr, weight_decay=options.weight_decay)
        routers = [m for m in trained.modules() if isinstance(m, Router)]
        self._routers = routers if options.model.router == "sigmoid" else []
        # made by torch.distributed, since a router needs a process group
        data = self.engine.mesh.ranks(pp=(self.engine.rank,), over=("dp", "ep"))
        self._data_group = dist.new_group(data, use_local_synchronization=True) if len(data) > 1 else None

    def step(self, index: int) -> Step:
        """Make the step with this index, from 0.

        Raises:
            ValueError: The loss or the gradient is not finite; the weights have not changed.
        """
        options, rank, start = self.options, self.rank, time.perf_counter()
        measuring, settling = self.engine.costs is None, self.engine.tuner.settling
        batch = self.corpus.batch(
            index, rank.data_rank, batch=options.batch, sequence=options.sequence, seed=options.seed
        )
        inputs, target = fed(options, rank, *batch)
        torch.manual_seed(_stream(options.seed, index, rank.rank))
        result = self.engine.step(inputs, target=target)
        # An expert without tokens gets a gradient of zeros, so that its optimizer state exists on every rank.
        for parameter in self.engine.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        loss = self.engine.mean_loss(result)
        norm = float(self.engine.clip_gradients(options.clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ValueError(
                f"step {index + 1} has loss {loss} and a gradient of norm {norm} with --lr {options.lr}; "
                "allowed: finite ones (use a smaller --lr or --clip)"
            )
        set_learning_rate(self.optimizer, learning_rate(index, options.steps, options.lr))
        self.optimizer.step()
        self.optimizer.zero_grad()
        for router in self._routers:
            router.update_correction_bias(BIAS_RATE, self._data_group)
        # A single rank sends rows only to itself.
        overlap = OverlapFigures(result.overlap.exchange if rank.group is not None else 0.0, result.overlap.exposed)
        every = self.engine.mesh.every(overlap).values()
        return Step(
            loss=loss,
            grad_norm=norm,
            seconds=time.perf_counter() - start,
            exposed=max(of.exposed for of in every),
            hidden=min((of.hidden_fraction for of in every if of.exchange), default=None),
            measuring=measuring,
            trying=settling and not measuring,
        )

    def evaluate(self) -> float:
        """Return the mean loss on held-out text, on the same windows each time.

        Raises:
            ValueError: The loss is not finite.
        """
        options, rank = self.options, self.rank
        batches = self.corpus.held_out_batches(
            rank.data_rank, rank.data_ranks, options.batch, options.sequence, EVAL_WINDOWS
        )
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
            raise ValueError(f"held-out loss {loss} with --lr {options.lr}; allowed: a finite one (use a smaller --lr)")
        return loss

    def save(self, folder: Path, step: int) -> Saving:
        """Begin to write a checkpoint, which the next steps do not wait for; the next save does.

        Raises:
            ValueError: It cannot be written, or the one before could not.
        """
        with self._writing():
            return save_checkpoint(self.engine, folder, step, self.optimizer, config=self._identity(), background=True)

    def saved(self, saving: Saving) -> Path:
        """Wait for a checkpoint and return its folder.

        Raises:
            ValueError: It cannot be written.
        """
        with self._writing():
            return saving.result()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            folder = self.options.checkpoint
            raise ValueError(f"--checkpoint {folder}: {error}; allowed: a folder that can be written") from error

    def load(self, path: Path) -> int:
        """Load a checkpoint and return the number of its steps.

        Raises:
            ValueError: The checkpoint belongs to another model, text or seed, or is damaged.
        """
        state = {"random": None}  # every step seeds its own
        step = load_checkpoint(self.engine, path, self.optimizer, state=state, config=self._identity())
        set_weight_decay(self.optimizer, self.options.weight_decay)  # the saved one may differ
        return step

    def _identity(self) -> dict[str, object]:
        """Return the options that a resumed run must share; ranks, batch and optimizer may change."""
        options = self.options
        of_text = {"sequence": options.sequence, "seed": options.seed, "text": self.corpus.digest}
        return {**self.model.identity, **of_text}


def _stream(seed: int, step: int, rank: int) -> int:
    """Return the seed of a step's random numbers, dropout for example."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest(), "little")


WARMUP = 0.1  # share of the steps
FLOOR = 0.1  # share of the peak rate, at the last step
BETAS = (0.9, 0.95)


def build_optimizer(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices alone: not on embeddings, norms and biases."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.dim() > 1 and parameter not in embeddings].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": weight_decay if decayed else 0.0}
            for decayed, parameters in groups.items()
        ],
        lr=lr,
        betas=BETAS,
        fused=True,
    )


def set_weight_decay(optimizer: torch.optim.AdamW, weight_decay: float) -> None:
    """Set the weight decay of matrices: a resumed run may have another value than the saved one."""
    decayed, _ = optimizer.param_groups
    decayed["weight_decay"] = weight_decay


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step: a linear warm-up to ``peak``, then a cosine down to a tenth of ``peak``.

    It depends on the arguments alone, so that a resumed run needs no state.

    >>> [round(learning_rate(step, 100, 1.0), 2) for step in (0, 9, 55, 99)]
    [0.1, 1.0, 0.54, 0.1]
    """
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step + 1 - warmup) / max(1, steps - warmup)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
