"""Limits of memory: plans that keep within them, and ranks with less of it."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.cut.options import parse_memory
from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.learn.memory import ByteCount
from overlap1f1b.learn.planner import LEAST_WARMUP_GAIN, SPARE, Planner, lighter
from overlap1f1b.plan import NodeCosts, fastest
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import COSTS, make
from tests.observing import Last
from tests.ranks import Ranks, over

CPU, M = torch.device("cpu"), 4
PROGRAM = build_schedule("combined_1f1b", microbatches=M)
LIMITS = (1.0, 1.4, 2.0)


def transformer(group: Any = None) -> MoETransformer:
    config = MoEConfig(layers=2, hidden=32, intermediate=64, sequence=32, experts=8)
    return MoETransformer(config, seed=1, group=group)


def tokens(rank: int = 0) -> tuple[Tensor, Tensor]:
    inputs, target = torch.randint(256, (2, 4 * M, 32), generator=torch.Generator().manual_seed(1 + rank))
    return inputs, target


def settled(engine: Engine, data: tuple[Tensor, Tensor]) -> Engine:
    """Play steps until a plan is chosen."""
    while engine.tuner.settling:
        for parameter in engine.parameters():
            parameter.grad = None
        engine.step(data[0], target=data[1])
    return engine


def counted(engine: Engine, data: tuple[Tensor, Tensor]) -> tuple[ByteCount, dict[str, Tensor]]:
    """Play a step without earlier gradients; return its bytes and gradients."""
    for parameter in engine.parameters():
        parameter.grad = None
    with ByteCount(CPU) as count:
        engine.step(data[0], target=data[1])
    return count, models.gradients(engine.model)  # type: ignore[arg-type]


@cache
def measured() -> tuple[NodeCosts, int]:
    """Costs in which exchanges are as long as compute, with counted bytes; and the peak of a plain loop."""
    data = tokens()
    engine = settled(make(transformer(), PROGRAM, memory="1TB", tries=0, verify=False), data)
    plain = build_schedule("sequential", microbatches=M)
    count, _ = counted(make(transformer(), plain, costs=COSTS, overlap="serial"), data)
    return replace(COSTS, bytes=engine.costs.bytes), count.peak


@over(2, timeout=100)
def test_peaks_are_predicted_over_ranks_with_uneven_rows(rank: int, size: int) -> None:
    """Within five per cent: those of steps that measure, and of plans."""
    mesh, data = init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "ep")), tokens(rank)
    group = mesh.get_group("ep")
    engine = make(transformer(group), PROGRAM, mesh=mesh, memory="1TB", tries=0)
    held = max(counted(engine, data)[0].peak for _ in range(3))
    costs, found = replace(COSTS, bytes=engine.costs.bytes), []
    for name, extra in (("sequential", None), ("combined_1f1b", 1), ("afab", None)):
        program = build_schedule(name, microbatches=M, extra_warmup=extra)
        plans = fastest(program, engine.shapes, costs, 3)
        if not found:
            found += [("measuring", held / plans[0].peak_bytes[0])]
        for plan in plans[: 2 if extra else 1]:
            played = make(transformer(group), program, mesh=mesh, plan=plan, verify=False)
            played.observers.append(Last(keeps_order=True))  # weight gradients that run early free memory early
            count, _ = counted(played, data)
            found.append((f"{program.name} {plan.order}", count.peak / plan.peak_bytes[0]))
    problems = [one for one in found if abs(one[1] - 1) > 0.05]
    assert not problems, problems


@patch("overlap1f1b.plan.budget.NODES", 0)
def test_the_plan_keeps_within_every_limit() -> None:
    """It has the gradients of a plan without a limit, and holds more where that is faster."""
    (costs, plain), data = measured(), tokens()
    engine = make(transformer(), PROGRAM, costs=costs, verify=False)
    free, wanted = counted(engine, data)
    predicted = [engine.plan.predicted]
    for factor in reversed(LIMITS):
        model = transformer()
        with ByteCount(CPU) as count:  # of all tensors that there are before
            pass
        limit = int(count.before + factor * plain) + 1
        engine = make(model, PROGRAM, costs=costs, memory=limit, verify=False)
        count, found = counted(engine, data)
        assert count.peak <= factor * plain + 1, (factor, engine.plan.order)
        assert not models.equal(found, wanted)
        # No other number of open actions or forwards to warm up that keeps within the limit is faster.
        rooms = [(1 - SPARE) * factor * plain]
        options: Any = {"counts_block": True, "rooms": rooms}
        grid = [p.predicted for o in lighter(PROGRAM) for p in fastest(o, engine.shapes, costs, 3, **options)]
        assert engine.plan.predicted <= min(grid, default=1e9) / (1 - LEAST_WARMUP_GAIN), factor
        predicted.append(engine.plan.predicted)
    assert predicted == sorted(predicted)
    assert predicted[-1] > predicted[0]
    assert free.peak > plain


def test_a_limit_that_nothing_keeps_says_what_would_do() -> None:
    costs, _ = measured()
    with pytest.raises(
        ValueError, match=r"memory='1KB' for 1MB of parameters and gradients on this rank, .* allowed: mo"
    ):
        make(transformer(), PROGRAM, costs=costs, memory="1KB")
    engine = make(transformer(), PROGRAM, costs=costs, memory="1.5MB")
    with pytest.raises(ValueError, match=r"memory='1.5MB': one microbatch after another .* allowed: .*MB or more"):
        _ = engine.plan
    with pytest.raises(ValueError, match="memory with costs that have no bytes"):
        _ = make(transformer(), PROGRAM, costs=COSTS, memory="1GB").plan


def test_steps_that_measure_hold_one_microbatch_at_a_time() -> None:
    limited, free = (make(transformer(), PROGRAM, memory=memory) for memory in ("1TB", None))
    assert (limited.plan.program.name, free.plan.program.name) == ("sequential", PROGRAM.name)
    with pytest.raises(ValueError, match="memory='auto' on cpu; allowed: on a GPU"):
        make(transformer(), PROGRAM, memory="auto")


def test_bytes_have_units() -> None:
    assert [parse_memory(value) for value in (1000, "2 KB", "1.5KiB", "auto", None)] == [1000, 2000, 1536, "auto", None]
    for value in (0, -1, True, "70 gigs", "GB", "0.1B"):
        with pytest.raises(ValueError, match="allowed: bytes above 0"):
            EngineOptions(memory=value)  # type: ignore[arg-type]


def test_only_forwards_that_gain_are_made_early() -> None:
    """Without an exchange to hide nothing is gained by several open microbatches."""
    costs = replace(measured()[0], by_op=NodeCosts.uniform(attention=3, experts=4, dispatch=0.001).by_op)
    assert make(transformer(), PROGRAM, costs=costs, memory="1TB").plan.program.name == "sequential"


def _less(rank: int, size: int) -> list[tuple[str, int]]:
    """Plans of ranks along "ep" by the memory of the last one."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    data, found = models.batch(M, seed=rank), []
    for more in (10**9, 150_000):
        model = models.build(mesh.get_group("ep"))
        with ByteCount(CPU) as count:
            pass
        room = more if rank == size - 1 else 10**9
        options: dict[str, Any] = {"memory": count.before + room, "tries": 0, "timeout": 30}
        engine = settled(make(model, PROGRAM, mesh=mesh, **options), data)
        found.append((engine.plan.fingerprint, engine.plan.peak_bytes[0] <= more))
        engine.close()
        del engine, model  # else the next limit would count them
    return found


