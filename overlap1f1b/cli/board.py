"""Figures of a training for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from overlap1f1b.cli.trainer import Step

SCALARS = ("loss", "grad_norm", "tokens_per_s", "hidden_fraction", "exposed_ms", "held_out_loss")


class Board:
    """Writes each step's scalars to a folder that TensorBoard shows: those of :data:`SCALARS`.

    >>> board = Board(Path("runs/one"), tokens=4096, start=0)
    >>> board.show(1, step, held_out=None)
    >>> board.close()

    Args:
        folder: Which may have files of earlier runs; None shows nothing.
        tokens: Of a step, over all ranks.
        start: Steps done before; what the folder says of later ones is dropped.
    """

    def __init__(self, folder: Path | None, *, tokens: int, start: int) -> None:
        self.tokens = tokens
        self._writer = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=start + 1 if start else None)

    def show(self, number: int, step: Step, held_out: float | None) -> None:
        """Step ``number``, the first being 1, and the loss on held-out text if it was just measured."""
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
        for name in SCALARS:
            if (value := values[name]) is not None:
                self._writer.add_scalar(name, value, number)

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()
