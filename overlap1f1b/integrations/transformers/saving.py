"""Writes the parts of a split model to a folder that ``from_pretrained`` opens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.integrations.transformers.conversion import reverted
from overlap1f1b.moe import Experts

INDEX = "model.safetensors.index.json"

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Files of weights, by transformers' names."""


def shares(stage: nn.Module) -> dict[str, Experts]:
    """The experts that parameters of a stage belong to, where several ranks share them."""
    return {
        f"{path}.{label}": module
        for path, module in stage.named_modules()
        if isinstance(module, Experts) and module.group is not None
        for label, _ in module.named_parameters()
    }


def whole(name: str, value: Tensor, shared: Mapping[str, Experts]) -> Tensor:
    """A tensor of the whole model from this rank's part. Collective over the ranks that share it."""
    experts = shared.get(name)
    if experts is None:
        return value.detach()
    parts = [torch.empty_like(value) for _ in range(experts.exchange.ranks)]
    dist.all_gather(parts, value.detach().contiguous(), group=experts.group)
    return torch.cat(parts)


def save_stage(folder: Path, number: int, stages: int, stage: nn.Module, model: Any, *, writes: bool) -> None:
    """Writes one file of a stage, laid out as the model's checkpoints are. Collective over ranks that share experts."""
    from safetensors.torch import save_file

    shared = shares(stage)
    copies = {id(p) for p in stage.__dict__["tied"].values()} if number else set()
    tied = {name for name, p in stage.named_parameters() if id(p) in copies}  # transformers ties them again
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in stage.state_dict(keep_vars=True).items():
        if id(value) in seen:  # tied inside the stage
            continue
        seen.add(id(value))
        full = whole(name, value, shared)
        if writes and name not in tied:
            tensors[name] = full.cpu().contiguous()
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.contiguous() for name, value in reverted(model, tensors).items()}
        save_file(tensors, folder / file_of(number, stages), metadata={"format": "pt"})


def file_of(number: int, stages: int) -> str:
    """Name of a stage's file, as transformers names shards."""
    return f"model-{number + 1:05d}-of-{stages:05d}.safetensors"


def write_index(folder: Path, stages: int, model: Any) -> None:
    """Says which file has which tensor, and writes the configurations, as the model's own ``save_pretrained`` does.

    Weights that an earlier save left in the folder go: ``from_pretrained`` would read ``model.safetensors`` first.
    """
    from safetensors import safe_open

    where: dict[str, str] = {}
    size = 0
    for number in range(stages):
        file = file_of(number, stages)
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