def test_a_rank_with_less_memory_decides(ranks2: Ranks) -> None:
    one, other = ranks2.run(_less, timeout=100)
    assert one == other
    assert all(fits for _, fits in one)


@patch("overlap1f1b.plan.budget.NODES", 0)
def test_blocks_recompute_where_a_limit_needs_it() -> None:
    """Without recomputation nothing keeps within the limit; gradients stay as they are."""
    data, peaks = tokens(), dict[str, int]()
    sequential, program = (build_schedule(name, microbatches=2) for name in ("sequential", "combined_1f1b"))
    for mode in ("none", "block"):
        plain = make(transformer(), sequential, costs=COSTS, recompute=mode)
        count, wanted = counted(plain, data)
        peaks[mode] = count.peak
    model = transformer()
    del plain
    with ByteCount(CPU) as count:
        pass
    room = (peaks["none"] + peaks["block"]) // 2
    engine = settled(make(model, program, memory=count.before + room, recompute="auto", tries=0, verify=False), data)
    count, found = counted(engine, data)
    assert count.peak <= room
    assert engine.plan.peak_bytes[0] == pytest.approx(count.peak, rel=0.05)
    assert not models.equal(found, wanted)
    del found  # within the limit, too
    modes = {block.recompute for blocks in engine.shapes for block in blocks}
    assert modes != {"none"}  # which ones follows from measured times: tests/plan/test_recompute.py gives costs
    before, engine.costs = engine.shapes, None  # measured anew, for what was chosen
    assert settled(engine, data).shapes == before
    with pytest.raises(ValueError, match="recompute='auto' without memory"):
        EngineOptions(recompute="auto")


@patch("overlap1f1b.plan.budget.NODES", 0)
def test_no_uniform_choice_within_a_limit_is_faster() -> None:
    """Of up to three open actions, forwards to warm up, and one recomputation for all blocks; bytes are counted."""
    program = build_schedule("combined_1f1b", microbatches=M, extra_warmup=1)
    engine = make(transformer(), program, memory="1TB", recompute="auto", tries=0, verify=False)
    with patch.object(Planner, "chosen", autospec=True, side_effect=Planner.chosen) as chosen:
        settled(engine, tokens())
    _, _, measured = chosen.call_args.args
    found = {key: (replace(COSTS, bytes=costs.bytes), shapes) for key, (costs, shapes) in measured.items()}
    assert len(found) == 4
    costs, shapes = found["none", 1]
    (plain,) = fastest(build_schedule("sequential", microbatches=M), shapes, costs, "serial")[0].peak_bytes
    for factor in (0.8, 1.4):
        room = factor * plain
        grid = [
            plan.predicted
            for (costs, shapes), other in product(found.values(), lighter(program))
            for plan in fastest(other, shapes, costs, 3, counts_block=True, rooms=[(1 - SPARE) * room])
        ]
        plan = replace(engine.tuner.planner, rooms=(room,)).chosen(program, found).plans[0]
        assert plan.peak_bytes[0] <= room
        assert plan.predicted <= min(grid, default=1e9) / (1 - LEAST_WARMUP_GAIN), factor
