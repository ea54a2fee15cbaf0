"""Losses and norms of gradients that are not finite: said once, without a wait for the device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from overlap1f1b.cut.options import Finite
from overlap1f1b.play.result import StepResult
from overlap1f1b.transport import devices
from overlap1f1b.transport.mesh import Mesh
from overlap1f1b.transport.streams import HostCopy, InlineStream, SideStream, side_stream

_ALLOWED = "allowed: finite ones, as by a smaller learning rate, or a scale of gradients that suits the dtype"


class NotFiniteError(RuntimeError):
    """A loss or the norm of the gradients is not finite; the same line on all ranks. The engine can go on.

    ``result`` is that of the step, whose gradients are in ``.grad``; None for a norm.
    """

    result: StepResult | None = None


class _Losses(NamedTuple):
    """Losses of a step, by the numbers of their microbatches, on their way to the host."""

    step: int
    microbatches: Sequence[int]
    losses: Tensor
    copy: HostCopy


class FiniteCheck:
    """Looks at losses once the device has passed them, and at norms on the host; all ranks raise together."""

    def __init__(self, finite: Finite, mesh: Mesh) -> None:
        self._finite, self._mesh = finite, mesh
        self._coming: list[_Losses] = []
        self._said: set[str] = set()
        self._beside: SideStream | None = None

    def note(self, step: int, microbatches: Sequence[int], losses: Sequence[Tensor]) -> None:
        """Note the losses of a step; on a device they are copied to the host behind what it computes."""
        if self._finite is None or not losses:
            return
        stacked = torch.stack([loss.reshape(()) if loss.dim() else loss for loss in losses])
        if self._beside is None:
            here = devices.gpu_of(stacked.device) is None
            self._beside = InlineStream() if here else side_stream(stacked.device, "losses")
        copy = HostCopy.on(self._beside, stacked)
        copy.mark.wait()  # a device waits for some bytes, so that memory is freed behind them
        self._coming.append(_Losses(step, microbatches, stacked, copy))

    def end(self) -> None:
        """Wait for copies that nobody has looked at."""
        while self._coming:
            self._coming.pop().copy.read()

    def found(self, step: int, norm: float | None = None) -> str | None:
        """Return what is to be said of a step, and its norm if known.

        Under "raise" all ranks call this, and get the same.
        """
        if self._finite is None:
            return None
        lines = self._of_losses()
        if norm is not None and not math.isfinite(norm):
            lines.append((step, math.inf, f"the norm of the gradients behind step {step} is {norm}; {_ALLOWED}"))
        if self._finite == "raise" and self._mesh.sums(len(lines))[0]:
            lines = self._mesh.combined(lines, lambda _, parts: sorted(chain.from_iterable(parts))[:1])
        return min(lines)[2] if lines else None

    def _of_losses(self) -> list[tuple[int, float, str]]:
        """Return a line for each loss on the host that is not finite: its step, microbatch and text."""
        lines: list[tuple[int, float, str]] = []
        while self._coming and self._coming[0].copy.mark.is_completed():
            step, microbatches, _, copy = self._coming.pop(0)
            copy.mark.synchronize()
            for number, loss in zip(microbatches, copy.tensors[0].tolist(), strict=True):
                if not math.isfinite(loss):
                    line = f"the loss of microbatch {number} of step {step} is {loss}{self._mesh.where}; {_ALLOWED}"
                    lines.append((step, number, line))
        return lines

    def say(self, line: str | None, result: StepResult | None = None) -> None:
        """Say what was found, between calls of the engine; under "raise" by a NotFiniteError."""
        if line is None:
            return
        if self._finite == "raise":
            error = NotFiniteError(line)
            error.result = result
            raise error
        kind = line.partition(" of ")[0]
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(f"{line}; later ones are not said", stacklevel=4)
