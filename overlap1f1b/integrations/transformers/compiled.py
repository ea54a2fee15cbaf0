"""Parts of a model under ``torch.compile``: where an engine keeps what they ask for, and where it cannot."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from inspect import getclosurevars, isfunction
from typing import Any

from torch import nn

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model with every module that ``torch.compile`` has wrapped compiled in place.

    So modules keep their names and their places.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if (inner := _in_place(child)) is not child:
                setattr(module, name, inner)
    return _in_place(model)


def pass_to_layers(model: nn.Module, prefix: str, layers: Sequence[nn.Module]) -> None:
    """Compile the layers in place of the modules around them: an engine runs each layer by itself.

    Layers that are compiled already stay as they are.
    """
    path = prefix.split(".")
    for length in range(len(path), -1, -1):  # the innermost first
        module: Any = model.get_submodule(".".join(path[:length]))
        call = getattr(module, "_compiled_call_impl", None)
        if call is None:
            continue
        module._compiled_call_impl = None
        compile = _compile_of(call)
        if compile is None:
            warnings.warn(
                f"torch.compile of {type(module).__name__} does nothing: an engine runs each of its layers by itself; "
                "allowed: layer.compile() of each",
                stacklevel=3,
            )
            continue
        for layer in layers:
            if getattr(layer, "_compiled_call_impl", None) is None:
                _set(layer, compile)


def leave_experts(experts: nn.Module, name: str) -> None:
    """Remove the compilation of experts whose call leaves the graph, and warn of it."""
    if getattr(experts, "_compiled_call_impl", None) is not None:
        _set(experts, None)
        warnings.warn(
            f"torch.compile of {name} does nothing: ranks share the experts, and their call leaves the graph; "
            "allowed: layer.compile() of the layers around them",
            stacklevel=4,
        )


def _in_place(module: Any) -> nn.Module:
    """Return the module inside torch's wrapper, compiled as the wrapper is; any other module as it is."""
    inner: Any = getattr(module, "_orig_mod", None)
    if not isinstance(inner, nn.Module) or not hasattr(module, "dynamo_ctx"):
        return module
    _set(inner, module.dynamo_ctx)
    return inner


def _set(module: Any, compile: Compile | None) -> None:
    module._compiled_call_impl = None if compile is None else compile(module._call_impl)


def _compile_of(call: Any) -> Compile | None:
    """Return what has compiled a call, with its backend and options; None if torch does not show it."""
    found = getclosurevars(call).nonlocals.get("self") if isfunction(call) else None
    return found if callable(found) else None
