"""What a training shows: a line a step; scalars for TensorBoard; the summary."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.markup import escape

from overlap1f1b.learn.purpose import Purpose
from overlap1f1b.running.ranks import SHARED
from overlap1f1b.running.train.trainer import StepFigures
from overlap1f1b.schedule.values import counted
from overlap1f1b.terminal.output import number, plain_table, print_lines
from overlap1f1b.terminal.status import Say

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
    for cause, time in (result["exposed_by_cause_ms"] or {}).items():
        if time >= 0.5:
            also = f"{compare['exposed_by_cause_ms'][cause]:.0f}" if compare else ""
            table.add_row(f"  by {cause}, mean", f"{time:.0f}", also)
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
