"""Folders of pretrained weights: a rank reads its part, and the ranks write a folder that ``from_pretrained`` opens.

A checkpoint may have another layout than the model. transformers' own rules convert it, in both directions.
"""

import json
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.checkpoint.tensors import plain_values
from overlap1f1b.integrations.transformers.adapters import adapter_keys, base_of, by_expert, name_in_base
from overlap1f1b.integrations.transformers.parameters import in_place_of
from overlap1f1b.integrations.transformers.stage import LanguageModelStage
from overlap1f1b.moe import Experts

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""File names of weights, as transformers writes them."""
FILE = "model-{:05d}-of-{:05d}.safetensors"
"""File of a stage, by its number from 1, and the number of stages."""
PART = ".adapter-part-{:05d}.safetensors"
FACTOR = re.compile(r"(.+)\.lora_(?:embedding_)?[AB]\.([^.]+)(?:\.weight)?")
"""Name of a LoRA factor: its layer, and its adapter."""


class _Source(NamedTuple):
    """A tensor of a checkpoint."""

    key: str
    pattern: str | None  # of the rule that converts it; None if the model has the same tensor
    tensor: Any  # a slice of safetensors, read when it is indexed; or a tensor
    rows: slice | EllipsisType = ...


class Conversion:
    """transformers' rules that make a model's tensors from a checkpoint's; their names leave adapters out.

    >>> name, pattern = conversion.target("model.layers.0.mlp.experts.3.up_proj.weight")
    >>> name  # the first of the model's tensors that contain it
    'model.layers.0.mlp.experts.gate_up_proj'
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        base = base_of(model)
        self._model, self._prefix = base, getattr(base, "base_model_prefix", "")
        state = type(base).state_dict(base)  # its own may refuse: it is a part
        named = ((name_in_base(base, name), value) for name, value in state.items())
        self._names = {name: value for name, value in named if name is not None}
        self._rules = get_model_conversion_mapping(base)
        self._renamings = [rule for rule in self._rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in self._rules if isinstance(rule, WeightConverter)]

    def target(self, key: str) -> tuple[str, str | None]:
        """Return the first of the model's tensors that contain a checkpoint's, and the pattern of the rule for it."""
        from transformers.core_model_loading import rename_source_key

        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._names)
        if name not in self._names and key in self._names:
            return key, None  # the checkpoint has the model's layout
        return name, pattern

    def convert(self, name: str, sources: Sequence[_Source]) -> Mapping[str, Tensor]:
        """Read the sources, which must be in order, and return the model's tensors that are made from them."""
        if (pattern := sources[0].pattern) is None:
            return {name: sources[0].tensor[sources[0].rows]}
        rule: Any = deepcopy(next(rule for rule in self._converters if pattern in rule.source_patterns))
        for source in sources:
            rule.add_tensor(name, source.key, source.pattern, source.tensor[source.rows])
        made = rule.convert(name, model=self, config=self._model.config)
        return {label: value[0] if isinstance(value, list) else value for label, value in made.items()}

    def get_parameter(self, name: str) -> Tensor:
        """Return a parameter whose size a rule asks for."""
        return self._names[name]

    def remember(self) -> None:
        """Record the used rules in the model, for the conversion back, as ``from_pretrained`` does."""
        self._model._weight_conversions = [rule for rule in self._rules if rule.was_used()]


# -------------------------------------------------------------------------------------------------- tensors of a stage


