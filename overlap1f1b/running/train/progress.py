"""Progress of a training: a bar in a terminal, lines elsewhere; scalars for TensorBoard."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from overlap1f1b.running.train.trainer import Step
from overlap1f1b.terminal.status import Say

LINES = 15  # per run without a bar
RECENT = 20  # steps over which speed and hidden share are averaged


class Progress:
    """Display of every step: a bar on ``screen`` in a terminal, lines by ``say`` elsewhere.

    ``tokens`` are of a step over all ranks; ``start`` steps were done before, and ``steps`` includes them.
    """

    def __init__(self, screen: Console, say: Say, *, tokens: int, start: int, steps: int) -> None:
        self.screen, self.say, self.tokens, self.steps = screen, say, tokens, steps
        self.every = max(1, round((steps - start) / LINES))
        self._recent: deque[Step] = deque(maxlen=RECENT)
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
        self.bar = Bar(*columns, console=screen)
        self._task = self.bar.add_task("", total=steps, completed=start, text="")

    def shown(self) -> AbstractContextManager[object]:
        """Return the context in which the bar is shown, if there is a terminal."""
        return self.bar if self.screen.is_terminal else nullcontext()

    def show(self, number: int, step: Step, held_out: float | None) -> None:
        """Show step ``number``, from 1, and the loss on held-out text if it was just measured."""
        if any((before.measuring, before.trying) != (step.measuring, step.trying) for before in self._recent):
            self._recent.clear()  # steps that measure nodes or try plans are slower
        self._recent.append(step)
        text, speed = f"loss {step.loss:.3f}", self._speed()
        if self.screen.is_terminal:
            if held_out is not None:
                self.screen.print(f"step {number}: {text}, held-out {held_out:.3f}", highlight=False)
            self.bar.update(self._task, completed=number, text=f"{text}  {speed}")
            return
        text += "" if held_out is None else f"  held-out {held_out:.3f}"
        self.say(
            f"step {number}/{self.steps}  {text}  grad_norm {step.grad_norm:.2f}  {speed}",
            now=held_out is not None or number % self.every == 0 or number == self.steps,
        )

    def _speed(self) -> str:
        speed = self.tokens / median(step.seconds for step in self._recent)
        shares = [step.hidden for step in self._recent if step.hidden is not None]
        exposed = 1e3 * fmean(step.exposed for step in self._recent)
        seen = f"  hidden {fmean(shares):.0%}  exposed {exposed:.0f} ms" if shares else ""
        return f"{speed:.0f} tokens/s{seen}"


class Board:
    """Writer of each step's figures for TensorBoard.

    ``folder`` may have files of earlier runs, whose scalars of steps after ``start`` are dropped; None writes nothing.
    ``tokens`` are of a step over all ranks, and ``start`` steps were done before.
    """

    def __init__(self, folder: Path | None, *, tokens: int, start: int) -> None:
        self.tokens = tokens
        self._writer = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=start + 1 if start else None)

    def show(self, number: int, step: Step, held_out: float | None) -> None:
        """Show step ``number``, from 1, and the loss on held-out text if it was just measured."""
        if self._writer is None:
            return
        values = {
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "tokens_per_s": self.tokens / step.seconds,
            "hidden_fraction": step.hidden,
            "exposed_ms": 1e3 * step.exposed,
            "held_out_loss": held_out,
        }
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, number)

    def close(self) -> None:
        """Write the scalars that are not written yet."""
        if self._writer is not None:
            self._writer.close()
