"""An engine whose options stand beside its arguments, where tests pass them on by name, and costs of nodes."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.checkpoint import load_checkpoint, save_checkpoint
from overlap1f1b.engine import Engine, EngineOptions, StepResult
from overlap1f1b.plan import NodeCosts, Overlap
from overlap1f1b.schedule import Program, build_schedule
from tests import models
from tests.models import loss_fn

Case = tuple[str, Overlap, dict[str, Any]]

CALLS = ("step", "evaluate", "mean_loss", "clip_gradients", "save_checkpoint", "load_checkpoint", "close")
"""Calls of an engine that all ranks must make."""

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, aggregate=0.2, dense=1, reduce=2, send=1)


def make(model: Any, program: Program, **given: Any) -> Engine:
    """Return an engine: what is no argument of it is one of its options; the loss is that of ``tests.models``."""
    arguments = {name: given.pop(name) for name in ("mesh", "loss_fn", "exchange") if name in given}
    return Engine(model, program, **{"loss_fn": loss_fn, **arguments}, options=EngineOptions(**given))


def orders_apart(
    build: Callable[..., nn.Module],
    cases: Iterable[Case],
    mesh: DeviceMesh,
    microbatches: int,
    *near: float,
    **more: Any,
) -> list[str]:
    """Orders over "ep" whose gradients differ from the first's in a bit, or the first's from one process's.

    ``build`` makes a rank's model of a process group, and that of one process of none; how near they have to be
    ``models.apart`` takes. What is more are options of the engines.
    """
    data = [models.batch(microbatches, seed=r) for r in range(mesh.size())]
    rank = mesh.get_rank()
    first, problems = dict[str, Tensor](), []
    for name, overlap, options in cases:
        model = build(mesh.get_group("ep"))
        program = build_schedule(name, microbatches=microbatches)  # type: ignore[arg-type]
        given = {"overlap": overlap, "costs": COSTS, "verify": not first, "timeout": 30} | more | options
        make(model, program, mesh=mesh, **given).step(data[rank][0], target=data[rank][1])
        found = models.gradients(model)
        first = first or found
        problems += [f"{name} {given}: {label}" for label in models.equal(found, first)]
    expected = models.of_one_process(build(None), data, microbatches)
    return problems + models.apart(first, expected, rank, len(data), *near)


def calls_of(
    engine: Engine, result: StepResult, data: Sequence[Any], folder: Path, optimizer: torch.optim.Optimizer
) -> dict[str, Callable[[], object]]:
    """``CALLS``, of inputs and targets ``data`` and the result of a step."""
    return {
        "step": lambda: engine.step(data[0], target=data[1]),
        "evaluate": lambda: engine.evaluate(data[0], target=data[1]),
        "mean_loss": lambda: engine.mean_loss(result),
        "clip_gradients": lambda: engine.clip_gradients(1.0),
        "save_checkpoint": lambda: save_checkpoint(engine, folder, 1, optimizer),
        "load_checkpoint": lambda: load_checkpoint(engine, folder, optimizer),
        "close": engine.close,
    }


def said_of(error: BaseException) -> str:
    """Its message with all notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
