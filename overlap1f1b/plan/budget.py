"""How much all searches of one plan may schedule: nodes, not seconds, so that the same arguments give the same plan."""

from collections.abc import Callable

NODES = 400_000
"""Nodes that all searches for one plan may schedule: about a second of a processor."""


class Budget:
    """Nodes that searches may still schedule; whoever waits for the plan is told of every share.

    Args:
        nodes: Their number; None for :data:`NODES`.
        progress: Called with the share that is used up, at most once for each hundredth.
    """

    def __init__(self, nodes: int | None = None, progress: Callable[[float], None] = lambda share: None) -> None:
        self.nodes = self.left = NODES if nodes is None else nodes
        self._progress, self._told = progress, 0

    def share(self, share: float) -> float:
        """Return a share of all nodes, or what is left if that is less."""
        return max(0.0, min(share * self.nodes, self.left))

    def spend(self, nodes: float) -> None:
        """Take note of nodes that were scheduled."""
        self.left -= int(nodes)
        told = 100 * (self.nodes - self.left) // max(1, self.nodes)
        if told > self._told:
            self._told = told
            self._progress(min(1.0, told / 100))
