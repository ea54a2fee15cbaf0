"""The batch of a step: split into microbatches at both ends of the pipes, and joined again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlap1f1b.engine.batch import Feed, Microbatches
from overlap1f1b.engine.run.microbatch import OptionalTensors, Tensors
from overlap1f1b.schedule import Program

Criterion = Callable[..., Tensor]
"""``(*outputs, *labels) → scalar``."""


@dataclass(frozen=True)
class Batch:
    """The arguments of a step: tensors split along ``dim`` into the microbatches that begin or end on this rank.

    A label of None is passed on unchanged; without a criterion there are outputs alone.
    """

    inputs: OptionalTensors
    labels: Any
    criterion: Criterion | None
    dim: int
    return_outputs: bool

    def _inputs_of(self, count: int) -> list[Tensors]:
        """Return the inputs of each microbatch, as leaves."""
        given = [x for x in self.inputs if x is not None]
        if not given or len(given) < len(self.inputs):
            what = ", ".join(type(x).__name__ for x in self.inputs) or "nothing"
            raise ValueError(f"inputs {what} on a rank where a pipe begins; allowed: tensors")
        split = [self._split(x.detach(), count, "inputs") for x in given]
        for x, parts in zip(given, split, strict=True):
            for part in parts:
                part.requires_grad_(x.requires_grad and torch.is_grad_enabled())
        return list(zip(*split, strict=True))

    def _labels_of(self, count: int) -> list[OptionalTensors]:
        """Return the labels of each microbatch."""
        if self.criterion is None and torch.is_grad_enabled():
            raise ValueError("criterion=None on a rank where a pipe ends; allowed: a function, or torch.no_grad()")
        labels = self.labels if isinstance(self.labels, tuple) else (self.labels,)
        wrong = [x for x in labels if not isinstance(x, Tensor) and (x is not None or self.labels is None)]
        if wrong:
            raise ValueError(
                f"labels {type(wrong[0]).__name__} on a rank where a pipe ends; "
                "allowed: a tensor, or a tuple of tensors and None"
            )
        split = [(None,) * count if x is None else self._split(x, count, "labels") for x in labels]
        return list(zip(*split, strict=True)) if split else [()] * count

    def _split(self, x: Tensor, count: int, name: str) -> Tensors:
        if not -x.dim() <= self.dim < x.dim() or x.shape[self.dim] < count:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} for {count} microbatches along dimension {self.dim}; "
                f"allowed: at least {count} there"
            )
        return x.tensor_split(count, dim=self.dim)

    def feed(self, program: Program, rank: int) -> Feed:
        """Return the feed of an engine's stages: losses are unscaled, auxiliary losses keep their routers' scale."""
        last, inputs, labels = program.placement.stages - 1, dict[int, Tensors](), dict[int, OptionalTensors]()
        for pipe, stage in program.placement.places(rank):
            indices = program.microbatches_of(pipe)
            if stage == 0:
                inputs.update(zip(indices, self._inputs_of(len(indices)), strict=True))
            if stage == last:
                labels.update(zip(indices, self._labels_of(len(indices)), strict=True))

        def given(stage: int, microbatch: int) -> dict[str, Any]:
            criterion = self.criterion if stage == last else None
            # Labels may be None, where the engine's targets may not.
            loss_fn = criterion and (lambda *outputs: criterion(*outputs, *labels[microbatch]))
            inputs_of = inputs[microbatch] if stage == 0 else None
            return {"inputs": inputs_of, "loss_fn": loss_fn, "return_outputs": self.return_outputs}

        return Feed(given, dict.fromkeys(range(program.microbatches), 1.0), None)

    def finish(self, played: Microbatches, program: Program) -> tuple[Tensor | None, Tensor | Tensors | None]:
        """Return losses and outputs of a step with :meth:`feed`, and set the gradients of inputs that require one."""
        first, last = played.of_stage(0), played.of_stage(program.placement.stages - 1)
        grads = [tuple(g for g in microbatch.input_grads if g is not None) for microbatch in first]
        if any(grads):
            joined = [torch.cat(parts, self.dim) for parts in zip(*grads, strict=True)]
            torch.autograd.backward([x for x in self.inputs if x is not None and x.requires_grad], joined)
        results = [microbatch.outputs for microbatch in last if microbatch.outputs is not None]
        assert len(results) == len(last)
        loss = torch.stack([loss for (loss,) in results]) if results and self.criterion is not None else None
        if not results or not self.return_outputs:
            return loss, None
        kept = results if self.criterion is None else [microbatch.kept for microbatch in last]
        outputs = tuple(  # scalars become [microbatches], as losses do
            torch.cat(parts, self.dim) if parts[0].dim() else torch.stack(parts) for parts in zip(*kept, strict=True)
        )
        return loss, outputs[0] if len(outputs) == 1 else outputs
