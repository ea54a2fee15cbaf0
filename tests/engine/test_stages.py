"""Which experts an engine takes: those that its own ranks along "ep" share."""

import itertools
import math
import re
from typing import Any

import hypothesis
import pytest
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b.engine import Engine, EngineOptions, Stage, split_blocks
from overlap1f1b.engine.stages import stages_of
from overlap1f1b.schedule import Placement, build_schedule
from overlap1f1b.transport.exchange import LocalExchange, build_exchange
from overlap1f1b.transport.mesh import Mesh
from tests import models
from tests.engines import COSTS, make
from tests.play.test_pair import run
from tests.ranks import over


def _engine(group: Any, mesh: DeviceMesh | None, **options: Any) -> Engine:
    program = build_schedule("combined_1f1b", microbatches=2)
    return make(models.build(group), program, mesh=mesh, costs=COSTS, timeout=20, **options)


@over(4)
def test_experts_of_other_ranks_are_refused(rank: int, size: int) -> None:
    """Experts over as many other ranks, experts of one rank, and those of more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "other"))
    ours, theirs = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    others = (
        f"block 1 (Block) holds experts that ranks {theirs} share, the engine's ranks along 'ep' are {ours}; "
        "allowed: the same, in this order"
    )
    place = (
        f"block 1 (Block) holds the experts of rank {rank % 2} of their group, the engine exchanges as "
        f"rank {rank // 2}; allowed: the same"
    )
    number = (
        "block 1 (Block) holds experts for {} ranks, the engine exchanges over {}; allowed: the same number "
        "(experts with group=mesh.get_group('ep'), an engine with mesh=mesh)"
    )
    cases: list[tuple[Any, DeviceMesh | None, str]] = [
        # Ranks 0 and 3 are the first, or the second, of either group.
        (mesh.get_group("other"), mesh["ep"], others if rank in (0, 3) else place),
        (None, mesh["ep"], number.format(1, 2)),
        (mesh.get_group("ep"), None, number.format(2, 1)),
        (dist.group.WORLD, mesh["ep"], number.format(4, 2)),
    ]
    for group, given, message in cases:
        with pytest.raises(ValueError, match=rf"^{re.escape(message)}(\n|$)"):
            _engine(group, given)


@over(2)
def test_groups_of_the_same_ranks_are_taken(rank: int, size: int) -> None:
    """A mesh in another order than its ranks, a group made apart, an exchange made apart, and a stage by hand."""
    data, problems = models.batch(2, seed=rank), []
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("ep",))
    apart = dist.new_group([0, 1])
    expected: dict[str, Any] = {}
    for group, options in ((mesh.get_group(), {}), (apart, {}), (apart, {"exchange": build_exchange(apart)})):
        engine = _engine(group, mesh, **options)
        engine.step(data[0], target=data[1])
        found = models.gradients(engine.model)  # type: ignore[arg-type]
        expected = expected or found
        problems += models.equal(found, expected)
    stage = Stage(models.build(apart), build_exchange(apart))
    run(stage, 2, "serial", seed=rank)
    for block in stage.blocks:
        problems += [name for name, p in block.named_parameters() if "experts" in name and p.grad is None]
    assert not problems, problems


def test_blocks_are_split_evenly() -> None:
    blocks = [nn.Identity() for _ in range(7)]
    assert [len(part) for part in split_blocks(blocks, 3)] == [3, 2, 2]
    with pytest.raises(ValueError, match="7 blocks for 8 stages"):
        split_blocks(blocks, 8)


@hypothesis.given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_weighted_blocks_are_split_as_evenly_as_can_be(weights: list[int], stages: int) -> None:
    stages = min(stages, len(weights))
    blocks = [nn.Identity() for _ in weights]
    parts = split_blocks(blocks, stages, weights)
    assert [block for part in parts for block in part] == blocks
    sums = [sum(weights[blocks.index(block)] for block in part) for part in parts]
    cuts = itertools.combinations(range(1, len(weights)), stages - 1)
    every = [[sum(weights[a:b]) for a, b in itertools.pairwise([0, *cut, len(weights)])] for cut in cuts]
    assert (max(sums), sum(x * x for x in sums)) == min((max(other), sum(x * x for x in other)) for other in every)


def test_weights_that_do_not_fit_are_named() -> None:
    blocks = [nn.Linear(2, 2) for _ in range(3)]
    for weights in ([1.0, 2.0], [1.0, -1.0, 2.0], [1.0, math.nan, 2.0]):
        with pytest.raises(ValueError, match="of 3 blocks; allowed: a finite number ≥ 0 of each"):
            split_blocks(blocks, 2, weights)
    program = build_schedule("sequential", microbatches=1)
    with pytest.raises(ValueError, match="weights of stages that are given"):
        make({0: blocks}, program, block_weights=[1, 1, 1])


def test_a_stage_without_parameters_is_on_the_device_of_the_others() -> None:
    model = {0: [nn.ReLU()], 1: [nn.Linear(2, 2, device="meta")]}
    none = {"reduce_dense": False, "reduce_experts": False}
    stages, _ = stages_of(model, Placement.loop(1, chunks=2), Mesh(None), LocalExchange(), EngineOptions(), **none)
    assert [stage.device.type for stage in stages.values()] == ["meta", "meta"]


@pytest.mark.parametrize("as_list", [False, True])
def test_a_block_that_is_replaced_after_its_engine_is_made_is_refused(as_list: bool) -> None:
    model = models.build()
    blocks: Any = list(model) if as_list else model
    engine = make(blocks, build_schedule("combined_1f1b", microbatches=2))
    inputs, target = models.batch(2)
    engine.step(inputs, target=target)
    blocks[1] = models.build()[1]
    with pytest.raises(ValueError, match="a block of the model was replaced, added or removed; allowed: a new Engine"):
        engine.step(inputs, target=target)
