"""Checkpoints of a training run: written by ranks of one layout, read by those of any other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from overlap1f1b.engine.checkpoint import save as checkpoint
from overlap1f1b.engine.checkpoint.folder import latest
from overlap1f1b.engine.checkpoint.save import Held
from overlap1f1b.engine.engine import Engine
from overlap1f1b.moe import Experts
from overlap1f1b.transport.failures import LostRankError
from overlap1f1b.transport.together import Together


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
        optimizer: Of the engine's parameters. Its state is stored, and of its parameter groups what is a number, a
            text or a tuple of these (``lr``, ``weight_decay``, what a scheduler notes), but not how a step is computed
            (``foreach``, ``fused``, ``capturable``, ``differentiable``).
        config: What a run must have in common with this one to go on from it, as JSON values.
        keep: How many checkpoints stay in the directory.

    Raises:
        ValueError: ``keep`` is below 1, the mesh is not of all ranks, or parameters are sharded by FSDP2, whose own
            checkpoints those are.
        OSError: A rank cannot write; on every rank.
        RuntimeError: Anything else failed on a rank, which is named on every rank; a LostRankError where a rank did not
            answer within the engine's limit, in which the slowest must have written its part.
    """
    with engine.guarded(lambda: "in save_checkpoint", (LostRankError, KeyboardInterrupt)):
        return checkpoint.save(
            Path(directory), step, engine.mesh, lambda: _held(engine, optimizer), config=config or {}, keep=keep
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
        optimizer: Perhaps fresh. It goes on with the learning rate and the other numbers of each group that it was
            saved with; a group takes those of its parameters, on whatever rank they were.
        config: As it was saved with.

    Raises:
        ValueError: The checkpoint is of another configuration or model (the first difference, with both values), its
            optimizer had other parameter groups, it is damaged, or the mesh is not of all ranks.
        RuntimeError: As of :func:`save_checkpoint`.
    """
    directory = Path(directory)
    path: Path | None = directory
    with engine.guarded(lambda: "in load_checkpoint", (LostRankError, KeyboardInterrupt)):
        if not directory.name.startswith("step-"):
            path = Together(engine.mesh, f"{directory} cannot be looked through").first(lambda: latest(directory))
        if path is None:
            return 0
        return checkpoint.load(
            path,
            engine.mesh,
            lambda: _held(engine, optimizer),
            config=config or {},
            partial=isinstance(engine.model, Mapping),
        )


def _held(engine: Engine, optimizer: torch.optim.Optimizer) -> Held:
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
    tied = {name: ties[p] for name, p in model.named_parameters() if p in ties}
    return Held(model, optimizer, engine.mesh, sharded, blocks, tied)
