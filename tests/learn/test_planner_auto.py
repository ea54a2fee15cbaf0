"""A step whose order of actions is found for costs, against one process that holds the whole model."""

from itertools import count
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.schedule import Placement, auto, build_schedule
from tests import models
from tests.engine.test_engine_pipeline import build, of_one_process
from tests.engines import COSTS, make
from tests.models import default_dtype
from tests.ranks import Ranks, over
from tests.tiers import first

PLACEMENTS = {"loop": Placement.loop(2, 2), "v": Placement.v(2), "long v": Placement.v(2, 3)}


@default_dtype(torch.float64)
def _compare(rank: int, size: int, name: str, ep: int, options: dict[str, Any]) -> list[str]:
    """Two steps by measured costs, one by the order that is found, and another one for other costs."""
    program = auto(3, PLACEMENTS[name], peak_activations=2, seconds=0.05)
    mesh = init_device_mesh("cpu", (2, 1, ep), mesh_dim_names=("pp", "dp", "ep"))
    at = mesh.get_coordinate()
    shards = [models.batch(program.microbatches, seed=seed, sequence=7) for seed in range(ep)]
    losses, expected = of_one_process(shards, program.microbatches, 2)
    inputs, target = shards[at[2]]
    blocks, problems, reference = build(2, mesh.get_group("ep"), rank), list[str](), dict[str, Tensor]()
    engine = make(blocks, program, mesh=mesh, timeout=60, **options)
    for number in range(4):
        if number == 3:
            engine.costs = COSTS
        for parameter in engine.parameters():
            parameter.grad = None
        result = engine.step(inputs, target=target)
        plan, where = engine.plan, f"step {number} of {program.placement}"
        found = models.held(engine, nn.Sequential(*blocks))
        problems += [f"{where}: {problem}" for problem in models.apart(found, expected, at[2], ep, 1e-12)]
        reference = reference or found
        problems += [f"{where}: {label} differs from the first" for label in models.equal(found, reference)]
        if (plan.program == program) != (not number):  # the second step has measured: the plan is that of the third
            problems.append(f"{where}: the order of {plan.program.name} comes next")
        if number > 1 and result.peak_activations > min(program.peak_activations):
            problems.append(f"{where}: {result.peak_activations} alive with a limit of {program.peak_activations}")
        again = engine.evaluate(inputs, target=target)
        if not torch.equal(torch.tensor(result.losses), torch.tensor(again.losses)):
            problems.append(f"{where}: evaluate gives another loss")
        if any(abs(float(a) - float(b)) > 1e-12 for a, b in zip(result.losses, losses[at[2]], strict=False)):
            problems.append(f"{where}: another loss than one process")
    return problems


@pytest.mark.parametrize("name", first(PLACEMENTS, "loop"))
def test_two_stages(ranks2: Ranks, name: str) -> None:
    assert ranks2.run(_compare, name, 1, {}, timeout=120) == [[]] * 2


@pytest.mark.wide
@pytest.mark.parametrize(("name", "options"), [("loop", {"parts": 2}), ("v", {"recompute": "block"})])
def test_two_stages_and_two_expert_ranks(ranks4: Ranks, name: str, options: dict[str, Any]) -> None:
    assert ranks4.run(_compare, name, 2, options, timeout=120) == [[]] * 4


def test_one_rank_finds_an_order_for_its_costs() -> None:
    data, program = models.batch(4), build_schedule("auto", microbatches=4, peak_activations=3, seconds=0.05)
    losses, expected = models.plain_gradients(models.build(), *data, 4)
    model = models.build()
    engine = make(model, program, costs=COSTS)
    result = engine.step(data[0], target=data[1])
    assert not models.equal(models.gradients(model), expected)
    assert [float(x) for x in result.losses] == [float(x) for x in losses]
    assert engine.plan.program != program
    assert result.peak_activations <= 3


@over(2)
def test_ranks_that_search_for_other_times_are_refused(rank: int, size: int) -> None:
    program = build_schedule("auto", ranks=size, microbatches=3, seconds=0.1 * (1 + rank))
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    with pytest.raises(ValueError, match="search"):
        make(build(2), program, mesh=mesh, timeout=20)


@pytest.mark.parametrize("measured", [True, False])
@over(2)
def test_ranks_of_other_speed_play_one_plan(rank: int, size: int, measured: bool) -> None:
    """One rank searches for all by the clock; where each searches by itself, no clock ends it."""
    data, program = models.batch(6), build_schedule("auto", ranks=size, microbatches=6, seconds=0.05)
    mesh, clock = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",)), count(0.0, 10.0 if rank else 1e-6)
    engine = make(build(2), program, mesh=mesh, timeout=20, costs=None if measured else COSTS, tries=1, verify=False)
    with patch("overlap1f1b.plan.search.time", Mock(thread_time=lambda: next(clock))):
        for _ in range(4):
            engine.step(data[0], target=data[1])
        engine.step(data[0][:8], target=data[1][:8], microbatches=4)
    assert engine.plan.order == "found" or engine.plan.program.name != "auto"
