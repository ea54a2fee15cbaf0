"""A call that not all ranks make is named on all of them, at once."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import build_schedule, load_checkpoint, save_checkpoint
from overlap1f1b.engine import Engine, StepResult, connection
from overlap1f1b.transport.failures import DifferentCallsError, LostRankError
from tests import models
from tests.engines import COSTS, make
from tests.ranks import Ranks
from tests.tiers import wide

M = 2
CALLS = ("step", "evaluate", "mean_loss", "clip_gradients", "save_checkpoint", "load_checkpoint", "close")


def _calls(engine: Engine, result: StepResult, data: Any, folder: Path) -> dict[str, Callable[[], object]]:
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    return {
        "step": lambda: engine.step(data[0], target=data[1]),
        "evaluate": lambda: engine.evaluate(data[0], target=data[1]),
        "mean_loss": lambda: engine.mean_loss(result),
        "clip_gradients": lambda: engine.clip_gradients(1.0),
        "save_checkpoint": lambda: save_checkpoint(engine, folder, 1, optimizer),
        "load_checkpoint": lambda: load_checkpoint(engine, folder, optimizer),
        "close": engine.close,
    }


def _differ(rank: int, size: int, shape: tuple[int, int, int], alone: int, folder: Path) -> None:
    """One rank makes one call, all others another: for all pairs of calls."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "ep"))
    program, data = build_schedule("1f1b", ranks=shape[0], microbatches=M), models.batch(M, seed=rank)
    for mine, others in combinations(CALLS, 2):
        model = models.build(mesh.get_group("ep"), layers=2)
        engine = make(model, program, mesh=mesh, costs=COSTS, verify=False, timeout=100)  # longer than the test
        result = engine.step(data[0], target=data[1])
        calls = _calls(engine, result, data, folder)
        with pytest.raises(RuntimeError) as caught:
            calls[mine if rank == alone else others]()
        said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert "allowed: the same call on all ranks" in said, said
        assert f"{mine} on " in said, said
        assert f"{others} on " in said, said
        with pytest.raises(RuntimeError, match=r"this engine failed before|this engine is closed"):
            engine.mean_loss(result)


@pytest.mark.parametrize(("pp", "dp", "ep"), [(1, 1, 2), *wide((2, 1, 1), (1, 2, 1))])
def test_two_ranks(ranks2: Ranks, pp: int, dp: int, ep: int, tmp_path: Path) -> None:
    ranks2.run(_differ, (pp, dp, ep), 0, tmp_path, timeout=90)


@pytest.mark.wide
@pytest.mark.parametrize(("shape", "alone"), [((1, 2, 2), 3), ((2, 1, 2), 0), ((2, 2, 1), 2)])
def test_four_ranks(ranks4: Ranks, shape: tuple[int, int, int], alone: int, tmp_path: Path) -> None:
    ranks4.run(_differ, shape, alone, tmp_path, timeout=90)


def test_one_rank_makes_any_call_in_any_order(tmp_path: Path) -> None:
    engine, data = make(models.build(), build_schedule("1f1b", microbatches=M), costs=COSTS), models.batch(M)
    calls = _calls(engine, engine.step(data[0], target=data[1]), data, tmp_path)
    for name in (*CALLS[:-1], *reversed(CALLS[:-1]), "close"):
        calls[name]()


def _alone(rank: int, size: int) -> None:
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


def test_a_lone_call_is_named_when_it_waits_and_at_its_limit(ranks2: Ranks) -> None:
    ranks2.run(_alone)
