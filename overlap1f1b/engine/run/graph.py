"""Autograd graphs: their nodes, and calls of autograd without its checks in Python.

This file calls private functions of torch: the public ones check in Python what its C++ checks again, for tens of
microseconds a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

_graph: Any = torch.autograd.graph
LAST: Any = torch.autograd.function._SingleLevelFunction
"""Class whose ``apply`` is the last one in Python."""


def backward(roots: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor]) -> None:
    """Run one backward as ``torch.autograd.backward(roots, grads)`` does."""
    _graph._engine_run_backward(
        tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def edge_of(tensor: Tensor) -> GradientEdge:
    """Return ``get_gradient_edge(tensor)`` of a tensor that requires a gradient."""
    node = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    if not isinstance(node, torch._C._FunctionBase):
        return GradientEdge(node, tensor.output_nr)
    # A Python object does not keep the node of a Function alive; another node does.
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    try:
        return GradientEdge(node, tensor.output_nr, tensor.view_as(tensor).grad_fn)
    finally:
        torch._C._set_grad_enabled(before)


def apply_function(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Return ``function.apply(*args, **kwargs)``; no transform of ``torch.func`` must be active."""
    plain: Any = super(LAST, function)
    return plain.apply(*args, **kwargs)


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
