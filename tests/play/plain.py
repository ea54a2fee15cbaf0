"""Compare an engine with a plain loop over the same blocks, bit by bit."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.engine import Engine, StepResult
from overlap1f1b.plan import Op
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.exchange import build_exchange
from tests import models
from tests.engine.test_engine import Delayed
from tests.engines import COSTS, make

HIDDEN, MICROBATCHES, ROWS, STEPS = 12, 3, 6, 3


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def engine_of(model: nn.Module, mesh: DeviceMesh, schedule: str = "combined_1f1b", **options: Any) -> Engine:
    """Return an engine of small limits over ranks along "ep"; an ``exchange`` may take a random time."""
    program = options.pop("program", None) or build_schedule(schedule, microbatches=MICROBATCHES)  # type: ignore[arg-type]
    given = {"loss_fn": loss_fn, "costs": COSTS, "reduce": False, "timeout": 20, **options}
    return make(model, program, mesh=mesh, **given)


def batch(rank: int, microbatches: int = MICROBATCHES) -> Tensor:
    """Return inputs and targets ``[2, B, H]`` of a rank."""
    return torch.randn(2, microbatches * ROWS, HIDDEN, generator=torch.Generator().manual_seed(rank))


def compare(
    name: str,
    build: Callable[[], nn.Sequential],
    mesh: DeviceMesh,
    *,
    exchanges: int | None = None,
    microbatches: int = MICROBATCHES,
    **options: Any,
) -> list[str]:
    """Return what differs from a plain loop in one of three steps, and in an evaluation.

    The model is made with equal weights every time. ``exchanges`` is how many nodes of dispatch and combine a step has
    once they are known, None for any. The engine does not verify by itself.
    """
    options = {"verify": False} | options
    ranks, rank, problems = mesh.size(), mesh.get_local_rank("ep"), list[str]()
    data = batch(rank, microbatches).to(mesh.device_type)
    torch.manual_seed(7)
    losses, expected = models.plain_gradients(build(), *data, microbatches, 1 / ranks, loss_fn)
    torch.manual_seed(7)
    model = build()
    if mesh.device_type == "cpu":
        options["exchange"] = Delayed(build_exchange(dist.new_group(list(range(ranks)))), seed=rank)
    engine = engine_of(model, mesh, **options)
    for step in range(STEPS):
        model.zero_grad()
        result: StepResult = engine.step(data[0], target=data[1])
        problems += [f"{name}, step {step}: {worst}" for worst in models.equal(models.gradients(model), expected)]
        if not torch.equal(torch.stack(result.losses), torch.stack(losses)):
            problems.append(f"{name}, step {step}: losses")
    found = len([node for node in engine.plan.ranks[0] if node.op in (Op.DISPATCH, Op.COMBINE)])
    if exchanges is not None and found != exchanges:
        problems.append(f"{name}: {found} exchanges")
    evaluated = engine.evaluate(data[0], target=data[1])
    if not torch.equal(torch.stack(evaluated.losses), torch.stack(losses)):
        problems.append(f"{name}: evaluation")
    return problems
