"""Parts of a model under ``torch.compile``: where an engine keeps what they ask for, and where it cannot."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from inspect import getclosurevars, isfunction
from typing import Any

from torch import nn


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
        # What has compiled the call, with its backend and options.
        compile = getclosurevars(call).nonlocals.get("self") if isfunction(call) else None
        if not callable(compile):
            warnings.warn(
                f"torch.compile of {type(module).__name__} does nothing: an engine runs each of its layers by itself; "
                "allowed: layer.compile() of each",
                stacklevel=3,
            )
            continue
        for layer in layers:
            if getattr(layer, "_compiled_call_impl", None) is None:
                layer._compiled_call_impl = compile(layer._call_impl)


def leave_experts(experts: nn.Module, name: str) -> None:
    """Remove the compilation of experts whose call leaves the graph, and warn of it."""
    if getattr(experts, "_compiled_call_impl", None) is not None:
        experts._compiled_call_impl = None
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
    inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)
    return inner
