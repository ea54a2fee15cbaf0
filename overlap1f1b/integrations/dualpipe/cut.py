"""A step whose modules the engine cuts where they exchange."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overlap1f1b.engine import Engine
from overlap1f1b.engine import batch as engine_batch
from overlap1f1b.engine.microbatch import LossFunction, Microbatch, OptionalTensors
from overlap1f1b.engine.player import Place
from overlap1f1b.engine.work import Work
from overlap1f1b.integrations.dualpipe.batch import Batch, Criterion, Ended


class CutModules(Engine):
    """An engine with the loss of each step apart, unscaled, and with a batch for each pipe.

    Args:
        arguments: Of the :class:`Engine`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, loss_fn=_unused, reduce=False)
        self._batch: Batch | None = None
        self._made: dict[Place, Microbatch] = {}

    def run(self, batch: Batch, *, grad: bool) -> Ended:
        """Plays a step, or its forwards alone."""
        self._batch = batch
        try:
            self.step() if grad else self.evaluate()
            return self._ended(batch)
        finally:
            self._batch, self._made = None, {}

    def _ended(self, batch: Batch) -> Ended:
        last = self.program.placement.stages - 1
        begun = [m for (stage, _), m in self._made.items() if stage == 0]
        ended = [m for (stage, _), m in self._made.items() if stage == last]
        results = [m.outputs for m in ended if m.outputs is not None]
        assert len(results) == len(ended)
        input_grads = [tuple(g for g in m.input_grads if g is not None) for m in begun]
        return Ended(
            losses=[loss for (loss,) in results] if batch.criterion is not None else [],
            outputs=([m.kept for m in ended] if batch.criterion is not None else results) if batch.keep_outputs else [],
            input_grads=[grads for grads in input_grads if grads],
        )

    def work(
        self,
        inputs: engine_batch.Batch | None,
        target: engine_batch.Batch | None,
        loss_scale: float,
        *,
        grad: bool,
        keep: bool,
    ) -> Work:
        """The microbatches of both ends; auxiliary losses count as each router says."""
        batch, placement = self._batch, self.program.placement
        assert batch is not None
        self._made = {}
        seed = int(torch.randint(2**62, ())) if grad else 0
        for pipe, number in placement.places(self.rank):
            indices = self.program.microbatches_of(pipe)
            first, last = number == 0, number == placement.stages - 1
            parts = batch.parts(len(indices)) if first else []
            labels = batch.labels_of(len(indices)) if last else []
            for at, index in enumerate(indices):
                self._made[number, index] = self.stages[number].microbatch(
                    parts[at] if first else None,
                    index=index,
                    loss_fn=_labelled(batch.criterion, labels[at]) if last and batch.criterion is not None else None,
                    seed=seed + index * placement.stages + number,
                    grad=grad,
                    keep_outputs=batch.keep_outputs,
                )
        return Work(self._made, dict.fromkeys(range(self.program.microbatches), 1.0), None)


def _labelled(criterion: Criterion, labels: OptionalTensors) -> LossFunction:
    # The engine's targets are tensors; a label may be None.
    return lambda *outputs: criterion(*outputs, *labels)


def _unused(*outputs: Tensor) -> Tensor:
    raise AssertionError("every microbatch has a loss of its own")