@dataclass(eq=False)
class _Slot:
    """A tensor of a stage: its names in the model, the modules that hold it, and this rank's part of it."""

    names: list[str]
    elsewhere: list[str]  # its names in the stage that ties it, too
    holders: list[tuple[nn.Module, str]]
    tied: dict[str, nn.Parameter]
    group: dist.ProcessGroup | None  # of the ranks that share it
    rank: int  # in this group
    ranks: int
    experts: int  # of this rank in a second factor of LoRA; of other tensors 0

    @property
    def value(self) -> Any:
        return getattr(*self.holders[0])

    def cut(self, value: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor; of LoRA's second factors the columns of its experts."""
        if self.ranks == 1 or value.shape == self.value.shape:
            return value
        parts = by_expert(value, self.experts * self.ranks).chunk(self.ranks)
        return by_expert(parts[self.rank], self.experts, back=True)

    def joined(self) -> Tensor:
        """Return the whole tensor. Collective over the ranks that share it."""
        value = plain_values(self.value.detach(), self.names[0])
        if self.ranks == 1:
            return value
        mine = by_expert(value, self.experts).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(parts, mine, group=self.group)
        return by_expert(torch.cat(parts), self.experts, back=True)

    @torch.no_grad()
    def fill(self, value: Tensor, device: torch.device, source: str = "") -> None:
        """Set the values; ``source`` says in an error's message where they come from."""
        old = self.value
        if value.shape != old.shape:
            raise ValueError(f"{source} of shape {list(value.shape)} for this rank; allowed: {list(old.shape)}")
        if not old.is_meta:
            old.copy_(value)
            return
        new = torch.empty_like(old.detach(), device=device, memory_format=torch.contiguous_format).copy_(value)
        if type(new) is not type(old.detach()):
            raise ValueError(
                f"{source} for a {type(old).__name__} on the meta device, which loses its class on {device}; allowed: "
                "a model with values, converted before split_model"
            )
        if isinstance(old, nn.Parameter):
            new = in_place_of(old, new, self.names[0])
            self.tied |= {name: new for name, parameter in self.tied.items() if parameter is old}
        self.put(new)

    def put(self, value: Tensor) -> None:
        """Replace the tensor in all modules that hold it."""
        for module, label in self.holders:
            setattr(module, label, value)


def _slots(stage: LanguageModelStage) -> list[_Slot]:
    """Return the tensors of a stage, each once, in the order of its state dict."""
    modules = dict(stage.named_modules(remove_duplicate=False))
    shared = {
        f"{path}.{label}": module
        for path, module in stage.named_modules()
        if isinstance(module, Experts) and module.group is not None
        for label, _ in module.named_parameters()
    }
    slots: dict[int, _Slot] = {}
    for name, value in stage.state_dict(keep_vars=True).items():
        path, _, label = name.rpartition(".")
        if not hasattr(modules[path], label):  # what a module's get_extra_state returns
            continue
        if id(value) not in slots:
            elsewhere = [other for other, parameter in stage.tied.items() if parameter is value and other != name]
            owner, experts = shared.get(name), stage.columns.get(name, 0)
            at = (None, 0, 1) if owner is None else (owner.group, owner.exchange.rank, owner.exchange.ranks)
            slots[id(value)] = _Slot([], elsewhere, [], stage.tied, *at, experts)
        slots[id(value)].names.append(name)
        slots[id(value)].holders.append((modules[path], label))
    return list(slots.values())


# ------------------------------------------------------------------------------------------------------------- loading


def load_stages(folder: Path, model: Any, stages: Collection[LanguageModelStage], device: torch.device) -> None:
    """Fill stages from a folder in safetensors' format; tensors that are on the meta device come to ``device``.

    Only this rank's part is read. If the checkpoint has another layout than the model, transformers' conversion is
    applied to the part; if that is not possible, the tensors are read whole, converted, and cut. Adapters keep their
    tensors; LoRA's factors that are on the meta device begin as PEFT's new ones.
    """
    from safetensors import safe_open
    from transformers.core_model_loading import dot_natural_key

    # 1. Find the keys that this rank needs.
    wanted: dict[str, list[_Slot]] = {}  # several slots have one name if the rank holds both ends of a tie
    added: dict[str, _Slot] = {}
    for slot in (slot for stage in stages for slot in _slots(stage)):
        named = [name for own in (*slot.elsewhere, *slot.names) if (name := name_in_base(model, own)) is not None]
        if not named:
            added[slot.names[0]] = slot
            continue
        slot.names = named
        for name in named:
            wanted.setdefault(name, []).append(slot)
    files, conversion = _files(folder), Conversion(model)
    keys: dict[str, list[tuple[str, str | None]]] = {}
    for key in sorted(files, key=dot_natural_key):  # rules expect experts in the order of their numbers
        name, pattern = conversion.target(key)
        if name in wanted:
            keys.setdefault(name, []).append((key, pattern))
    # 2. Read them.
    filled: set[int] = set()
    with ExitStack() as stack:
        used = sorted({files[key] for parts in keys.values() for key, _ in parts})
        opened = {file: stack.enter_context(safe_open(folder / file, framework="pt")) for file in used}
        for first, parts in keys.items():
            sources = [_Source(key, pattern, opened[files[key]].get_slice(key)) for key, pattern in parts]
            for name, value in _read(conversion, first, sources, wanted).items():
                for slot in wanted.get(name, ()):
                    # A checkpoint may have a tied tensor under several names; the first one counts.
                    if id(slot) not in filled or name == slot.names[0]:
                        slot.fill(value, device, f"{folder} has {name}")
                        filled.add(id(slot))
    missing = [slot.names[0] for slots in wanted.values() for slot in slots if id(slot) not in filled]
    if missing:
        raise ValueError(f"{folder} has nothing for {missing[0]}; allowed: a folder with every tensor of the model")
    conversion.remember()
    # 3. Compute the tensors that no checkpoint has.
    _fill_buffers(model, stages, device)
    _begin_adapters(model, added, device)


def _read(
    conversion: Conversion, first: str, sources: Sequence[_Source], wanted: Mapping[str, Sequence[_Slot]]
) -> Mapping[str, Tensor]:
    """Return this rank's part of the model's tensors that are made from the sources."""
    if (parts := _parts(sources, wanted[first][0])) is not None:
        made = conversion.convert(first, parts)
        if all(name not in wanted or value.shape == wanted[name][0].value.shape for name, value in made.items()):
            return made  # with the right shapes this rank's part of the sources is enough
    whole = conversion.convert(first, sources)
    return {name: wanted[name][0].cut(value) if name in wanted else value for name, value in whole.items()}


def _parts(sources: Sequence[_Source], slot: _Slot) -> list[_Source] | None:
    """Return this rank's part of the sources, by expert or by rows; None if they are not shared or divide otherwise."""
    if slot.ranks == 1:
        return None
    parts: list[_Source] = []
    rows = slot.value.shape[0]
    for pattern in dict.fromkeys(source.pattern for source in sources):
        alike = [source for source in sources if source.pattern == pattern]
        if len(alike) > 1:
            share, rest = divmod(len(alike), slot.ranks)
            if rest:
                return None
            parts += alike[slot.rank * share : (slot.rank + 1) * share]
        elif alike[0].tensor.get_shape()[:1] == [rows * slot.ranks]:
            parts.append(alike[0]._replace(rows=slice(slot.rank * rows, (slot.rank + 1) * rows)))
        else:
            return None
    return parts


def _files(folder: Path) -> dict[str, str]:
    """Return the file of each parameter's name in a folder of safetensors."""
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
def _fill_buffers(model: Any, stages: Collection[LanguageModelStage], device: torch.device) -> None:
    """Let the model compute meta-device buffers that are in no checkpoint, such as rotary frequencies."""
    kept = {id(module) for stage in stages for module in stage.kept.values()}
    shell = next(iter(stages)).part.shell  # of the whole model: all stages have the same
    every = (*shell.layers, *shell.before.values(), *shell.after.values())
    of_others = {id(module) for part in every if id(part) not in kept for module in part.modules()}
    for name, module in model.named_modules():
        labels = [label for label, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if id(module) in of_others or not labels:
            continue
        for value in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            value._is_hf_initialized = True  # transformers does not initialise such tensors again
        for label in labels:
            module._buffers[label] = torch.empty_like(getattr(module, label), device=device)
        _initializer(model, name)(module)


@torch.no_grad()
def _begin_adapters(model: Any, added: Mapping[str, _Slot], device: torch.device) -> None:
    """Let PEFT make new LoRA factors in place of factors on the meta device.

    The factors of all experts are drawn, and a rank keeps its part: so every layout begins with the same numbers,
    if torch has the same seed on all ranks. Tensors that PEFT computes from the base stay on the meta device.
    """
    layers: dict[tuple[str, str], list[_Slot]] = {}
    for name, slot in added.items():
        if slot.value.is_meta and (parts := FACTOR.fullmatch(name)):
            layers.setdefault((parts[1], parts[2]), []).append(slot)
    for (path, adapter), slots in layers.items():
        config = getattr(model, "peft_config", {}).get(adapter)
        if (start := getattr(config, "init_lora_weights", None)) not in (True, "gaussian"):
            continue
        olds = [slot.value for slot in slots]
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which seeds GPUs, too.
            torch.default_generator.manual_seed(torch.initial_seed() % 2**32 + zlib.crc32(path.encode()))
            for slot in slots:
                whole_shape = list(slot.value.shape)
                whole_shape[1 if slot.experts else 0] *= slot.ranks
                slot.put(nn.Parameter(torch.empty(whole_shape, dtype=slot.value.dtype)))
            model.get_submodule(path).reset_lora_parameters(adapter, start)
        for slot, old in zip(slots, olds, strict=True):
            whole = slot.value
            slot.put(old)
            slot.fill(slot.cut(whole), device)


def _initializer(model: Any, name: str) -> Callable[[nn.Module], None]:
    """Return ``_init_weights`` of the innermost model around a module: models may hold other models."""
    while name:
        name = name.rpartition(".")[0]
        if (own := getattr(model.get_submodule(name), "_init_weights", None)) is not None:
            return own
    return lambda module: None


# -------------------------------------------------------------------------------------------------------------- saving


def save_part(
    folder: Path, number: int, stages: int, stage: LanguageModelStage, model: Any, *, adapters: bool, writes: bool
) -> None:
    """Write a stage's file in the layout of the model's checkpoints, if this rank ``writes``.

    Collective over ranks that share experts. With ``adapters`` their part alone is written, for :func:`join_adapter`.
    """
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    # With adapters these are the tensors to write, else those to leave out.
    if adapters:
        chosen = {tensor for keys in adapter_keys(model).values() for tensor in keys}
    else:  # all but copies of tied tensors, which transformers ties again
        chosen = {id(p) for p in stage.tied.values()} if number else set()
    tensors: dict[str, Tensor] = {}
    for slot in _slots(stage):
        whole = slot.joined()
        if writes and (id(slot.value) in chosen) == adapters:
            # PEFT writes a tied tensor under each of its names. A file holds no two tensors with one memory, as a
            # factor of LoRA and its transpose may have.
            for name in slot.names if adapters else slot.names[:1]:
                tensors[name] = whole.to("cpu", copy=adapters).contiguous()
    if not writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if adapters:
        save_file(tensors, folder / PART.format(number))
    else:
        tensors = {name: value.contiguous() for name, value in revert_weight_conversion(model, tensors).items()}
        save_file(tensors, folder / FILE.format(number + 1, stages), metadata={"format": "pt"})


def join_adapter(folder: Path, stages: int, model: Any) -> None:
    """Let PEFT write the adapters from the parts of all stages, and delete the parts."""
    from safetensors.torch import load_file

    parts = [folder / PART.format(number) for number in range(stages)]
    tensors = {name: tensor for part in parts for name, tensor in load_file(part).items()}
    type(model).save_pretrained(model, str(folder), state_dict=tensors)  # as above
    for part in parts:
        part.unlink()


def load_adapters(folder: Path, model: Any, stages: Collection[LanguageModelStage], device: torch.device) -> None:
    """Fill the adapters of stages from a folder that PEFT or :func:`join_adapter` has written."""
    from safetensors import safe_open

    slots = [slot for stage in stages for slot in _slots(stage)]
    for adapter, keys in adapter_keys(model).items():
        file = (folder if adapter == "default" else folder / adapter) / "adapter_model.safetensors"
        if not file.exists():
            raise ValueError(f"{folder}: looked for {file.name} of adapter {adapter!r}; found none")
        with safe_open(file, framework="pt") as opened:
            known = set(opened.keys())
            for slot in slots:
                # PEFT's files have tokens of a tied embedding once.
                same = (slot.value, *map(model.get_parameter, slot.elsewhere))
                if (key := next((keys[id(value)] for value in same if id(value) in keys), None)) is None:
                    continue
                if key not in known:
                    raise ValueError(f"{file} has nothing for {slot.names[0]}; allowed: an adapter of the same targets")
                slot.fill(slot.cut(opened.get_tensor(key)), device, f"{file} has {key}")


def write_index(folder: Path, stages: int, model: Any) -> None:
    """Write the index of the stages' files, and the configurations, as the model's own ``save_pretrained`` does.

    Weights of an earlier save in the folder are deleted: ``from_pretrained`` would read ``model.safetensors`` first.
    """
    from safetensors import safe_open

    where: dict[str, str] = {}
    size = 0
    for number in range(stages):
        file = FILE.format(number + 1, stages)
        with safe_open(folder / file, framework="pt") as opened:
            where |= dict.fromkeys(opened.keys(), file)
        size += (folder / file).stat().st_size
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2))
    for path in folder.glob("model*.safetensors"):
        if WEIGHTS.fullmatch(path.name) and path.name not in where.values():
            path.unlink()
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
