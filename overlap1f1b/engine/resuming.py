"""Checkpoints of a training run: written by ranks of one layout, read by those of any other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from overlap1f1b.engine import checkpoint
from overlap1f1b.engine.checkpoint_folder import latest
from overlap1f1b.engine.engine import Engine
from overlap1f1b.moe import Experts


def save_checkpoint(
    engine: Engine,
    directory: Path | str,
    step: int,
    optimizer: torch.optim.Optimizer,
    *,
    config: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Writes the model and the optimizer's state to ``directory/step-00000100``. All ranks must call this.

    >>> step = load_checkpoint(engine, directory, optimizer)  # 0 where there is none
    >>> save_checkpoint(engine, directory, step, optimizer)

    A checkpoint is published when every rank has written its part, and everything in it is stored once, under its name
    in the whole model: ranks of another number, along any dimension of the mesh, can go on from it. Stages that are
    given as mere lists keep their number in their names, and can be read by ranks with the same stages alone.

    Args:
        engine: Whose model it is.
        directory: That all ranks see.
        step: Number of steps so far.
        optimizer: Of the engine's parameters; its hyperparameters are not stored.
        config: What a run must have in common with this one to go on from it, as JSON values.
        keep: How many checkpoints stay in the directory.

    Raises:
        ValueError: ``keep`` is below 1, or parameters are sharded by FSDP2, whose own checkpoints those are.
        OSError: A rank cannot write; on every rank.
    """
    held = _held(engine)
    return checkpoint.save(
        Path(directory),
        step,
        held.model,
        optimizer,
        config=config or {},
        mesh=engine.mesh.devices,
        sharded=held.sharded,
        blocks=held.blocks,
        tied=held.tied,
        keep=keep,
    )


def load_checkpoint(
    engine: Engine,
    directory: Path | str,
    optimizer: torch.optim.Optimizer,
    *,
    config: Mapping[str, Any] | None = None,
) -> int:
    """Goes back to the last checkpoint of a directory, or to one that is named, and returns its number of steps.

    All ranks must call this, before a first step or between two.

    Args:
        engine: Whose model is filled; over any number of ranks.
        directory: Of :func:`save_checkpoint`, or one of its checkpoints. Where there is none nothing is done.
        optimizer: Perhaps fresh.
        config: As it was saved with.

    Raises:
        ValueError: The checkpoint is of another configuration or model (the first difference, with both values), or it
            is damaged.
    """
    held, directory, mesh = _held(engine), Path(directory), engine.mesh.devices
    named = directory.name.startswith("step-")
    path = directory if named else checkpoint.on_first_rank(mesh, lambda: latest(directory))
    if path is None:
        return 0
    return checkpoint.load(
        path,
        held.model,
        optimizer,
        config=config or {},
        mesh=mesh,
        sharded=held.sharded,
        blocks=held.blocks,
        tied=held.tied,
        partial=held.blocks is None,
    )


class _Held(NamedTuple):
    """What a rank has of a model.

    Args:
        model: With the names of the whole model.
        blocks: Children that this rank trains; None where the model has these alone.
        sharded: Names of parameters that ranks along "ep" have parts of.
        tied: One name for parameters that several stages have as one.
    """

    model: nn.Module
    blocks: set[str] | None
    sharded: set[str]
    tied: dict[str, str]


def _held(engine: Engine) -> _Held:
    given = engine.model
    blocks: set[str] | None = None
    ties: dict[nn.Parameter, str] = {}
    if isinstance(given, Mapping):
        model = nn.Module()
        for number, stage in given.items():
            if (hang := getattr(stage, "hang", None)) is not None:
                hang(model)
            else:
                model.add_module(str(number), stage if isinstance(stage, nn.Module) else nn.ModuleList(stage))
            ties |= {p: name for name, p in getattr(stage, "__dict__", {}).get("tied", {}).items()}
    else:
        model = given if isinstance(given, nn.Module) else nn.ModuleList(given)
        own = {block for stage in engine.stages.values() for block in stage.blocks}
        blocks = {name for name, child in model.named_children() if child in own}
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("a checkpoint of parameters under FSDP2; allowed: torch.distributed.checkpoint.state_dict's")
    sharded = {
        f"{path}.{label}".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, Experts)
        for label, _ in module.named_parameters()
    }
    return _Held(model, blocks, sharded, {name: ties[p] for name, p in model.named_parameters() if p in ties})
