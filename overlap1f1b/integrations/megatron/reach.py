"""Whether a forward that is cut at its layers passes gradients by another way than the layers' arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from overlap1f1b.integrations.megatron.layers import Part


class Reach:
    """What lay behind earlier cuts of one forward, which the graph after the last one must not reach.

    A gradient that went round a cut would be lost: the part before it is walked from the tensors at the cut alone. The
    first forward is checked, node by node.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._behind: dict[int, Any] = {}  # leaves and nodes
        self._here: list[Any] = []

    def passed(self, leaves: Iterable[Tensor]) -> None:
        """Leaves of the part that runs."""
        self._here += leaves

    def leave(self, leaves: Iterable[Tensor]) -> None:
        """The part that ran ends; these were its leaves, too."""
        self._behind |= {id(part): part for part in (*self._here, *leaves)}
        self._here = []

    def check(self, outs: Sequence[Any], parts: Sequence[Part], part: int) -> None:
        """Raises ``ValueError`` if a tensor's graph reaches behind the last cut, or another part's parameters."""
        own = {id(p) for p in parts[part].held.parameters()}
        others = {id(p): name for other in parts for name, p in other.held.named_parameters() if id(p) not in own}
        seen: set[Any] = set()
        waiting: list[Any] = [out.grad_fn for out in outs if isinstance(out, Tensor) and out.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            part_of = getattr(node, "variable", node)  # a node that only adds to a leaf is the same for all layers
            if id(part_of) in self._behind or id(part_of) in others:
                what = f"parameter {others[id(part_of)]}" if id(part_of) in others else "a tensor of an earlier layer"
                way = "result" if parts[part].behind else "arguments"
                raise ValueError(
                    f"{self.name}: {what} gets a gradient from {parts[part].name} by another way than the layer's "
                    f"{way}; allowed: no such tensor, or layers=lambda chunk: [] for a chunk that is not cut"
                )
            waiting += [following for following, _ in node.next_functions if following is not None]
        self._here += [node for node in seen if not hasattr(node, "variable")]
