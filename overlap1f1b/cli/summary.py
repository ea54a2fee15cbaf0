"""What a training run comes to: a table, two curves, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from overlap1f1b.cli.curves import marks, sparkline
from overlap1f1b.cli.trainer import Step


@dataclass(frozen=True)
class Speed:
    """Medians over the steps that were played as planned, those that measured nodes apart.

    Args:
        step_ms: One step.
        tokens_per_s: Over all ranks.
        exposed_ms: Exchange without compute beside it, in one step.
        hidden_fraction: Share of the exchange that had; None where nothing was seen to travel.
    """

    step_ms: float
    tokens_per_s: float
    exposed_ms: float
    hidden_fraction: float | None

    @classmethod
    def of(cls, steps: Sequence[Step], tokens: int) -> Speed | None:
        """Of steps of ``tokens`` tokens each; None of no steps."""
        planned = [step for step in steps if not step.measuring] or list(steps)
        if not planned:
            return None
        seconds = median(step.seconds for step in planned)
        shares = [step.hidden for step in planned if step.hidden is not None]
        return cls(
            step_ms=1e3 * seconds,
            tokens_per_s=tokens / seconds,
            exposed_ms=1e3 * median(step.exposed for step in planned),
            hidden_fraction=fmean(shares) if shares else None,
        )


def compared(losses: Sequence[float], speed: Speed, reference: Sequence[float], other: Speed) -> dict[str, Any]:
    """The part of the JSON that sets ``reference``, the losses and the speed of ``sequential``, beside the run."""
    unequal = next((i for i, (a, b) in enumerate(zip(losses, reference, strict=True)) if a != b), None)
    return {
        "program": "sequential",
        "overlap": "serial",
        "losses": list(reference),
        "losses_equal": unequal is None,
        "first_unequal": unequal,
        "step_ms": other.step_ms,
        "tokens_per_s": other.tokens_per_s,
        "exposed_ms": other.exposed_ms,
        "hidden_fraction": other.hidden_fraction,
        "speedup": other.step_ms / speed.step_ms,
    }


def show(result: dict[str, Any], screen: Console) -> None:
    """Prints the summary, with the curves above it if there are two."""
    compare = result["compare"]
    if compare:
        _show_curves(result, screen)
    table = Table(box=None, pad_edge=False, show_header=bool(compare))
    table.add_column()
    table.add_column(result["workload"]["program"], justify="right" if compare else "left")
    if compare:
        table.add_column("sequential", justify="right")

    def row(name: str, value: str, other: str = "") -> None:
        table.add_row(name, value, *([other] if compare else []))

    losses, held = result["losses"], result["held_out"]
    row("steps", str(result["steps"]), str(result["steps"]))
    if losses:
        begin = f" (of step {result['first_step'] + 1})" if result["first_step"] else ""
        last = f" → {compare['losses'][-1]:.3f}" if compare else ""
        row("loss", f"{losses[0]:.3f}{begin} → {losses[-1]:.3f}", f"{losses[-len(compare['losses'])]:.3f}{last}" if compare else "")
    row("held-out loss", f"{held['loss']:.3f} nats per byte (bytes by frequency alone: {held['unigram_entropy']:.3f})")
    if result["tokens_per_s"]:
        row("tokens/s", f"{result['tokens_per_s']:.0f}", f"{compare['tokens_per_s']:.0f}" if compare else "")
        if compare:
            row("speed-up", f"{compare['speedup']:.2f}×", "1.00×")
        row("hidden", _share(result["hidden_fraction"]), _share(compare["hidden_fraction"]) if compare else "")
        row("exposed", f"{result['exposed_ms']:.0f} ms a step", f"{compare['exposed_ms']:.0f} ms a step" if compare else "")
    row("checkpoint", result["checkpoint"] or "none (--checkpoint FOLDER keeps some)")
    screen.print(table, highlight=False)
    if compare:
        equal = compare["losses_equal"]
        at = "" if equal else f"; they differ first at step {compare['first_unequal'] + 1}"
        screen.print(f"losses equal at every step: {'yes' if equal else f'NO{at}'}", style="bold", highlight=False)


def _show_curves(result: dict[str, Any], screen: Console) -> None:
    other = result["compare"]["losses"]
    own = result["losses"][-len(other) :]
    begin = result["steps"] - len(other)
    name = result["workload"]["program"]
    for label, curve in ((name, own), ("sequential", other)):
        screen.print(f"{label:>16}  {sparkline(curve)}", highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("step", justify="right")
    for heading in (f"loss of {name}", "of sequential", "difference"):
        table.add_column(heading, justify="right")
    for i in marks(len(own)):
        table.add_row(str(begin + i + 1), f"{own[i]:.6f}", f"{other[i]:.6f}", f"{own[i] - other[i]:.1e}" if own[i] != other[i] else "0")
    screen.print(table, highlight=False)


def _share(fraction: float | None) -> str:
    return "–" if fraction is None else f"{fraction:.1%}"
