"""Exchanges of equal sizes, and what happens to rows that find no room."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from overlap1f1b.play.observers import ExpertCall, Observer
from overlap1f1b.play.times import Times
from overlap1f1b.reduce.reduction import GradientsAside
from overlap1f1b.transport.mesh import Mesh


class CapacityOverflowError(RuntimeError):
    """A step whose exchanges had no room for all rows, on some rank; gradients are as they were before it."""


class Dropped(NamedTuple):
    """Choices of one call of experts that found no room."""

    where: str  # name of the block, and number of the microbatch
    choices: Tensor  # dropped choices of each expert, int64 [E], perhaps on a GPU that has not computed it yet
    counts: Tensor  # [ranks, 1 + E / ranks], all choices of each expert behind the rows of its rank
    rows: int  # rows that can be sent to each rank
    room: int  # choices that can be sent to each rank


class Capacity(Observer):
    """The room for rows in a step's exchanges, ``factor`` times an even share, and the rows that found none.

    A step that has lost rows leaves gradients as they were, and raises CapacityOverflowError on all ranks of the mesh;
    so does, with ValueError, one in which ranks along "ep" have other numbers of tokens.
    """

    rehearses = True

    def __init__(self, factor: float, mesh: Mesh, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        self.factor, self._mesh, self._parameters = factor, mesh, parameters
        self._compared = False
        self._dropped: list[Dropped] = []
        self._aside = GradientsAside()

    def begin(self, times: Times) -> None:
        self._dropped = []
        self._aside.take(self._parameters())

    def routed(self, call: ExpertCall) -> None:
        """Note rows of a call that found no room; compare the first call's tokens over the ranks that exchange."""
        route = call.route
        if not self._compared:
            route.check_tokens([*self._mesh.every(route.tokens, over=self._mesh.experts_over).values()])
            self._compared = True
        if route.dropped is not None:
            assert route.room is not None
            where = f"{call.where}, microbatch {call.microbatch}"
            self._dropped.append(Dropped(where, route.dropped, route.counts, route.send[0], route.room))

    def end(self, *, failed: bool) -> None:
        """Add earlier gradients back; of a step that lost rows on any rank first drop its own, and raise."""
        lost, undo = None, True
        try:
            lost = None if failed else self._lost()
            undo = failed or lost is not None
        finally:
            for parameter in self._parameters() if undo else ():
                parameter.grad = None
            self._aside.add_back()
        if lost is not None:
            raise CapacityOverflowError(lost)

    def _lost(self) -> str | None:
        mine = self._lost_here()
        return next(filter(None, self._mesh.every(mine).values())) if self._mesh.sums(mine is not None)[0] else None

    def _lost_here(self) -> str | None:
        """Return a text about the first call of experts here that lost rows, or None; waits for the device once."""
        every, self._dropped = self._dropped, []
        if not every:
            return None
        sums = torch.stack([dropped.choices.sum() for dropped in every]).tolist()
        for dropped, total in zip(every, sums, strict=True):
            if total:
                lost, chosen = dropped.choices.tolist(), dropped.counts[:, 1:].flatten().tolist()
                worst = max(range(len(lost)), key=lost.__getitem__)
                return (
                    f"{total} choices of {dropped.where}, found no room under capacity={self.factor:g}: "
                    f"{dropped.rows} rows and {dropped.room} choices to each rank; most of expert {worst}, "
                    f"{lost[worst]} of {chosen[worst]}"
                )
        return None
