"""Where in its block each parameter is used."""

from typing import Literal

from torch import nn


class ParameterUses:
    """The segments that use the parameters of a block, as its first forward has shown.

    Attributes:
        apart: Weights whose gradients layers of the block defer to a queue. At first all that may be; a whole forward
            takes out those that no layer has deferred.
        first: The first segment that uses a parameter.
        several: The parameters of ``apart`` that are used in several segments or in another way, too.
    """

    def __init__(self, apart: set[nn.Parameter], *, shares: bool = False) -> None:
        self.apart, self.shares = apart, shares
        self.first: dict[nn.Parameter, int] = {}
        self.several: set[nn.Parameter] = set()
        self._entering: set[nn.Parameter] = set()
        self._deferred: set[nn.Parameter] = set()
        self._cast: set[nn.Parameter] = set()
        self._shown: set[str] = set()

    @property
    def known(self) -> bool:
        """Whether the block has run forward."""
        return "forward" in self._shown

    def note(self, what: Literal["forward", "outside"]) -> None:
        """Note a whole forward, or the use of a tensor, with its graph, of another block or microbatch."""
        self._shown.add(what)

    @property
    def plain(self) -> bool:
        """Whether a call of the block in one graph is what its segments do.

        It is not for a weight that autocast casts once for several uses: one graph sums its gradients in that dtype.
        """
        return self._shown == {"forward"} and self._cast.isdisjoint(self.several)

    @property
    def watched(self) -> bool:
        """Whether the first segment has to be watched."""
        return self.shares or self._shown != {"forward"} or bool(self._entering)

    def settle(self) -> None:
        """Treat weights whose gradients no layer has deferred as any other parameter, from the next step on.

        Within a step the way of a gradient must not change: microbatches would be added in another order.
        """
        if not self.known or not (idle := self.apart - self._deferred):
            return
        self.first.update(dict.fromkeys(idle & self._entering, 0))
        for known in (self.apart, self.several, self._entering):
            known.difference_update(idle)

    def casts(self, parameter: nn.Parameter, *, tied: bool) -> None:
        """Note that a parameter is used under autocast; ``tied`` says that other blocks share it."""
        self._cast.add(parameter)
        if tied or (parameter in self._deferred and not self.known):
            self._shown.add("cast")

    def defers(self, weight: nn.Parameter, segment: int) -> None:
        """Note that a layer in a segment defers the gradient of its weight."""
        self._deferred.add(weight)
        if self.first.setdefault(weight, segment) != segment:
            self.several.add(weight)

    def enters(self, parameter: nn.Parameter, segment: int) -> None:
        """Note that a parameter enters a segment, because it is used in other places, too."""
        if not segment:
            self._entering.add(parameter)
        if parameter in self.apart:
            self.several.add(parameter)
