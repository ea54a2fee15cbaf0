"""Where in its block each parameter is used."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class ParameterUses:
    """The segments that use the parameters of each block, as its first forward has shown.

    Args:
        apart: For each block the weights whose gradients its layers leave to a queue.

    Attributes:
        apart: The same, without weights that no layer uses in this way.
        first: For each block the first segment that uses a parameter.
        several: For each block the parameters of ``apart`` that are used in several segments or in another way, too.
        known: Blocks that have run forward.
    """

    def __init__(self, apart: Sequence[set[nn.Parameter]]) -> None:
        self.apart = list(apart)
        self.first: list[dict[nn.Parameter, int]] = [{} for _ in apart]
        self.several: list[set[nn.Parameter]] = [set() for _ in apart]
        self._entering: list[set[nn.Parameter]] = [set() for _ in apart]
        self._left: list[set[nn.Parameter]] = [set() for _ in apart]
        self.known: set[int] = set()

    def watches(self, block: int) -> bool:
        """Return whether the first segment of a block has to be watched."""
        return block not in self.known or bool(self._entering[block])

    def settle(self) -> None:
        """Treat weights that no layer has left to a queue as any other parameter, from the next step on.

        Within a step the way of a gradient must not change: microbatches would be added in another order.
        """
        for block in self.known:
            idle = self.apart[block] - self._left[block]
            self.first[block] |= dict.fromkeys(idle & self._entering[block], 0)
            for known in (self.apart[block], self.several[block], self._entering[block]):
                known.difference_update(idle)

    def leaves(self, block: int, weight: nn.Parameter, segment: int) -> None:
        """Note that a layer in a segment leaves the gradient of its weight to a queue."""
        self._left[block].add(weight)
        if self.first[block].setdefault(weight, segment) != segment:
            self.several[block].add(weight)

    def enters(self, block: int, parameter: nn.Parameter, segment: int) -> None:
        """Note that a parameter enters a segment of a block, because it is used in other places, too."""
        if not segment:
            self._entering[block].add(parameter)
        if parameter in self.apart[block]:
            self.several[block].add(parameter)

    def forget(self, block: int) -> None:
        """Forget a block, which is cut in another way from now on."""
        self.known.discard(block)
        for known in (self.first[block], self.several[block], self._entering[block]):
            known.clear()
