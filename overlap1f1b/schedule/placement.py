"""The placement of stages on ranks."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from overlap1f1b.schedule.values import check_size, checked, quoted


@checked
@dataclass(frozen=True)
class Placement:
    """The rank of every stage: ``pipes[p][s]`` is the rank of stage ``s`` of pipe ``p``.

    A *place* is a (pipe, stage). A pipe is one order in which microbatches pass the stages of the model. Every pipe has
    all stages, so the places of one stage hold the same parameters; if they lie on several ranks, their gradients are
    summed.

    >>> Placement.loop(ranks=2, chunks=2)
    Placement(pipes=((0, 1, 0, 1),))
    >>> Placement.v(2).places(0)
    ((0, 0), (0, 3))
    >>> Placement.bidirectional(4).replicas(1)
    (1, 2)

    Raises:
        ValueError: There is no pipe or stage, pipes have different lengths, or a rank has no stage.
    """

    pipes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        lengths = {len(pipe) for pipe in self.pipes}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"pipes of {quoted(sorted(lengths))} stages; allowed: one or more pipes of one length, 1 or more"
            )
        held = {rank for pipe in self.pipes for rank in pipe}
        if held != set(range(len(held))):
            raise ValueError(
                f"stages on ranks {quoted(sorted(held, key=str))}; allowed: every rank from 0 to the last holds a stage"
            )

    @classmethod
    def loop(cls, ranks: int, chunks: int = 1) -> Self:
        """Return a loop, with stage ``s`` on rank ``s mod ranks``: each rank holds ``chunks`` stages."""
        check_size("ranks", ranks)
        check_size("chunks", chunks)
        return cls((tuple(range(ranks)) * chunks,))

    @classmethod
    def v(cls, ranks: int, chunks: int = 2) -> Self:
        """Return a V, down and up again: rank ``r`` holds stages ``r`` and ``2·ranks − 1 − r``.

        The last rank passes to itself. With more chunks the stages go on, down and up in turns.

        >>> Placement.v(2, chunks=4)
        Placement(pipes=((0, 1, 1, 0, 0, 1, 1, 0),))
        """
        check_size("ranks", ranks)
        check_size("chunks", chunks)
        down = tuple(range(ranks))
        return cls((tuple(rank for chunk in range(chunks) for rank in (down[::-1] if chunk % 2 else down)),))

    @classmethod
    def bidirectional(cls, ranks: int) -> Self:
        """Return two reversed pipes: rank ``r`` holds stage ``r`` of pipe 0 and ``ranks − 1 − r`` of pipe 1."""
        check_size("ranks", ranks)
        return cls((tuple(range(ranks)), tuple(reversed(range(ranks)))))

    @cached_property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return max(rank for pipe in self.pipes for rank in pipe) + 1

    @property
    def stages(self) -> int:
        """Number of stages of a pipe."""
        return len(self.pipes[0])

    @property
    def share(self) -> float:
        """One stage as a fraction of a rank's share of the model: 1 / chunks. Each pipe holds the whole model."""
        return self.ranks / self.stages

    def rank(self, pipe: int, stage: int) -> int:
        """Return the rank that holds a place."""
        return self.pipes[pipe][stage]

    def places(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return every (pipe, stage) that a rank holds, pipe 0 first, stages ascending."""
        return self._places.get(rank, ())

    @cached_property
    def _places(self) -> dict[int, tuple[tuple[int, int], ...]]:
        places: dict[int, list[tuple[int, int]]] = {}
        for p, pipe in enumerate(self.pipes):
            for s, rank in enumerate(pipe):
                places.setdefault(rank, []).append((p, s))
        return {rank: tuple(held) for rank, held in places.items()}

    def replicas(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold a stage's parameters, ascending; the gradients are summed over them."""
        return tuple(sorted({pipe[stage] for pipe in self.pipes}))

    def microbatches(self, pipe: int, microbatches: int) -> range:
        """Return the microbatches of a step that pass a pipe.

        Microbatches of a step are numbered over all pipes. With two pipes, the first has the lower half, 0 to M/2 − 1,
        and the second the rest.

        >>> Placement.bidirectional(2).microbatches(1, 8)
        range(4, 8)
        """
        count = len(self.pipes)
        return range(-(-microbatches * pipe // count), -(-microbatches * (pipe + 1) // count))


SINGLE = Placement(((0,),))
"""The whole model on one rank."""
