"""Megatron-Core's own MoE layers: their all-to-alls become exchanges that an engine can hide."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.engine.run.replaced import Replacement, replaced
from overlap1f1b.integrations.megatron.config import class_names
from overlap1f1b.transport import devices
from overlap1f1b.transport.calls import exchange, exchange_by

DISPATCHER = "MoEAlltoAllTokenDispatcher"
FLEX = "MoEFlexTokenDispatcher"
LIBRARIES = ("fused_dispatch", "fused_combine", "hybrid_ep_dispatch", "hybrid_ep_combine")
"""Functions of :data:`MODULE` by which the flex dispatcher calls DeepEP and HybridEP."""
METHODS = ("token_dispatch", "token_combine")
"""Methods of the dispatcher that exchange rows along "ep", and do nothing else with them."""
MODULE = "megatron.core.transformer.moe.token_dispatcher"
SHARED_EXPERTS = "megatron.core.transformer.moe.shared_experts"
SHARED_KIND = "SharedExpertMLP"
ORDER = "set_tensor_grad_fn_sequence_sr"
"""Function of :data:`SHARED_EXPERTS` that changes when autograd runs a node, by the number that tells its age."""


def dispatchers_of(model: nn.Module) -> list[Any]:
    """Return the dispatchers of a model's MoE layers whose exchanges can be hidden: all-to-all, and flex."""
    held = (getattr(module, "token_dispatcher", None) for module in model.modules())
    return [one for one in held if {DISPATCHER, FLEX}.intersection(class_names(one))]


def exchanging(dispatchers: Sequence[Any]) -> Iterator[Replacement]:
    """Yield what lets dispatchers exchange rows by :func:`exchange`: tokens and probabilities together.

    Flex dispatchers call their library by :func:`exchange_by`. Of Megatron-Core's modules only the functions by which
    they do so change, and one that orders autograd's nodes, which does nothing; else only these instances.
    """
    flex = [one for one in dispatchers if FLEX in class_names(one)]
    plain = [one for one in dispatchers if FLEX not in class_names(one)]
    for dispatcher in plain:
        for name in METHODS:
            yield vars(dispatcher), name, _collecting(getattr(dispatcher, name))
    shared = sys.modules.get(SHARED_EXPERTS)
    if plain and hasattr(shared, ORDER):
        yield vars(shared), ORDER, lambda *_: None
    module = sys.modules.get(MODULE)
    for name in LIBRARIES if flex else ():
        function = getattr(module, name, None)
        if function is not None and not isinstance(function, _ByLibrary):  # another chunk may have changed it
            yield vars(module), name, _ByLibrary(function, flex[0].tp_ep_group)


def overlapped_of(model: nn.Module) -> list[Any]:
    """Return the shared experts of a model that have a stream of their own, by ``moe_shared_expert_overlap``."""
    shared = (one for one in model.modules() if SHARED_KIND in class_names(one))
    return [one for one in shared if getattr(one, "stream", None) is not None]


def on_one_stream(shared: Iterable[Any], device: torch.device) -> Iterator[Replacement]:
    """Yield what lets shared experts compute on the current stream of a GPU.

    Memory of their own stream is safe only while one microbatch is open, and weight gradients are computed on the
    current stream.
    """
    gpu = devices.of(device)
    for one in () if gpu is None else shared:
        yield vars(one), "stream", gpu.current_stream(device)


class _ByLibrary:
    """A library's function whose call suspends a forward, with the arguments that require a gradient."""

    def __init__(self, function: Callable[..., Any], group: Any) -> None:
        self.function, self.group = function, group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, names, count = [*args, *kwargs.values()], list(kwargs), len(args)
        places = [at for at, value in enumerate(given) if isinstance(value, Tensor) and value.requires_grad]
        sent = [given[at] for at in places]
        for at in places:  # the engine alone holds these
            given[at] = None

        def call(*tensors: Tensor) -> tuple[Any, ...]:
            values = list(given)
            for at, tensor in zip(places, tensors, strict=True):
                values[at] = tensor
            returned = self.function(*values[:count], **dict(zip(names, values[count:], strict=True)))
            return returned if isinstance(returned, tuple) else (returned,)

        received = exchange_by(call, sent, self.group)
        return received if len(received) > 1 else received[0]


def _collecting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a dispatcher that makes one exchange of all its all-to-alls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls: list[tuple[Any, Tensor, Any, Any]] = []

        def collect(group: Any, rows: Tensor, receive: Any = None, send: Any = None, *_: Any, **__: Any) -> Tensor:
            calls.append((group, rows, receive, send))
            return rows

        with replaced([(vars(sys.modules[MODULE]), "all_to_all", collect)]):
            returned = method(*args, **kwargs)
        results = returned if isinstance(returned, tuple) else (returned,)
        tensors = tuple(rows for _, rows, _, _ in calls)
        if not calls or len(results) != len(calls) or any(a is not b for a, b in zip(results, tensors, strict=True)):
            kinds = ", ".join(type(result).__name__ for result in results)
            raise RuntimeError(
                f"{DISPATCHER}.{method.__name__} makes {len(calls)} all-to-alls and returns {kinds}; this version of "
                "Megatron-Core is not known: allowed: 0.16"
            )
        group, _, receive, send = calls[0]
        received = exchange(tensors, _listed(send), _listed(receive), group)
        return received if isinstance(returned, tuple) else received[0]

    return call


def _listed(sizes: Any) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]
