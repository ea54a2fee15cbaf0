"""Batches of an evaluation, several at a time: a pipeline needs several microbatches to be full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.utils import find_batch_size

Batch = dict[str, Any]
Step = tuple[Any, Any, Any]
"""Loss, logits and labels of a batch, as ``Trainer.prediction_step`` returns them."""


class Ahead:
    """A dataloader that is read some batches ahead, with everything else of the dataloader.

    accelerate's dataloaders say when they are at their last batch, so that metrics drop the rows that pad it. This one
    says it at the same batch, although the batch was read before.

    Args:
        count: Number of batches to read at a time.
        whole: Whether a batch has the rows of all ranks. The last one then tells how many there are in data without a
            length, as a dataloader of accelerate for such data does.
    """

    def __init__(self, loader: Any, count: int, *, whole: bool = False) -> None:
        self._loader, self._count, self._whole, self._ended = loader, count, whole, False
        self.batches: list[Batch] = []
        """The batches that were read together."""
        self._read_as: list[Batch] = []
        self.steps: dict[int, Step | None] = {}
        """Losses of the batches, by their numbers; None on a rank that computes no loss."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader)
        while self._read(batches):
            for number, batch in enumerate(self.batches):
                self.at(number)
                yield batch

    def _read(self, batches: Iterator[Batch]) -> list[Batch]:
        self.batches, self.steps, self._ended = [], {}, False
        for batch in batches:
            self.batches.append(batch)
            self._ended = bool(getattr(self._loader, "end_of_dataloader", False))
            if self._ended and self._whole and getattr(self._loader, "remainder", None) == -1:
                self._loader.remainder = find_batch_size(batch) or -1
            if self._ended or len(self.batches) == self._count:  # one more would end the last batch
                break
        self._read_as = list(map(dict, self.batches))
        return self.batches

    def number(self, batch: Batch) -> int | None:
        """Return the number of a batch among the batches read together; None for another or a changed batch."""
        for number, (one, read_as) in enumerate(zip(self.batches, self._read_as, strict=True)):
            if one is batch and one.keys() == read_as.keys() and all(one[name] is read_as[name] for name in one):
                return number
        return None

    def at(self, number: int) -> None:
        """Let the dataloader say whether it is at its last batch, as if it was at this one."""
        if self._ended:
            self._loader.end_of_dataloader = number == len(self.batches) - 1
