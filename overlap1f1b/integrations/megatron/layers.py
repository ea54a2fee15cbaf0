"""Which modules of a chunk become blocks of their own, and what else each block holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from overlap1f1b.integrations.megatron.config import found
from overlap1f1b.moe import Experts

Layers = Callable[[nn.Module], Sequence[nn.Module]]
"""The layers of a chunk, in the order in which its forward calls them."""


def default_layers(chunk: nn.Module) -> Sequence[nn.Module]:
    """The children of an ``nn.Sequential``; else ``chunk.layers``, or ``chunk.decoder.layers``; else none.

    A chunk is looked for through ``.module``, as far as something wraps it. None also where its config has layers run
    inside a checkpoint that nothing can cut: ``recompute_granularity="full"``, or any with layers of MTP, whose
    embedding and output layer are those of the rest.
    """
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    config = found(chunk, "config")
    recomputes = getattr(config, "recompute_granularity", None)
    if recomputes == "full" or (recomputes is not None and getattr(config, "mtp_num_layers", None)):
        return []
    if type(chunk).forward is nn.Sequential.forward:
        return list(chunk.children())
    for owner in (chunk, getattr(chunk, "decoder", None)):
        layers = getattr(owner, "layers", None)
        if isinstance(layers, nn.ModuleList | nn.Sequential):
            return list(layers)
    return []


class Part(NamedTuple):
    """A part of a chunk's forward.

    Args:
        name: For messages.
        held: A module that holds the part's modules.
        cut: The layer where it begins; None where the forward does.
        behind: Whether it begins behind that layer.
    """

    name: str
    held: nn.Module
    cut: nn.Module | None = None
    behind: bool = False


def parts_of(chunk: nn.Module, layers: Sequence[nn.Module], *, ends: bool) -> list[Part]:
    """The parts of a chunk that is cut at its layers; without any it is one part.

    A layer is a part of its own. What runs before the first is one where it has parameters, what runs behind the last
    where it has or where the model ``ends`` there: a head and a loss are so walked once, not once for each call of
    experts before them. Modules that are registered after the layers are taken to run after them. Of the others that is
    not known, so they go to both sides: a parameter of both is complete with the first part's backward.

    Raises:
        ValueError: A layer that is not in the chunk, or twice; experts before the layers.
    """
    if not layers:
        return [Part("it", chunk)]
    every = set(chunk.modules())
    for layer in layers:
        if layer not in every or list(layers).count(layer) > 1:
            where = "twice" if layer in every else "not at all"
            raise ValueError(f"a layer of type {type(layer).__name__} is {where} in the chunk; allowed: once each")
    before: list[nn.Module] = []
    behind: list[nn.Module] = []
    direct: list[nn.Parameter] = []
    reached = False

    def visit(module: nn.Module) -> None:
        nonlocal reached
        if module in layers:
            reached = True
        elif not any(inner in layers for inner in module.modules()):
            behind.append(module)
            if not reached:
                before.append(module)
        else:
            direct.extend(module.parameters(recurse=False))
            for child in module.children():
                visit(child)

    visit(chunk)
    if any(isinstance(inner, Experts) for module in before for inner in module.modules()):
        raise ValueError("Experts before the layers of a chunk; allowed: in a layer, or layers=lambda chunk: []")
    parts = [Part(f"layer {number}", layer, layer) for number, layer in enumerate(layers)]
    head, tail = (nn.ModuleList([*modules, nn.ParameterList(direct)]) for modules in (before, behind))
    if any(True for _ in head.parameters()):
        parts.insert(0, Part("what precedes layer 0", head))
    else:
        parts[0] = parts[0]._replace(cut=None)
    if ends or any(True for _ in tail.parameters()):
        parts.append(Part(f"what follows layer {len(layers) - 1}", tail, layers[-1], behind=True))
    return parts
