"""What a run has seen so far, step by step, kept beside its checkpoints."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "history.json"


@dataclass
class History:
    """Losses of a run, and where they begin: a resumed run whose file is gone knows none of the earlier ones.

    Args:
        first_step: Steps before the first of ``losses``.
        losses: Mean over all ranks, one a step.
        grad_norms: Before clipping, one a step.
        held_out: Pairs of (step, loss on held-out text).
    """

    first_step: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path, step: int) -> History:
        """The first ``step`` steps of what was saved; nothing, from ``step`` on, where that is not there."""
        try:
            saved = cls(**json.loads((folder / FILE).read_text()))
            count = step - saved.first_step
            if 0 <= count <= len(saved.losses):
                held_out = [(at, loss) for at, loss in saved.held_out if at <= step]
                return cls(saved.first_step, saved.losses[:count], saved.grad_norms[:count], held_out)
        except (OSError, ValueError, TypeError):
            pass  # the checkpoint matters; the curve before it is for looking at
        return cls(first_step=step)

    def save(self, folder: Path) -> None:
        """Replaces the file as a whole, so that a kill leaves the old one or the new one.

        A folder that cannot be written is left to the checkpoint to report, which does so on all ranks.
        """
        unfinished = folder / f".{FILE}.unfinished"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(asdict(self)))
            unfinished.replace(folder / FILE)
