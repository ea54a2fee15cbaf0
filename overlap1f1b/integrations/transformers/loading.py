"""Reads this rank's part of a folder of pretrained weights, and no more of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.integrations.transformers.conversion import Conversion
from overlap1f1b.integrations.transformers.saving import INDEX, shares

SINGLE = "model.safetensors"

Source = tuple[str, str | None, Any]
"""Key in a checkpoint, pattern of the rule that it falls under, and the tensor, which is read when it is sliced."""


def load_stages(folder: Path, model: Any, stages: Collection[nn.Module], device: torch.device) -> None:
    """Fills stages from a folder in safetensors' format.

    Only tensors of these stages are read, and of experts the part of this rank. Where a checkpoint is laid out in
    another way than the model, transformers' own conversion is applied to the part; what it cannot make of a part is
    read whole and cut.

    Args:
        folder: With ``model.safetensors.index.json`` or ``model.safetensors``.
        model: That was split.
        stages: Of this rank.
        device: For tensors that are on the meta device.

    Raises:
        ValueError: The folder has neither file, lacks a tensor, or has one of another shape.
    """
    from safetensors import safe_open

    places = [place for stage in stages for place in _places(stage)]
    wanted: dict[str, list[_Place]] = {}  # a rank may hold both ends of a tie
    for place in places:
        for name in place.names:
            wanted.setdefault(name, []).append(place)
    files, conversion = _files(folder), Conversion(model)
    keys: dict[str, list[tuple[str, str | None]]] = {}
    for key in conversion.ordered(files):
        name, pattern = conversion.target(key)
        if name in wanted:
            keys.setdefault(name, []).append((key, pattern))
    filled: set[int] = set()
    with ExitStack() as stack:
        used = sorted({files[key] for parts in keys.values() for key, _ in parts})
        opened = {file: stack.enter_context(safe_open(folder / file, framework="pt")) for file in used}
        for first, parts in keys.items():
            sources = [(key, pattern, opened[files[key]].get_slice(key)) for key, pattern in parts]
            for name, value in _read(conversion, first, sources, wanted).items():
                for place in wanted.get(name, ()):
                    if value.shape != place.value.shape:
                        raise ValueError(
                            f"{folder} has {name} of shape {list(value.shape)} for this rank; "
                            f"allowed: {list(place.value.shape)}"
                        )
                    # Of what is tied the first name counts, whichever a checkpoint has.
                    if id(place) not in filled or name == place.names[0]:
                        place.fill(value, device)
                        filled.add(id(place))
    missing = [place.names[0] for place in places if id(place) not in filled]
    if missing:
        raise ValueError(f"{folder} has nothing for {missing[0]}; allowed: a folder with every tensor of the model")
    conversion.remember()
    _fill_buffers(model, stages, device)


@dataclass(eq=False)
class _Place:
    """A tensor of a stage: its names in the model, what holds it, and its stage's tied parameters."""

    names: list[str]
    holders: list[tuple[nn.Module, str]]
    tied: dict[str, nn.Parameter]
    rank: int
    ranks: int

    @property
    def value(self) -> Tensor:
        module, label = self.holders[0]
        value: Tensor = getattr(module, label)
        return value

    def cut(self, value: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        return value if self.ranks == 1 or value.shape == self.value.shape else value.chunk(self.ranks)[self.rank]

    @torch.no_grad()
    def fill(self, value: Tensor, device: torch.device) -> None:
        old = self.value
        if not old.is_meta:
            old.copy_(value)
            return
        new = value.to(device, old.dtype, copy=True, memory_format=torch.contiguous_format)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
            self.tied |= {name: new for name, parameter in self.tied.items() if parameter is old}
        for module, label in self.holders:
            setattr(module, label, new)


def _places(stage: nn.Module) -> Iterator[_Place]:
    shared, tied = shares(stage), stage.__dict__["tied"]
    modules = dict(stage.named_modules(remove_duplicate=False))
    places: dict[int, _Place] = {}
    for name in stage.state_dict():
        path, _, label = name.rpartition(".")
        value = getattr(modules[path], label)
        if id(value) not in places:
            exchange = shared[name].exchange if name in shared else None
            rank, ranks = (exchange.rank, exchange.ranks) if exchange else (0, 1)
            elsewhere = [other for other, parameter in tied.items() if parameter is value and other != name]
            places[id(value)] = _Place(elsewhere, [], tied, rank, ranks)
        places[id(value)].names.append(name)
        places[id(value)].holders.append((modules[path], label))
    yield from places.values()


def _read(
    conversion: Conversion, first: str, sources: Sequence[Source], wanted: Mapping[str, Sequence[_Place]]
) -> Mapping[str, Tensor]:
    """The tensors that a checkpoint's make, this rank's part of each."""
    parts = _parts(sources, wanted[first][0])
    if parts is not None:
        # Tried without data: what gives tensors of this rank's shapes can be made of its part.
        made = conversion.convert(first, [(key, pattern, _meta(t, rows)) for key, pattern, t, rows in parts])
        if all(name not in wanted or value.shape == wanted[name][0].value.shape for name, value in made.items()):
            return conversion.convert(first, [(key, pattern, t[rows]) for key, pattern, t, rows in parts])
    whole = conversion.convert(first, [(key, pattern, t[...]) for key, pattern, t in sources])
    return {name: wanted[name][0].cut(value) if name in wanted else value for name, value in whole.items()}


def _parts(sources: Sequence[Source], place: _Place) -> list[tuple[str, str | None, Any, Any]] | None:
    """A rank's experts among tensors of one each, or its rows of tensors that hold all; None where it is neither."""
    if place.ranks == 1:
        return None
    by_pattern: dict[str | None, list[Source]] = {}
    for source in sources:
        by_pattern.setdefault(source[1], []).append(source)
    parts: list[tuple[str, str | None, Any, Any]] = []
    rows = place.value.shape[0]
    for alike in by_pattern.values():
        if len(alike) > 1:
            share, rest = divmod(len(alike), place.ranks)
            if rest:
                return None
            parts += [(*source, ...) for source in alike[place.rank * share : (place.rank + 1) * share]]
        elif alike[0][2].get_shape()[:1] == [rows * place.ranks]:
            parts.append((*alike[0], slice(place.rank * rows, (place.rank + 1) * rows)))
        else:
            return None
    return parts


def _meta(tensor: Any, rows: Any) -> Tensor:
    return torch.empty(tensor.get_shape(), device="meta")[rows]


def _files(folder: Path) -> dict[str, str]:
    """The file that holds each tensor of a folder."""
    from safetensors import safe_open

    if (folder / INDEX).exists():
        files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        absent = sorted({file for file in files.values() if not (folder / file).exists()})
        if absent:
            raise ValueError(f"{folder}: looked for {absent[0]}, which {INDEX} names; found none")
        return files
    if (folder / SINGLE).exists():
        with safe_open(folder / SINGLE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), SINGLE)
    raise ValueError(f"{folder}: looked for {INDEX} or {SINGLE}; found neither")


@torch.no_grad()
def _fill_buffers(model: Any, stages: Collection[nn.Module], device: torch.device) -> None:
    """Has the model compute what is on the meta device and in no checkpoint, such as rotary frequencies."""
    kept = {id(module) for stage in stages for module in stage.__dict__["kept"].values()}
    absent: set[int] = set()
    for stage in stages:
        shell = stage.__dict__["place"].shell
        for part in (*shell.layers, *shell.around.before.values(), *shell.around.after.values()):
            if id(part) not in kept:
                absent |= {id(module) for module in part.modules()}
    for name, module in model.named_modules():
        labels = [label for label, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if id(module) in absent or not labels:
            continue
        for value in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            value._is_hf_initialized = True  # what transformers then leaves as it is
        for label in labels:
            module._buffers[label] = torch.empty_like(getattr(module, label), device=device)
        _initializer(model, name)(module)


def _initializer(model: Any, name: str) -> Callable[[nn.Module], None]:
    """Of the model that a module is part of: models may be parts of others."""
    while name:
        name = name.rpartition(".")[0]
        own = getattr(model.get_submodule(name), "_init_weights", None)
        if own is not None:
            return own
    return lambda module: None
