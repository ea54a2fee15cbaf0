"""Exchanges of equal sizes: what becomes of rows that find no room."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar, get_args

import torch
from torch import nn

from overlap1f1b.engine.run.stage import Stage
from overlap1f1b.transport.mesh import Mesh

T = TypeVar("T")
Overflow = Literal["raise", "rerun"]
"""What to do about rows that found no room: raise :class:`CapacityOverflowError`, or play the step again, exactly."""


class CapacityOverflowError(RuntimeError):
    """A step whose exchanges had no room for all rows, on some rank; gradients are as they were before it."""


class Capacity:
    """Plays steps under a capacity, and sees to it that no row is lost in silence.

    Args:
        factor: Room as a multiple of an even share; None for exchanges of exact sizes.
        overflow: See :data:`Overflow`.
        stages: Of this rank.
        mesh: The ranks that play a step together.

    Raises:
        ValueError: A factor or an overflow that is none. When played: ranks along "ep" with other numbers of tokens.
    """

    def __init__(self, factor: float | None, overflow: Overflow, stages: Iterable[Stage], mesh: Mesh) -> None:
        if factor is not None and not 0 < factor < math.inf:
            raise ValueError(f"capacity={factor}; allowed: more than 0, or None")
        if overflow not in get_args(Overflow):
            raise ValueError(f"overflow={overflow!r}; allowed: {', '.join(map(repr, get_args(Overflow)))}")
        self.factor, self.overflow, self.stages, self.mesh = factor, overflow, list(stages), mesh
        self._compared = False
        for stage in self.stages:
            stage.capacity, stage.check_tokens = factor, self._compare
            stage.adds_to_main &= factor is None  # what a step adds must be there to be taken back

    def _compare(self, tokens: int) -> None:
        """Compares the first call's tokens over the ranks that exchange; those of later ones are theirs to keep equal.

        Raises:
            ValueError: Sizes would not be equal, and ranks would wait for rows that nobody sends.
        """
        if self._compared:
            return
        every = self.mesh.gathered("ep", tokens)
        if len(set(every)) > 1:
            raise ValueError(
                f"capacity={self.factor:g} with {every} tokens on the ranks along 'ep'; allowed: equally many, or "
                "capacity=None"
            )
        self._compared = True

    def played(self, play: Callable[[], T], parameters: Iterable[nn.Parameter] = ()) -> T:
        """What ``play`` returns.

        Args:
            play: Plays a step, or the same step once more.
            parameters: Whose gradients it adds to; a step that lost rows adds nothing.

        Raises:
            CapacityOverflowError: It lost rows, and is not to be played again.
        """
        if self.factor is None:
            return play()
        parameters = list(dict.fromkeys(parameters))  # one that a stage shares comes once for each place
        before = [parameter.grad for parameter in parameters]
        random = torch.get_rng_state()
        for parameter in parameters:
            parameter.grad = None
        kept = False
        try:
            result, lost = self._tried(play)
            if lost is not None and self.overflow == "rerun":
                for parameter in parameters:
                    parameter.grad = None
                torch.set_rng_state(random)  # the same microbatches draw the same numbers
                with self._exact():
                    result, lost = play(), None
            if lost is not None:
                raise CapacityOverflowError(lost)
            kept = True
        finally:
            for parameter, grad in zip(parameters, before, strict=True):
                if not kept or parameter.grad is None:
                    parameter.grad = grad
                elif grad is not None:
                    parameter.grad = grad + parameter.grad
        return result

    def _tried(self, play: Callable[[], T]) -> tuple[T, str | None]:
        for stage in self.stages:
            stage.dropped.clear()
        result = play()
        return result, self.mesh.combined(self._lost(), lambda _, every: next(filter(None, every), None))

    def _lost(self) -> str | None:
        """The first call of experts on this rank that lost rows; waits for the device, once for all of them."""
        entries = [(stage, dropped) for stage in self.stages for dropped in stage.dropped]
        for stage in self.stages:
            stage.dropped.clear()
        if not entries:
            return None
        sums = torch.stack([dropped.rows.sum() for _, dropped in entries]).tolist()
        for (stage, dropped), total in zip(entries, sums, strict=True):
            if total:
                rows, sent = dropped.rows.tolist(), dropped.counts.tolist()
                worst = max(range(len(rows)), key=rows.__getitem__)
                where = f"{stage.names[dropped.block]}, microbatch {dropped.microbatch}"
                return (
                    f"{total} rows of {where}, found no room under capacity={self.factor:g}: "
                    f"{dropped.room} rows to each rank; most of expert {worst}, "
                    f"{rows[worst]} of {rows[worst] + sent[worst]}"
                )
        return None

    @contextmanager
    def _exact(self) -> Iterator[None]:
        for stage in self.stages:
            stage.capacity = None
        try:
            yield
        finally:
            for stage in self.stages:
                stage.capacity = self.factor
