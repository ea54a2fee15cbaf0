"""A pipeline schedule as data: for each rank, the actions in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from overlap1f1b.schedule.action import Action, Kind, Step, actions_of
from overlap1f1b.schedule.placement import SINGLE, Placement


@dataclass(frozen=True)
class Program:
    """What every rank does in one training step.

    >>> from overlap1f1b.schedule import build_schedule
    >>> program = build_schedule("combined_1f1b", microbatches=3, extra_warmup=0)
    >>> print(program.draw())
    rank 0: F0 B0‖F1 B1‖F2 B2

    Args:
        name: The generator's name, for reports.
        microbatches: Microbatches of a step over all pipes, M, numbered through: see :meth:`microbatches_of`.
        ranks: ``ranks[r]`` is the tuple of :class:`Action` and :class:`Pair` of rank ``r``.
        peak_activations: Declared limit of (stage, microbatch) whose activations are alive at once, per rank: from the
            forward to the end of its B, or of its W where the backward is split. Of a pair both members count.
        placement: Which rank holds which stage.
        peak_weights: Declared limit of weight gradients that wait at once, per rank: of (stage, microbatch) between I
            and W. Empty where nothing is declared.
    """

    name: str
    microbatches: int
    ranks: tuple[tuple[Step, ...], ...]
    peak_activations: tuple[int, ...]
    placement: Placement = SINGLE
    peak_weights: tuple[int, ...] = ()

    def microbatches_of(self, pipe: int) -> range:
        """The microbatches that pass a pipe: of two pipes the first takes the lower half."""
        return self.placement.microbatches(pipe, self.microbatches)

    def splits(self, rank: int) -> bool:
        """Whether a rank has weight gradients as actions of their own."""
        return any(action.kind is Kind.W for action in self.actions(rank))

    def actions(self, rank: int) -> Iterator[Action]:
        """The actions of a rank in the order in which they open."""
        for step in self.ranks[rank]:
            yield from actions_of(step)

    @cached_property
    def forward_only(self) -> bool:
        """Whether no rank runs a backward."""
        return all(action.kind is Kind.F for rank in range(len(self.ranks)) for action in self.actions(rank))

    def draw(self) -> str:
        """One line a rank; ``‖`` joins the members of a pair. Stages are named where there are several."""
        places = {action[1::2] for rank in range(len(self.ranks)) for action in self.actions(rank)}

        def text(action: Action) -> str:
            return f"{action.kind.value}{action.microbatch}" if places == {(0, 0)} else str(action)

        return "\n".join(
            f"rank {rank}: " + " ".join("‖".join(text(a) for a in actions_of(step)) for step in steps)
            for rank, steps in enumerate(self.ranks)
        )

    def to_csv(self, path: str | Path, *, header: bool = True) -> None:
        """Writes one row a rank, one cell a step; ``header=False`` leaves out what torch's reader does not know."""
        from overlap1f1b.schedule.table import write

        write(self, path, header=header)

    @classmethod
    def from_csv(cls, path: str | Path) -> Program:
        """The program of a file of :meth:`to_csv`, or of a table of torch's pipeline schedules.

        Raises:
            ValueError: A malformed file, naming line, column and text.
        """
        from overlap1f1b.schedule.table import read

        return read(path)

    def check(self) -> None:
        """Raises ``ValueError`` naming rank, position and action where a rule of the schedule is broken."""
        from overlap1f1b.schedule.checks import check

        check(self)
