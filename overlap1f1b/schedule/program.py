"""A pipeline schedule: the actions of each rank in order, with its rules, its file and its drawing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from overlap1f1b.schedule.action import Action, Slot, actions_of, peaks_of
from overlap1f1b.schedule.checks import check
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.rows import Rows
from overlap1f1b.schedule.table import read, write


class Program(Rows):
    """The actions of every rank in one training step.

    >>> from overlap1f1b.schedule import build_schedule
    >>> program = build_schedule("combined_1f1b", microbatches=3, extra_warmup=0)
    >>> print(program.draw())
    rank 0: F0 B0‖F1 B1‖F2 B2

    Args:
        name: The generator's name, for reports.
        microbatches: Microbatches of a step over all pipes, M; see :meth:`microbatches_of` for their numbers.
        ranks: ``ranks[r]`` is the tuple of :class:`Action` and :class:`Pair` of rank ``r``.
        peak_activations: Declared limit of (stage, microbatch) whose activations are alive at once, per rank: from the
            forward to the end of its B, or of its W if the backward is split. Both members of a pair count.
        placement: Rank of each stage.
        peak_weights: Declared limit of weight gradients that wait at once, per rank: (stage, microbatch) between I and
            W. Empty if nothing is declared.
        search_seconds: If above 0, an Engine replaces the order by one that a search of this size finds for measured
            costs, within ``peak_activations``; see :func:`~overlap1f1b.found_orders`.
    """

    def draw(self) -> str:
        """Return one line a rank; ``‖`` joins the members of a pair. Stages are named if there are several."""
        places = {(action.stage, action.pipe) for rank in range(len(self.ranks)) for action in self.actions(rank)}

        def text(action: Action) -> str:
            return f"{action.kind.value}{action.microbatch}" if places == {(0, 0)} else str(action)

        return "\n".join(
            f"rank {rank}: " + " ".join("‖".join(text(a) for a in actions_of(slot)) for slot in slots)
            for rank, slots in enumerate(self.ranks)
        )

    def to_csv(self, path: str | Path, *, header: bool = True) -> None:
        """Write one row a rank, one cell a slot; ``header=False`` leaves out the lines that torch's reader refuses.

        A file holds an order that stays: ``search_seconds`` is not written.
        """
        write(self, path, header=header)

    @classmethod
    def from_csv(cls, path: str | Path) -> Program:
        """Return the program of a file of :meth:`to_csv`, or of a table of torch's pipeline schedules.

        Raises:
            ValueError: The file is malformed; the message names line, column and text.
        """
        return cls(**vars(read(path)))

    def check(self) -> None:
        """Raise ``ValueError`` for the first broken rule of the schedule, naming rank, position and action."""
        check(self)


def program_of(name: str, microbatches: int, placement: Placement, rows: Iterable[Iterable[Slot]]) -> Program:
    """Return the Program of finished rows; it declares the peaks of activations and weight gradients of the rows."""
    ranks = tuple(map(tuple, rows))
    alive, pending = zip(*map(peaks_of, ranks), strict=True)
    return Program(name, microbatches, ranks, alive, placement, pending)
