"""``overlap1f1b train`` on one rank: train, show progress, write checkpoints and results."""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from overlap1f1b.checkpoint import Saving, load_checkpoint, save_checkpoint
from overlap1f1b.checkpoint.folder import latest, said_of
from overlap1f1b.engine import Engine
from overlap1f1b.learn.purpose import Purpose
from overlap1f1b.plan import Overlap
from overlap1f1b.running.exchanges import PacedExchange
from overlap1f1b.running.options import CHECKPOINT_EVERY, DEFAULT_LINK, TrainOptions
from overlap1f1b.running.ranks import SHARED, Rank, waited_s
from overlap1f1b.running.text import Corpus
from overlap1f1b.running.workload import build, environment, fed, workload
from overlap1f1b.schedule import Program, build_schedule
from overlap1f1b.schedule.values import counted
from overlap1f1b.simulation import OverlapFigures
from overlap1f1b.terminal.output import Say, console, number, plain_table, print_lines, refused, showing, write_json
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
    if options.link and (rank.device.type != "cpu" or rank.group is None):
        on = f"{counted(rank.size, 'rank')}, {rank.device.type}"
        raise ValueError(f"--link {options.link:g} on {on}; allowed: several ranks on CPUs")
    if options.link is not None:
        return options.link
    return DEFAULT_LINK if rank.local and rank.group is not None and options.checkpoint is None else 0.0


def build_optimizer(model: nn.Module, *, lr: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices alone: not on embeddings, norms and biases."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.dim() > 1 and p not in embeddings]
    others = [p for p in model.parameters() if p.dim() <= 1 or p in embeddings]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


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


LINES = 15  # that are printed of a run
LINK = """These ranks share one machine: the link between them is imitated, at {link:g} GB/s in each direction."""
LOCAL = """These ranks share one machine, where bytes cost almost nothing: no speed-up is to be expected."""
NEXT = """next: overlap1f1b profile train                           # what was hidden, what was not, a picture
      overlap1f1b bench --wire balanced --compute timed   # a real link that costs as much as compute (root)
      overlap1f1b train --checkpoint FOLDER --steps 500   # a longer training, which can be resumed"""
RECENT = 20  # steps over which speed and hidden share are averaged


class Progress:
    """Display of every step by ``say``; some are printed at once.

    ``tokens`` are of a step over all ranks; ``start`` steps were done before, and ``steps`` includes them.
    """

    def __init__(self, say: Say, *, tokens: int, start: int, steps: int) -> None:
        self.say, self.tokens, self.steps = say, tokens, steps
        self.every = max(1, round((steps - start) / LINES))
        self._recent: deque[StepFigures] = deque(maxlen=RECENT)

    def show(self, number: int, step: StepFigures, held_out: float | None) -> None:
        """Show step ``number``, from 1, and the loss on held-out text if it was just measured."""
        if any(before.purpose is not step.purpose for before in self._recent):
            self._recent.clear()  # steps that measure nodes or try plans are slower
        self._recent.append(step)
        held = "" if held_out is None else f"  held-out {held_out:.3f}"
        text = f"step {number}/{self.steps}  loss {step.loss:.3f}{held}  grad_norm {step.grad_norm:.2f}"
        now = held_out is not None or number % self.every == 0 or number == self.steps
        speed = self.tokens / median(step.seconds for step in self._recent)
        shares = [step.hidden for step in self._recent if step.hidden is not None]
        exposed = 1e3 * fmean(step.exposed for step in self._recent)
        seen = f"  hidden {fmean(shares):.0%}  exposed {exposed:.0f} ms" if shares else ""
        self.say(f"{text}  {speed:.0f} tokens/s{seen}", now=now)
        if now and number < self.steps:  # what was printed is not said a second time
            self.say(f"step {number + 1}/{self.steps} runs")


@contextmanager
def board(
    folder: Path | None, *, tokens: int, start: int
) -> Iterator[Callable[[int, StepFigures, float | None], None]]:
    """Yield a function like :meth:`Progress.show` that writes a step's figures for TensorBoard.

    ``folder`` may have files of earlier runs, whose scalars of steps after ``start`` are dropped; None writes nothing.
    """
    if folder is None:
        yield lambda number, step, held_out: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder), purge_step=start + 1 if start else None) as writer:

        def show(number: int, step: StepFigures, held_out: float | None) -> None:
            values = {"loss": step.loss, "grad_norm": step.grad_norm, "held_out_loss": held_out}
            values |= {"tokens_per_s": tokens / step.seconds}
            values |= {"hidden_fraction": step.hidden, "exposed_ms": 1e3 * step.exposed} | step.by_name
            for name, value in values.items():
                if value is not None:
                    writer.add_scalar(name, value, number)

        yield show


