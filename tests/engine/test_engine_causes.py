"""Causes of exposure in the result of a step: they add up, ranks know of each other, and layers have their rows."""

import math
from unittest.mock import patch

import pytest
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.learn import pooling
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import COSTS, make
from tests.ranks import Ranks, over, run
from tests.tiers import wide

MICROBATCHES = 4


def figures(rank: int, size: int, pipeline: int) -> list[tuple[int, dict[str, float]]]:
    """Of each step of an engine with uneven routing: what others saw, and metrics."""
    mesh = init_device_mesh("cpu", (pipeline, size // pipeline), mesh_dim_names=("pp", "ep"))
    name = "combined_1f1b" if pipeline == 1 else "interleaved_1f1b"
    program = build_schedule(name, ranks=pipeline, microbatches=MICROBATCHES)  # type: ignore[arg-type]
    model = models.build(mesh.get_group("ep"), layers=3)
    found = []
    pooled = patch.object(pooling, "PART", math.inf)  # every step, though they are short
    with pooled, make(model, program, mesh=mesh, costs=COSTS, overlap=2, timeout=60) as engine:
        inputs, target = models.batch(MICROBATCHES, seed=mesh.get_local_rank("ep"))
        engine.step(inputs, target=target)  # it looks for exchanges of the blocks' own
        for _ in range(2):
            result = engine.step(inputs, target=target)
            found.append((len(result.others), result.metrics()))
    return found


def checked(of_ranks: list[list[tuple[int, dict[str, float]]]], sharing: int) -> None:
    rows: dict[str, float] = {}
    for others, metrics in (step for steps in of_ranks for step in steps):
        assert others == sharing - 1
        causes = [value for key, value in metrics.items() if key.startswith("exposed_by_cause_ms/")]
        assert len(causes) == 5
        assert math.fsum(causes) == pytest.approx(metrics["exposed_ms"], abs=1e-3)  # a microsecond
        rows |= {key: value for key, value in metrics.items() if key.startswith("rows_over_mean")}
    assert len(rows) == 3
    assert max(rows.values()) == sharing  # all tokens of a layer go to experts of the first rank
    assert 1 <= min(rows.values()) < sharing


def test_two_ranks(ranks2: Ranks) -> None:
    checked(ranks2.run(figures, 1), 2)


@pytest.mark.parametrize("pipeline", wide(1, 2))
def test_four_ranks(pipeline: int) -> None:
    checked(run(figures, 4, pipeline), 4 // pipeline)


@over(2)
def test_steps_that_measure_are_not_pooled(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    model, program = models.build(mesh.get_group("ep")), build_schedule("1f1b", microbatches=2)
    with make(model, program, mesh=mesh, tries=0, timeout=60) as engine:
        batch = models.batch(2, seed=rank)
        others = [len(engine.step(batch[0], target=batch[1]).others) for _ in range(2)]
        engine.costs = COSTS
        others.append(len(engine.step(batch[0], target=batch[1]).others))
        assert others == [0, 0, 1], others
