"""Autograd graphs: their nodes, and calls of autograd without its checks in Python.

This file calls private functions of torch: the public ones check in Python what its C++ checks again, for tens of
microseconds a call.
"""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from overlap1f1b.transport.functions import plain_apply
from overlap1f1b.transport.suspension import uncompiled

_C: Any = torch._C
_autograd: Any = _C._autograd
_graph: Any = torch.autograd.graph
_engine: Any = torch.autograd.Variable._execution_engine
_functions: Any = torch.autograd.function
_Function, _grad_enabled, _set_grad_enabled = _C._FunctionBase, torch.is_grad_enabled, _C._set_grad_enabled
LAST: Any = _functions._SingleLevelFunction
"""Class whose ``apply`` is C++, below the one of ``Function``; from torch 2.14 on both have the same."""


def backward(roots: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor]) -> None:
    """Run one backward as ``torch.autograd.backward(roots, grads)`` does."""
    # Around it torch hands context variables to the threads of devices; a CPU has none.
    run = _engine.run_backward if grads[0].is_cpu else _graph._engine_run_backward
    run(tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


ASKS: ContextVar[bool] = ContextVar("ASKS", default=False)
"""Whether a ``torch.autograd.grad`` inside a backward asks for weights to which no edge leads."""


def asks_for(weight: Parameter, node: Any) -> bool:
    """Return whether the walk that runs asks for a weight's gradient, by a node whose last input is an anchor.

    A walk to every leaf asks for all weights. ``torch.autograd.grad`` goes on to the tensors that it is given alone.
    """
    return weight.requires_grad and (torch._C._will_engine_execute_node(node.next_functions[-1][0]) or ASKS.get())


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.to(dtype)``, without a call of torch if it has the dtype."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def edge_of(tensor: Tensor) -> GradientEdge:
    """Return ``get_gradient_edge(tensor)`` of a tensor that requires a gradient."""
    node = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    if not isinstance(node, _Function):
        return GradientEdge(node, tensor.output_nr)
    # A Python object does not keep the node of a Function alive; another node does.
    before = _grad_enabled()
    _set_grad_enabled(True)
    try:
        return GradientEdge(node, tensor.output_nr, tensor.view_as(tensor).grad_fn)
    finally:
        _set_grad_enabled(before)


def applying(apply: Callable[..., Any]) -> Callable[[], None]:
    """Have Functions call ``apply(function, *args, **kwargs)`` in place of C++; return what changes them back.

    With a ``setup_context`` all arguments come by position, defaults too; under ``torch.func``, what its transforms
    make. From torch 2.14 on it is passed by where ``MyFunction.apply`` was given another name: that is C++ itself.
    """
    public: Any = torch.autograd.Function
    plain = torch._C._FunctionBase.__dict__["apply"]
    direct = public.__dict__.get("apply", plain) is plain  # torch 2.14

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, public):
            if torch._C._are_functorch_transforms_active():
                return plain_apply(cls)(*args, **kwargs)
            if _functions._is_setup_context_defined(cls.setup_context):
                args, kwargs = _functions._bind_default_args(cls.forward, args, kwargs)
        return apply(cls, *args, **kwargs)

    def back() -> None:
        if direct:
            public.apply = plain
        del LAST.apply

    LAST.apply = classmethod(uncompiled(call if direct else apply))
    if "apply" in public.__dict__ and direct:
        del public.apply
    return back


next_sequence_number: Callable[[], int] = _autograd._get_sequence_nr
"""Returns the number of the autograd node that this thread makes next."""


def nodes_behind(ends: Iterable[Any]) -> list[Any]:
    """Return these autograd nodes and all before them, depth first; a leaf's node has its ``variable``."""
    seen: dict[Any, None] = {}
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += [following for following, _ in node.next_functions if following is not None]
    return list(seen)


def is_walked_often(node: Any) -> bool:
    """Return whether a graph can be walked any number of times: it saves nothing and leads to leaves alone.

    So do casts, views and sums of weights, as autocast and ``parametrize.cached`` keep them for several microbatches.
    """
    for one in nodes_behind([node]):
        if hasattr(one, "variable"):
            continue
        saves = isinstance(one, torch._C._FunctionBase) or any(name.startswith("_raw_saved") for name in dir(one))
        if saves or all(following is None for following, _ in one.next_functions):
            return False
    return True