def speed_of(steps: Sequence[StepFigures], tokens: int) -> dict[str, Any]:
    """Return the JSON of the speed: medians over ``timed_steps`` steps of ``tokens`` tokens each; of causes means.

    Steps that try plans count only where no plan is settled, those that measure nodes only where there are no others.
    The hidden fraction is None without an exchange, and all are None without steps.
    """
    by_purpose = ([step for step in steps if step.purpose is purpose] for purpose in (Purpose.SETTLED, Purpose.TRY))
    planned = next(filter(None, by_purpose), steps)
    names = ("step_ms", "tokens_per_s", "exposed_ms", "exposed_by_cause_ms", "hidden_fraction", "waited_fraction")
    if not planned:
        return dict.fromkeys((*names, "timed_steps"))
    seconds = median(step.seconds for step in planned)
    shares = [step.hidden for step in planned if step.hidden is not None]
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_s": tokens / seconds,
        "exposed_ms": 1e3 * median(step.exposed for step in planned),
        "exposed_by_cause_ms": {c: 1e3 * fmean(step.by_cause[c] for step in planned) for c in planned[0].by_cause},
        "hidden_fraction": median(shares) if shares else None,
        "waited_fraction": sum(step.waited for step in planned) / sum(step.seconds for step in planned),
        "timed_steps": len(planned),
    }


def compared(
    steps: Sequence[StepFigures], reference: Sequence[StepFigures], tokens: int, *, start: int
) -> dict[str, Any]:
    """Return the part of the JSON that compares the run with ``reference``, the same steps by ``sequential``.

    ``start`` steps were made before. Steps are numbered from 1.
    """
    pairs = enumerate(zip(steps, reference, strict=True), start + 1)
    unequal = next((number for number, (one, two) in pairs if one.loss != two.loss), None)
    ours, theirs = (speed_of(of, tokens) for of in (steps, reference))
    return {
        "program": "sequential",
        "overlap": "serial",
        "losses": [step.loss for step in reference],
        "losses_equal": unequal is None,
        "first_unequal_step": unequal,
        "speedup": theirs["step_ms"] / ours["step_ms"],
        **theirs,
    }


def show(result: dict[str, Any], screen: Console, *, link: float, local: bool = False) -> None:
    """Print the summary, for a comparison with a column for each program.

    ``local`` says that all ranks are processors of one machine, ``link`` the rate of the imitated one in GB/s, or 0.
    """
    compare = result["compare"]
    headings = ("", result["workload"]["program"], "sequential")
    table = plain_table(headings, headings)
    table.show_header = bool(compare)
    table.add_row("steps", str(result["steps"]))
    losses = [of["losses"] for of in (result, compare) if of and of["losses"]]
    if losses:
        table.add_row("loss", *(f"{of[0]:.3f} → {of[-1]:.3f}" for of in losses))
    held_out = result["held_out"]
    table.add_row("held-out loss", f"{held_out['loss']:.3f} nats per byte")
    table.add_row("  by byte frequency", f"{held_out['unigram_entropy']:.3f}, for a model without context")
    rows = {"tokens/s": "tokens_per_s", "ms per step": "step_ms", "hidden": "hidden_fraction"}
    rows["exposed ms per step"] = "exposed_ms"
    for name, key in rows.items() if result["tokens_per_s"] is not None else ():
        form = ".1%" if key == "hidden_fraction" else ".0f"
        table.add_row(name, number(result[key], form), number(compare[key], form) if compare else "")
    for cause, ms in (result["exposed_by_cause_ms"] or {}).items():
        if ms >= 0.5:
            also = f"{compare['exposed_by_cause_ms'][cause]:.0f}" if compare else ""
            table.add_row(f"  by {cause}, mean", f"{ms:.0f}", also)
    if (timed := result["timed_steps"]) is not None:
        others = result["steps"] - result["resumed_from"] - timed
        why = f", without {others} that measured nodes or tried plans" if others else ""
        table.add_row("", f"medians of {counted(timed, 'step')}{why}")
    if (waited := result["waited_fraction"] or 0.0) > SHARED:
        table.add_row("processors", f"shared: a rank waited for one in {waited:.0%} of the time, so figures are lower")
    table.add_row("checkpoint", escape(result["checkpoint"] or "none; --checkpoint FOLDER keeps some"))
    screen.print(table, highlight=False)
    if compare:
        unequal = compare["first_unequal_step"]
        equal = "equal at every step" if unequal is None else f"NOT equal from step {unequal} on"
        screen.print(f"{compare['speedup']:.2f} times as fast as sequential; losses {equal}", style="bold")
    if local and result["hidden_fraction"] is not None:
        print_lines(screen, f"{LINK.format(link=link) if link else LOCAL}\n{NEXT}")


def train(options: TrainOptions, rank: Rank) -> None:
    """Train, from the last checkpoint if there is one; the first rank prints."""
    screen = console(options.json, quiet=rank.rank != 0)
    with showing(screen, f"step 0/{options.steps}  reading the text and making the model") as say:
        run = _Run(options, rank, screen, say)
        run.train()
    if rank.rank == 0:
        result = run.result()
        show(result, screen, link=run.trainer.link, local=rank.local)
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
