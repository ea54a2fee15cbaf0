"""A step whose modules the engine cuts where they exchange."""

from __future__ import annotations

from typing import Any

from overlap1f1b.engine import Engine
from overlap1f1b.engine.batch import Feed, Microbatches
from overlap1f1b.engine.run.microbatch import LossFunction, OptionalTensors
from overlap1f1b.integrations.dualpipe.batch import Batch, Criterion, Ended


class CutModules(Engine):
    """An engine with the loss of each step apart, unscaled, and with a batch for each pipe.

    Args:
        arguments: Of the :class:`Engine`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, reduce=False)

    def run(self, batch: Batch, *, grad: bool) -> Ended:
        """Plays a step, or its forwards alone."""
        return self._ended(batch, self.play(lambda: self._feed(batch), grad=grad).microbatches)

    def _ended(self, batch: Batch, made: Microbatches) -> Ended:
        begun, ended = made.of_stage(0), made.of_stage(self.program.placement.stages - 1)
        results = [m.outputs for m in ended if m.outputs is not None]
        assert len(results) == len(ended)
        input_grads = [tuple(g for g in m.input_grads if g is not None) for m in begun]
        return Ended(
            losses=[loss for (loss,) in results] if batch.criterion is not None else [],
            outputs=([m.kept for m in ended] if batch.criterion is not None else results) if batch.keep_outputs else [],
            input_grads=[grads for grads in input_grads if grads],
        )

    def _feed(self, batch: Batch) -> Feed:
        """The microbatches of both ends; auxiliary losses count as each router says."""
        placement = self.program.placement
        first, last = 0, placement.stages - 1
        pipe_of = {number: pipe for pipe, number in placement.places(self.rank)}
        indices = {number: self.program.microbatches_of(pipe) for number, pipe in pipe_of.items()}
        parts = batch.parts(len(indices[first])) if first in indices else []
        labels = batch.labels_of(len(indices[last])) if last in indices else []

        def given(number: int, index: int) -> dict[str, Any]:
            at, criterion = indices[number].index(index), batch.criterion if number == last else None
            return {
                "inputs": parts[at] if number == first else None,
                "loss_fn": None if criterion is None else _labelled(criterion, labels[at]),
                "keep_outputs": batch.keep_outputs,
            }

        return Feed(given, dict.fromkeys(range(self.program.microbatches), 1.0), None)


def _labelled(criterion: Criterion, labels: OptionalTensors) -> LossFunction:
    # The engine's targets are tensors; a label may be None.
    return lambda *outputs: criterion(*outputs, *labels)
