"""Finds a model's experts and its decoder layers by what they are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from overlap1f1b.moe import Experts

LOOKED_FOR = "a module called with (tokens, indices, weights) whose parameters have a part for each expert"


class Found(NamedTuple):
    """Where the parts of a model are.

    Args:
        owner: The module whose child the layers are, and which calls them.
        attribute: Name of that child.
        prefix: Name of the layers' list in the model, such as ``model.layers``.
        layers: In order.
        experts: By their names in the model, with how many there are.
    """

    owner: nn.Module
    attribute: str
    prefix: str
    layers: list[nn.Module]
    experts: dict[str, tuple[nn.Module, int]]


def find(model: nn.Module) -> Found:
    """The decoder layers and experts of a causal LM.

    Raises:
        ValueError: An encoder-decoder, a quantised, a split or a dense model, or one whose experts or layers are not
            recognised; the message says what was looked for and what was found.
    """
    _refuse(model)
    experts = {name: (module, count) for name, module in model.named_modules() if (count := _count(module))}
    if not experts:
        raise ValueError(f"{type(model).__name__}: looked for {LOOKED_FOR}; found {_instead(model)}")
    holders = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and all(expert.startswith(f"{name}.") for expert in experts)
    ]
    if not holders:
        raise ValueError(
            f"{type(model).__name__}: looked for one ModuleList whose elements hold all experts; "
            f"found experts at {_some(list(experts))}"
        )
    prefix, layers = holders[0]
    parent, _, attribute = prefix.rpartition(".")
    return Found(model.get_submodule(parent), attribute, prefix, list(layers), experts)


def _refuse(model: nn.Module) -> None:
    kind, config = type(model).__name__, getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder model; allowed: a causal LM, whose layers form one chain")
    if any(isinstance(module, Experts) for module in model.modules()):
        raise ValueError(
            f"{kind} has been split before, or has experts of this library; allowed: a model as it was built"
        )
    if (quantised := _quantised(model)) is not None:
        raise ValueError(f"{kind} has quantised weights ({quantised}); allowed: floating-point weights, which train")


def _quantised(model: nn.Module) -> str | None:
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        return type(quantizer).__name__
    narrow = [name for name, p in model.named_parameters() if not p.is_floating_point() or p.dtype.itemsize < 2]
    return f"{narrow[0]} of {str(model.get_parameter(narrow[0]).dtype)[6:]}" if narrow else None


def routing_names(module: nn.Module) -> tuple[str, str, str] | None:
    """Names of what a module's forward takes, where they are (tokens, indices, weights); else None."""
    named = _arguments(module)
    if len(named) != 3:
        return None
    tokens, indices, weights = named
    if not ("ind" in indices or "expert" in indices) or not ("weight" in weights or "score" in weights):
        return None
    return tokens, indices, weights


def _count(module: nn.Module) -> int:
    """How many experts a module holds; 0 for one that holds none."""
    sizes = {p.shape[0] for p in module.parameters() if p.dim()}
    if not sizes or routing_names(module) is None:
        return 0
    if any(p.dim() > 2 for p in module.parameters()):
        return max(sizes)
    named = {value for m in module.modules() for _, value in counters(m)}
    dividing = [value for value in named if value > 1 and all(size % value == 0 for size in sizes)]
    return max(dividing, default=max(sizes))


def counters(module: nn.Module) -> Iterator[tuple[str, int]]:
    """A module's own numbers of experts, by the names of its attributes."""
    for name, value in vars(module).items():
        if type(value) is int and "expert" in name:
            yield name, value


def _arguments(module: nn.Module) -> list[str]:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def _instead(model: nn.Module) -> str:
    """What comes near, for a message."""
    near: dict[str, None] = {}
    for module in model.modules():
        stacked = any(p.dim() > 2 for p in module.parameters(recurse=False))
        if not isinstance(module, _CONVOLUTIONS) and (stacked or "experts" in type(module).__name__.lower()):
            near[f"{type(module).__name__}({', '.join(_arguments(module))})"] = None
    return f"{_some(list(near))} instead" if near else "no weights that are stacked by expert: a dense model?"


_CONVOLUTIONS = nn.modules.conv._ConvNd


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def wraps(module: nn.Module) -> bool:
    """Whether a module adds weights to one that it holds, or to itself, as the adapters of PEFT do."""
    held = (getattr(module, name, None) for name in ("base_layer", "original_module"))
    names = (*module._parameters, *module._modules)
    added = any(name.startswith("lora_") for name in names) or parametrize.is_parametrized(module)
    return added or any(isinstance(inner, nn.Module) for inner in held)


def adapter_in(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The first adapter of a model, by its name; the model itself, where PEFT holds it."""
    for name, module in model.named_modules():
        if wraps(module) or any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__):
            return name, module
    return None


def adapter_around(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """The outermost adapter around a module of a model, or else the first inside it, by its name."""
    path = name.split(".")
    for length in range(len(path)):
        outer = ".".join(path[:length])
        if wraps(module := model.get_submodule(outer)):
            return outer, module
    for inner, module in model.get_submodule(name).named_modules(prefix=name):
        if wraps(module):
            return inner, module
    return None


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Tensors anywhere in what a layer is called with."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
