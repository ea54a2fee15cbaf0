"""Where in its block each parameter is used."""

from __future__ import annotations

from torch import nn


class ParameterUses:
    """The segments that use the parameters of a block, as its first forward has shown.

    Args:
        apart: Weights whose gradients the block's layers leave to a queue.

    Attributes:
        apart: The same, without weights that no layer uses in this way.
        first: The first segment that uses a parameter.
        several: The parameters of ``apart`` that are used in several segments or in another way, too.
        known: Whether the block has run forward.
        left: Whether it has used a tensor that another block or microbatch has left, with its graph.
    """

    def __init__(self, apart: set[nn.Parameter]) -> None:
        self.apart, self.known, self.left = apart, False, False
        self.first: dict[nn.Parameter, int] = {}
        self.several: set[nn.Parameter] = set()
        self._entering: set[nn.Parameter] = set()
        self._left: set[nn.Parameter] = set()

    @property
    def watched(self) -> bool:
        """Whether the first segment has to be watched."""
        return not self.known or self.left or bool(self._entering)

    def settle(self) -> None:
        """Treat weights that no layer has left to a queue as any other parameter, from the next step on.

        Within a step the way of a gradient must not change: microbatches would be added in another order.
        """
        if not self.known:
            return
        idle = self.apart - self._left
        self.first |= dict.fromkeys(idle & self._entering, 0)
        for known in (self.apart, self.several, self._entering):
            known.difference_update(idle)

    def leaves(self, weight: nn.Parameter, segment: int) -> None:
        """Note that a layer in a segment leaves the gradient of its weight to a queue."""
        self._left.add(weight)
        if self.first.setdefault(weight, segment) != segment:
            self.several.add(weight)

    def enters(self, parameter: nn.Parameter, segment: int) -> None:
        """Note that a parameter enters a segment, because it is used in other places, too."""
        if not segment:
            self._entering.add(parameter)
        if parameter in self.apart:
            self.several.add(parameter)

    def forget(self) -> None:
        """Forget what the block has shown: it is cut in another way from now on."""
        self.known = self.left = False
        for known in (self.first, self.several, self._entering):
            known.clear()
