"""A call that not all ranks make is named on all of them, at once."""

import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import build_schedule
from overlap1f1b.engine import Engine, StepResult, connection
from overlap1f1b.transport.failures import DifferentCallsError, LostRankError
from tests import models
from tests.engines import CALLS, COSTS, calls_of, make, said_of
from tests.ranks import over
from tests.tiers import wide

M = 2


def _calls(engine: Engine, result: StepResult, data: Any, folder: Path) -> dict[str, Callable[[], object]]:
    return calls_of(engine, result, data, folder, torch.optim.SGD(engine.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("shape", "alone"),
    [
        ((1, 1, 2), 0),
        *wide(((2, 1, 1), 0), ((1, 2, 1), 0), ((1, 2, 2), 3), ((2, 1, 2), 0), ((2, 2, 1), 2)),
    ],
)
@over(lambda shape, *_: math.prod(shape), timeout=90)
def test_calls_that_differ(rank: int, size: int, shape: tuple[int, int, int], alone: int, tmp_path: Path) -> None:
    """One rank makes one call, all others another: for all pairs of calls."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "ep"))
    program, data = build_schedule("1f1b", ranks=shape[0], microbatches=M), models.batch(M, seed=rank)
    for mine, others in combinations(CALLS, 2):
        model = models.build(mesh.get_group("ep"), layers=2)
        engine = make(model, program, mesh=mesh, costs=COSTS, verify=False, timeout=100)  # longer than the test
        result = engine.step(data[0], target=data[1])
        calls = _calls(engine, result, data, tmp_path)
        with pytest.raises(RuntimeError) as caught:
            calls[mine if rank == alone else others]()
        said = said_of(caught.value)
        assert "allowed: the same call on all ranks" in said, said
        assert f"{mine} on " in said, said
        assert f"{others} on " in said, said
        with pytest.raises(RuntimeError, match=r"this engine failed before|this engine is closed"):
            engine.mean_loss(result)


def test_one_rank_makes_any_call_in_any_order(tmp_path: Path) -> None:
    engine, data = make(models.build(), build_schedule("1f1b", microbatches=M), costs=COSTS), models.batch(M)
    calls = _calls(engine, engine.step(data[0], target=data[1]), data, tmp_path)
    for name in (*CALLS[:-1], *reversed(CALLS[:-1]), "close"):
        calls[name]()


@over(2)
def test_a_lone_call_is_named_when_it_waits_and_at_its_limit(rank: int, size: int) -> None:
    """One rank makes a call while the other is busy elsewhere, or closes its engine before the other."""
    mesh, data = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), models.batch(M, seed=rank)
    with patch.object(connection, "CLOSE_S", 0.3), patch.object(connection, "LATE_CALL_S", 0.2):
        for call in ("mean_loss", "close"):
            model = models.build(mesh.get_group("ep"), layers=2)
            engine = make(
                model, build_schedule("1f1b", microbatches=M), mesh=mesh, costs=COSTS, verify=False, timeout=2
            )
            result = engine.step(data[0], target=data[1])
            if rank == 0 and call == "close":
                engine.close()
            elif rank == 0:
                name = r"call \d+ of the engine, mean_loss on rank ep 0, "
                with (
                    pytest.warns(UserWarning, match=f"{name}waits for the other ranks since 0.2 s"),
                    pytest.raises(LostRankError, match=f"{name}which all ranks must make, met no other"),
                ):
                    engine.mean_loss(result)
            dist.barrier()
            if rank == 1 and call == "close":
                with pytest.raises(DifferentCallsError, match="clip_gradients on rank ep 1 and close on rank ep 0"):
                    engine.clip_gradients(1.0)
