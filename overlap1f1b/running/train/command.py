"""``overlap1f1b train`` on one rank: train, show progress, write checkpoints and results."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from overlap1f1b.checkpoint import Saving
from overlap1f1b.checkpoint.folder import latest, said_of
from overlap1f1b.learn.purpose import Purpose
from overlap1f1b.running.options import CHECKPOINT_EVERY, TrainOptions
from overlap1f1b.running.ranks import Rank
from overlap1f1b.running.text import Corpus
from overlap1f1b.running.train.display import Progress, board, compared, show, speed_of
from overlap1f1b.running.train.trainer import StepFigures, Trainer
from overlap1f1b.running.workload import environment, workload
from overlap1f1b.schedule import build_schedule
from overlap1f1b.schedule.values import counted
from overlap1f1b.terminal.output import console, print_lines, refused, write_json
from overlap1f1b.terminal.status import Say, showing


def train(options: TrainOptions, rank: Rank) -> None:
    """Train, from the last checkpoint if there is one; the first rank prints."""
    screen = console(options.json, quiet=rank.rank != 0)
    with showing(screen, f"step 0/{options.steps}  reading the text and making the model") as say:
        run = _Run(options, rank, screen, say)
        run.train()
    if rank.rank == 0:
        result = run.result()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", rank.size)) == rank.size
        show(result, screen, link=run.trainer.link, local=here and rank.device.type == "cpu")
        write_json(options.json, result)


class _Run:
    """A run of the command, from its first line to the figures of its summary."""

    def __init__(self, options: TrainOptions, rank: Rank, screen: Console, say: Say) -> None:
        self.options, self.rank, self.screen, self.say = options, rank, screen, say
        self.tokens = options.batch * options.sequence * rank.data_ranks  # of a step, over all ranks
        self.steps: list[StepFigures] = []
        self.reference_steps: list[StepFigures] = []
        self.corpus = Corpus.load(options.text, sequence=options.sequence)
        self.trainer = Trainer(options, self.rank, self.corpus, options.program(), overlap=options.overlap)
        self.reference: Trainer | None = None
        overlapped = options.ep > 1 and options.schedule != "sequential"
        by_default = overlapped and options.checkpoint is None and options.link is None
        if by_default if options.compare is None else options.compare:
            sequential = build_schedule("sequential", ranks=options.pp, microbatches=options.microbatches)
            self.reference = Trainer(options, self.rank, self.corpus, sequential, overlap="serial")
        self._introduce()
        self.checkpoint = None if options.checkpoint is None else latest(options.checkpoint)
        self.saving: Saving | None = None
        self.start, self.history = 0, History()
        if self.checkpoint is not None:
            self.say(f"step 0/{options.steps}  loading {self.checkpoint}")
            self.start = self.trainer.load(self.checkpoint, self.history)
            if self.reference is not None:  # both begin with the same weights
                self.reference.load(self.checkpoint)
            ahead = f"going on to {options.steps}" if self.start < options.steps else "nothing left to train"
            print_lines(screen, f"resumed: {self.checkpoint} has {counted(self.start, 'step')}, {ahead}")
        elif options.checkpoint is not None and (said := said_of(options.checkpoint)):
            print_lines(screen, said)
        self.say(f"step {self.start}/{options.steps}")

    def _introduce(self) -> None:
        options, trainer, ranks = self.options, self.trainer, self.rank.size
        total = trainer.model.total
        size = f"{total / 1e6:.1f} M" if total >= 1e6 else f"{total:,}"
        shape = f" (pp {options.pp} × dp {options.dp} × ep {options.ep})" if ranks > 1 else ""
        print_lines(
            self.screen,
            f"text: {self.corpus}",
            f"model: {size} parameters, {trainer.model.description}",
            f"program: {trainer.engine.program.name} of {counted(options.microbatches, 'microbatch')}, "
            f"overlap {options.overlap}, on {counted(ranks, 'rank')}{shape}, {self.rank.device.type}"
            + (f", a link of {trainer.link:g} GB/s imitated between them" if trainer.link else ""),
        )

    def _step(self, index: int) -> StepFigures:
        """Make a step; say what the engine has chosen when costs are measured and plans are tried."""
        engine = self.trainer.engine
        measures, settling = engine.costs is None, engine.tuner.settling
        order, compared = engine.plan.order, engine.tuner.verifies_next()
        step = self.trainer.step(index)
        if compared:
            print_lines(self.screen, f"checked: order {order} gives the gradients of a plain loop")
        measured = measures and engine.costs is not None
        if measured and self.options.parts == "auto":
            print_lines(self.screen, f"parts: {engine.tuner.parts_choice}")
        if measured or (settling and not engine.tuner.settling):
            print_lines(self.screen, f"order: {engine.tuner.choice}")
        return step

    def train(self) -> None:
        options, history = self.options, self.history
        folder = options.tensorboard if self.rank.rank == 0 else None
        progress = Progress(self.say, tokens=self.tokens, start=self.start, steps=options.steps)
        with board(folder, tokens=self.tokens, start=self.start) as write:
            for index in range(self.start, options.steps):
                number = index + 1
                step = self._step(index)
                self.steps.append(step)
                if self.reference is not None:  # in turn, so that both see the same load of the machine
                    self.reference_steps.append(self.reference.step(index))
                history.losses.append(step.loss)
                history.grad_norms.append(step.grad_norm)
                held_out = self._evaluate(number) if self._due(number, options.eval_every) else None
                progress.show(number, step, held_out)
                write(number, step, held_out)
                if options.checkpoint is not None and self._due(number, options.checkpoint_every or CHECKPOINT_EVERY):
                    self.saving = self.trainer.save(options.checkpoint, number, history)
        if self.saving is not None:
            self.say(f"step {options.steps}/{options.steps}  writing the checkpoint")
            with refused("checkpoint", f"{options.checkpoint}"):
                self.checkpoint = self.saving.result()
        if not self.steps:
            self._evaluate(self.start)

    def _due(self, number: int, every: int) -> bool:
        return number % every == 0 or number == self.options.steps

    def _evaluate(self, number: int) -> float:
        held_out = self.trainer.evaluate()
        self.history.held_out = [*(pair for pair in self.history.held_out if pair[0] != number), (number, held_out)]
        return held_out

    def result(self) -> dict[str, Any]:
        options, history = self.options, self.history
        compare = None
        if self.reference_steps:
            compare = compared(self.steps, self.reference_steps, self.tokens, start=self.start)
        first, last = (history.losses[0], history.losses[-1]) if history.losses else (None, None)
        names = ("recompute", "parts", "capacity", "microbatches", "batch", "sequence")
        said = {"overlap": str(options.overlap), "program": self.trainer.engine.program.name, "text": str(self.corpus)}
        return {
            "environment": environment(self.rank),
            "workload": workload(options, *names) | said,
            "steps": max(self.start, options.steps),
            "resumed_from": self.start,
            "first_step": max(self.start, options.steps) - len(history.losses),
            "loss": {"first": first, "last": last},
            "losses": history.losses,
            "grad_norm": history.grad_norms,
            "held_out": {
                "loss": history.held_out[-1][1],
                "unigram_entropy": self.corpus.unigram_entropy,
                "losses": history.held_out,
            },
            **speed_of(self.steps, self.tokens),
            "settling_steps": sum(step.purpose is not Purpose.SETTLED for step in self.steps),
            "order": self.trainer.engine.tuner.choice,
            "compare": compare,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
        }


@dataclass
class History:
    """Losses of a run, a state of its checkpoints."""

    losses: list[float] = field(default_factory=list)  # means over all ranks, one per step
    grad_norms: list[float] = field(default_factory=list)  # before clipping, one per step
    held_out: list[tuple[int, float]] = field(default_factory=list)  # steps and losses on held-out text

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
