"""What a step did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from overlap1f1b.engine.play.player import Player
from overlap1f1b.engine.run.microbatch import Microbatch, OptionalTensors, one
from overlap1f1b.plan import Span
from overlap1f1b.simulation import Timeline
from overlap1f1b.transport.mesh import Mesh


@dataclass(frozen=True)
class StepResult:
    """What a step did on this rank.

    Args:
        losses: Loss of each microbatch that ended on this rank, in their order.
        weights: Part of each in the mean over all ranks' microbatches.
        outputs: What went into each of the losses, where it was asked for.
        measured: Gives what was measured of the nodes.
        peak_activations: Most (stage, microbatch) that were alive at once.
        peak_held: The same with those that waited for weight gradients alone.
    """

    losses: tuple[Tensor, ...]
    weights: tuple[float, ...]
    outputs: tuple[Tensor | OptionalTensors | None, ...]
    measured: Callable[[], tuple[Span, ...]]
    peak_activations: int
    peak_held: int

    @cached_property
    def overlap(self) -> Timeline:
        """The measured Timeline, in seconds: ``overlap.exposed``, ``overlap.hidden_fraction``.

        On CUDA it is that of the device, and the first look at it waits for the step to end.
        """
        return Timeline(self.measured())

    @property
    def loss(self) -> Tensor:
        """Mean over the microbatches that ended on this rank, by their weights.

        Raises:
            ValueError: None did: it does not hold the last stage. See :meth:`Engine.mean_loss`.
        """
        if not self.losses:
            raise ValueError("no microbatch ends on this rank; allowed: result.loss where the last stage is held")
        losses = torch.stack([loss.reshape(()) for loss in self.losses])
        if len(set(self.weights)) == 1:
            return losses.mean()
        weights = losses.new_tensor(self.weights)
        return (losses * weights).sum() / weights.sum()


def result_of(ended: Sequence[Microbatch], weights: Sequence[float], player: Player) -> StepResult:
    """The result of a step that was played, whose last stage ended these microbatches."""
    losses = tuple(outputs[0] for m in ended if (outputs := m.outputs) is not None)
    assert len(losses) == len(ended)
    kept = tuple(one(m.kept) for m in ended) if any(m.keep_outputs for m in ended) else ()
    return StepResult(losses, tuple(weights), kept, player.measured(), player.peak_activations, player.peak_held)


def mean_loss(result: StepResult, mesh: Mesh) -> float:
    """The loss of a step over all ranks, which must all call this."""
    mine = (sum(float(x) * w for x, w in zip(result.losses, result.weights, strict=True)), sum(result.weights))
    total, weight = mesh.combined(mine, lambda _, every: (sum(t for t, _ in every), sum(w for _, w in every)))
    return total / weight
