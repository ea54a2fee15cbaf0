"""Which modules of a chunk become blocks of their own, and what else each block holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from overlap1f1b.moe import Experts

Layers = Callable[[nn.Module], Sequence[nn.Module]]
"""The layers of a chunk, in the order in which its forward calls them."""


def default_layers(chunk: nn.Module) -> Sequence[nn.Module]:
    """The children of an ``nn.Sequential``; else ``chunk.layers``, or ``chunk.decoder.layers``; else none.

    A chunk is looked for through ``.module``, as far as something wraps it.
    """
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    if type(chunk).forward is nn.Sequential.forward:
        return list(chunk.children())
    for owner in (chunk, getattr(chunk, "decoder", None)):
        layers = getattr(owner, "layers", None)
        if isinstance(layers, nn.ModuleList | nn.Sequential):
            return list(layers)
    return []


def held_by(chunk: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """For each layer a module that holds it and its share of what lies outside all layers.

    Modules that are registered after the layers are taken to run after them and go with the last. Of the others that
    is not known, so they go with the first and the last: a parameter of both is complete with the first's backward.
    Without at least two layers the chunk is one block.

    Raises:
        ValueError: A layer that is not in the chunk, or twice.
    """
    if len(layers) < 2:
        return [chunk]
    every = set(chunk.modules())
    for layer in layers:
        if layer not in every or list(layers).count(layer) > 1:
            where = "twice" if layer in every else "not at all"
            raise ValueError(f"a layer of type {type(layer).__name__} is {where} in the chunk; allowed: once each")
    parts: list[list[nn.Module]] = [[layer] for layer in layers]
    direct: list[nn.Parameter] = []
    reached = False

    def visit(module: nn.Module) -> None:
        nonlocal reached
        if module in layers:
            reached = True
        elif not any(inner in layers for inner in module.modules()):
            parts[-1].append(module)
            if not reached:
                parts[0].append(module)
        else:
            direct.extend(module.parameters(recurse=False))
            for child in module.children():
                visit(child)

    visit(chunk)
    if any(isinstance(inner, Experts) for module in parts[0][1:] for inner in module.modules()):
        raise ValueError("Experts before the layers of a chunk; allowed: in a layer, or layers=lambda chunk: []")
    holders: list[nn.Module] = [nn.ModuleList(part) for part in parts]
    for holder in (holders[0], holders[-1]):
        holder.register_module("direct", nn.ParameterList(direct))
    return holders
