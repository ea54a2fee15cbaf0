"""The nodes of an autograd graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def graph_nodes(outputs: Iterable[Tensor]) -> list[Any]:
    """Return all autograd nodes of the graph of these tensors, depth first; a leaf's node has its ``variable``."""
    return nodes_behind(output.grad_fn for output in outputs if output.grad_fn is not None)


def nodes_behind(ends: Iterable[Any]) -> list[Any]:
    """Return these autograd nodes and all before them, depth first."""
    seen: dict[Any, None] = {}
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += [following for following, _ in node.next_functions if following is not None]
    return list(seen)
