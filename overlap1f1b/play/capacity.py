"""Exchanges of equal sizes, and what happens to rows that find no room."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, SupportsFloat

import torch
from torch import Tensor, nn

from overlap1f1b.cut.stage import Stage
from overlap1f1b.moe.route import Route
from overlap1f1b.plan import Plan
from overlap1f1b.play.result import PlayedStep
from overlap1f1b.reduce.reduction import GradientsAside
from overlap1f1b.schedule.values import quoted
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


class Capacity:
    """The room for rows in a step's exchanges, and the rows that found none.

    ``factor`` is the room as a multiple of an even share; None for exchanges of exact sizes.

    Raises:
        ValueError: An unknown ``factor``; in a step, ranks along "ep" with other numbers of tokens.
    """

    def __init__(self, factor: float | None, stages: Iterable[Stage], mesh: Mesh) -> None:
        if factor is not None and not (isinstance(factor, SupportsFloat) and 0 < factor < math.inf):
            raise ValueError(f"capacity={quoted(factor)}; allowed: more than 0, or None")
        self.factor, self.stages, self.mesh = factor, list(stages), mesh
        self._compared = False
        self._dropped: list[Dropped] = []
        for stage in self.stages if factor is not None else ():
            stage.capacity, stage.on_route = factor, self._note
            stage.adds_to_main = False  # the gradients of a step that lost rows must be taken back

    def _note(self, route: Route, where: str) -> None:
        """Note rows of a call that found no room; compare the first call's tokens over the ranks that exchange.

        Raises:
            ValueError: Numbers differ: sizes would not be equal, and ranks would wait for rows that nobody sends.
        """
        if not self._compared:
            route.check_tokens(self.mesh.gathered_by_experts(route.tokens))
            self._compared = True
        if route.dropped is not None:
            assert route.room is not None
            self._dropped.append(Dropped(where, route.dropped, route.counts, route.send[0], route.room))

    def refusing(
        self, play_nodes: Callable[[Plan], PlayedStep], parameters: Iterable[nn.Parameter]
    ) -> Callable[[Plan], PlayedStep]:
        """Return a function that plays a step; if rows found no room, it undoes it and raises."""
        held = dict.fromkeys(parameters)

        def drop_gradients() -> None:
            for parameter in held:
                parameter.grad = None

        def play(plan: Plan) -> PlayedStep:
            self._dropped.clear()
            aside = GradientsAside()
            aside.take(held)
            try:
                played, mine = play_nodes(plan), self._lost_here()
                lost = (
                    next(filter(None, self.mesh.every(mine).values())) if self.mesh.sums(mine is not None)[0] else None
                )
                if lost is not None:
                    raise CapacityOverflowError(lost)
                return played
            except BaseException:
                drop_gradients()
                raise
            finally:
                aside.add_back()

        return play

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
