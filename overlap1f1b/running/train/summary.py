"""The summary of a training: figures of speed, the comparison with sequential, a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape

from overlap1f1b.running.train.trainer import Step
from overlap1f1b.terminal.output import number, plain_table


def speed_of(steps: Sequence[Step], tokens: int) -> dict[str, Any]:
    """Return the JSON of the speed: medians over steps of ``tokens`` tokens each.

    Serial steps, which measure nodes, and steps that try plans count only where there are no others.
    The hidden fraction is None without an exchange, and all are None without steps.
    """
    planned = [step for step in steps if not step.measuring] or steps
    planned = [step for step in planned if not step.trying] or planned
    if not planned:
        return dict.fromkeys(("step_ms", "tokens_per_s", "exposed_ms", "hidden_fraction"))
    seconds = median(step.seconds for step in planned)
    shares = [step.hidden for step in planned if step.hidden is not None]
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_s": tokens / seconds,
        "exposed_ms": 1e3 * median(step.exposed for step in planned),
        "hidden_fraction": median(shares) if shares else None,
    }


def compared(steps: Sequence[Step], reference: Sequence[Step], tokens: int, *, start: int) -> dict[str, Any]:
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


def show(result: dict[str, Any], screen: Console) -> None:
    """Print the summary; for a comparison also the losses of both programs, and a column for each."""
    compare = result["compare"]
    headings = ("", result["workload"]["program"], "sequential")
    table = plain_table(headings, headings)
    table.show_header = bool(compare)
    table.add_row("steps", str(result["steps"]))
    if result["losses"]:
        table.add_row("loss", f"{result['losses'][0]:.3f} → {result['losses'][-1]:.3f}")
    held_out = result["held_out"]
    table.add_row("held-out loss", f"{held_out['loss']:.3f} nats per byte")
    table.add_row("  by byte frequency", f"{held_out['unigram_entropy']:.3f}, for a model without context")
    for name, text in (
        ("tokens/s", lambda of: f"{of['tokens_per_s']:.0f}"),
        ("ms per step", lambda of: f"{of['step_ms']:.0f}"),
        ("hidden", lambda of: number(of["hidden_fraction"], ".1%")),
        ("exposed ms per step", lambda of: f"{of['exposed_ms']:.0f}"),
    ):
        if result["tokens_per_s"] is not None:
            table.add_row(name, text(result), text(compare) if compare else "")
    table.add_row("checkpoint", escape(result["checkpoint"] or "none; --checkpoint FOLDER keeps some"))
    if compare:
        _show_losses(result, screen)
    screen.print(table, highlight=False)
    if compare:
        unequal = compare["first_unequal_step"]
        equal = "equal at every step" if unequal is None else f"NOT equal from step {unequal} on"
        screen.print(f"{compare['speedup']:.2f} times as fast as sequential; losses {equal}", style="bold")


def _show_losses(result: dict[str, Any], screen: Console) -> None:
    name, other = result["workload"]["program"], result["compare"]["losses"]
    own, before = result["losses"][-len(other) :], result["steps"] - len(other)
    table = plain_table(("step", name, "sequential", "difference"))
    for i in marks(len(own)):
        table.add_row(str(before + i + 1), f"{own[i]:.6f}", f"{other[i]:.6f}", f"{own[i] - other[i]:g}")
    screen.print("loss")
    screen.print(table, highlight=False)


def marks(count: int, most: int = 10) -> list[int]:
    """Return at most ``most`` evenly spaced positions of ``count``, with the first and the last.

    >>> marks(100, 4)
    [0, 33, 66, 99]
    """
    points = min(count, most)
    return sorted({round(i * (count - 1) / max(1, points - 1)) for i in range(points)})
