"""Megatron-Core's own MoE layers: their all-to-alls become exchanges that an engine can hide."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from overlap1f1b.transport.calls import exchange

DISPATCHER = "MoEAlltoAllTokenDispatcher"
METHODS = ("token_dispatch", "token_combine")
"""Methods of the dispatcher that exchange rows along "ep", and do nothing else with them."""
MODULE = "megatron.core.transformer.moe.token_dispatcher"
SHARED_EXPERTS = "megatron.core.transformer.moe.shared_experts"
ORDER = "set_tensor_grad_fn_sequence_sr"
"""Function of :data:`SHARED_EXPERTS` that changes when autograd runs a node, by the number that tells its age."""


def dispatchers_of(model: nn.Module) -> list[Any]:
    """Return the all-to-all dispatchers of a model's MoE layers."""
    held = (getattr(module, "token_dispatcher", None) for module in model.modules())
    return [one for one in held if any(kind.__name__ == DISPATCHER for kind in type(one).__mro__)]


@contextmanager
def exchanging(dispatchers: Iterable[Any]) -> Iterator[None]:
    """Let dispatchers exchange rows by :func:`exchange` inside the context: tokens and probabilities together.

    Only attributes of these instances change, and one function that orders autograd's nodes does nothing.
    """
    changed = list(dispatchers)
    shared: Any = sys.modules.get(SHARED_EXPERTS) if changed else None
    order = getattr(shared, ORDER, None)
    for dispatcher in changed:
        for name in METHODS:
            setattr(dispatcher, name, _collecting(getattr(dispatcher, name)))
    if order is not None:
        setattr(shared, ORDER, lambda *_: None)
    try:
        yield
    finally:
        for dispatcher in changed:
            for name in METHODS:
                delattr(dispatcher, name)
        if order is not None:
            setattr(shared, ORDER, order)


def _collecting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a dispatcher that makes one exchange of all its all-to-alls."""
    module: Any = sys.modules[MODULE]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls: list[tuple[Any, Tensor, Any, Any]] = []

        def collect(group: Any, rows: Tensor, receive: Any = None, send: Any = None, *_: Any, **__: Any) -> Tensor:
            calls.append((group, rows, receive, send))
            return rows

        plain = module.all_to_all
        module.all_to_all = collect
        try:
            returned = method(*args, **kwargs)
        finally:
            module.all_to_all = plain
        results = returned if isinstance(returned, tuple) else (returned,)
        tensors = tuple(rows for _, rows, _, _ in calls)
        if not calls or len(results) != len(calls) or any(a is not b for a, b in zip(results, tensors, strict=True)):
            kinds = ", ".join(type(result).__name__ for result in results)
            raise RuntimeError(
                f"{DISPATCHER}.{method.__name__} makes {len(calls)} all-to-alls and returns {kinds}; this version of "
                "Megatron-Core is not known: allowed: 0.16"
            )
        group, _, receive, send = calls[0]
        brought = exchange(tensors, _listed(send), _listed(receive), group)
        return brought if isinstance(returned, tuple) else brought[0]

    return call


def _listed(sizes: Any) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]
