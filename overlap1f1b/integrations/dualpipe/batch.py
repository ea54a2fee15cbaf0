"""What a rank feeds into the ends of the pipes in a step, and what leaves them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from overlap1f1b.engine.run.microbatch import OptionalTensors, Tensors

Criterion = Callable[..., Tensor]
"""``(*outputs, *labels) → scalar``."""


@dataclass(frozen=True)
class Batch:
    """The arguments of a step.

    Args:
        inputs: Each is cut into the microbatches that enter on this rank.
        labels: Each is cut into those that end on this rank; None is passed on as it is.
        criterion: None asks for outputs alone.
        dim: Where to cut.
        keep_outputs: Whether outputs are returned.
    """

    inputs: OptionalTensors
    labels: OptionalTensors
    criterion: Criterion | None
    dim: int
    keep_outputs: bool

    def parts(self, count: int) -> list[Tensors]:
        """The inputs of each microbatch, leaves.

        Raises:
            ValueError: No inputs, or fewer rows than microbatches.
        """
        given = [x for x in self.inputs if x is not None]
        if not given or len(given) < len(self.inputs):
            what = ", ".join(type(x).__name__ for x in self.inputs) or "nothing"
            raise ValueError(f"inputs {what} on a rank where a pipe begins; allowed: tensors")
        cut = [self._cut(x.detach(), count, "inputs") for x in given]
        for x, parts in zip(given, cut, strict=True):
            for part in parts:
                part.requires_grad_(x.requires_grad and torch.is_grad_enabled())
        return list(zip(*cut, strict=True))

    def labels_of(self, count: int) -> list[OptionalTensors]:
        """The labels of each microbatch.

        Raises:
            ValueError: No criterion where a backward needs one, or fewer rows than microbatches.
        """
        if self.criterion is None and torch.is_grad_enabled():
            raise ValueError("criterion=None on a rank where a pipe ends; allowed: a function, or torch.no_grad()")
        cut = [(None,) * count if x is None else self._cut(x, count, "labels") for x in self.labels]
        return list(zip(*cut, strict=True)) if cut else [()] * count

    def _cut(self, x: Tensor, count: int, name: str) -> Tensors:
        if not -x.dim() <= self.dim < x.dim() or x.shape[self.dim] < count:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} for {count} microbatches along dimension {self.dim}; "
                f"allowed: at least {count} there"
            )
        return x.tensor_split(count, dim=self.dim)

    def finish(self, ended: Ended) -> tuple[Tensor | None, Tensor | Tensors | None]:
        """What a step returns; gives inputs that require a gradient theirs."""
        if ended.input_grads:
            grads = [torch.cat(parts, self.dim) for parts in zip(*ended.input_grads, strict=True)]
            torch.autograd.backward([x for x in self.inputs if x is not None and x.requires_grad], grads)
        loss = torch.stack(list(ended.losses)) if ended.losses else None
        if not ended.outputs:
            return loss, None
        outputs = tuple(_joined(parts, self.dim) for parts in zip(*ended.outputs, strict=True))
        return loss, outputs[0] if len(outputs) == 1 else outputs


def _joined(parts: Tensors, dim: int) -> Tensor:
    """Of all microbatches; what is one number of each becomes ``[microbatches]``, as losses do."""
    return torch.cat(parts, dim) if parts[0].dim() else torch.stack(parts)


class Ended(NamedTuple):
    """What a step made at this rank's ends of the pipes, of each microbatch in order.

    Args:
        losses: Without a graph; empty without a criterion, and where no pipe ends.
        outputs: Those that were asked for.
        input_grads: Of the inputs that require one; empty where none does.
    """

    losses: Sequence[Tensor]
    outputs: Sequence[Tensors]
    input_grads: Sequence[Tensors]
