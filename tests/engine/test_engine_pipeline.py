"""Every schedule over pipeline ranks, each sort over expert and data ranks, too, against one process."""

import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.plan import Overlap, Plan, StageShape, compile
from overlap1f1b.schedule import SCHEDULES, Program, build_schedule
from overlap1f1b.simulation import simulate
from tests import models
from tests.engines import COSTS, make
from tests.plan.tries import all_tries
from tests.ranks import over
from tests.tiers import wide

OVERLAPS: list[Overlap] = ["serial", "pairs", 2, 3]
CHUNKED = {"interleaved_1f1b": 2, "combined_1f1b": 2, "zb_h1": 2, "afab": 2}
LAYERS = {2: 3, 4: 5}  # with embedding, dense block and head 6 and 8 blocks: stages of unlike blocks

# Not divisible by the ranks wherever the schedule allows it.
ODD = {"dualpipe": {2: 4, 4: 10}, "dualpipev": {2: 5, 4: 9}}


def programs(name: str, ranks: int, most: bool) -> list[Program]:
    microbatches = ODD.get(name, {2: 3, 4: 5})[ranks]
    chunks = CHUNKED.get(name)
    several = [None, chunks] if most and chunks else [chunks]
    return [build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks) for chunks in several]


class Jitter(nn.Module):
    """A block that takes a random time, so that ranks drift apart."""

    def __init__(self, inner: nn.Module, seed: int) -> None:
        super().__init__()
        self.inner, self.random = inner, random.Random(seed)

    def forward(self, *x: Tensor) -> Any:
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 0.003)
        return self.inner(*x)


def build(ranks: int, group: Any = None, rank: int = 0) -> list[nn.Module]:
    model = models.build(group, layers=LAYERS[ranks])
    return [Jitter(block, 100 * rank + index) for index, block in enumerate(model)]


def of_one_process(
    shards: list[tuple[Tensor, Tensor]], microbatches: int, pp: int
) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Losses of every shard and the gradients of all, computed by one rank for all."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        whole, losses, gradients = nn.Sequential(*build(pp)), [], {}
        for inputs, target in shards:
            mine, gradients = models.plain_gradients(whole, inputs, target, microbatches, 1 / len(shards))
            losses.append(mine)
        found = [(losses, gradients)]
    dist.broadcast_object_list(found)
    return found[0]


def compiled(program: Program, shapes: tuple[StageShape, ...], overlap: Overlap) -> Plan:
    """Where there are more ranks than processors, one compiles for all."""
    if dist.get_world_size() == 2:
        return compile(program, shapes, COSTS, overlap)
    plan: list[Any] = [compile(program, shapes, COSTS, overlap) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(plan)
    return plan[0]


def _compare(rank: int, size: int, name: str, pp: int, dp: int, ep: int) -> list[str]:
    """In double precision, bit for bit; on two ranks with every overlap, and with the last in single precision too.

    Without chunks, where a schedule may have them, with two overlaps.
    On more ranks schedules take turns with the two orders.
    """
    problems = []
    last: Overlap = ("pairs", 3)[list(SCHEDULES).index(name) % 2]
    overlaps_of = {True: OVERLAPS, False: OVERLAPS[-1:]} if size == 2 else {True: ["serial", last]}
    for double, overlaps in overlaps_of.items():
        with models.default_dtype(torch.float64 if double else torch.float32):
            *others, program = programs(name, pp, most=size == 2)
            problems += _compared(rank, program, pp, dp, ep, overlaps, 1e-12 if double else 1e-5)
            for other in others if double else ():
                problems += _compared(rank, other, pp, dp, ep, OVERLAPS[::3], 1e-12)
    return problems


def _compared(
    rank: int, program: Program, pp: int, dp: int, ep: int, overlaps: Sequence[Overlap], limit: float
) -> list[str]:
    mesh = init_device_mesh("cpu", (pp, dp, ep), mesh_dim_names=("pp", "dp", "ep"))
    at = mesh.get_coordinate()
    shards = [models.batch(program.microbatches, seed=seed, sequence=7) for seed in range(dp * ep)]
    losses, expected = of_one_process(shards, program.microbatches, pp)
    inputs, target = shards[at[1] * ep + at[2]]
    problems: list[str] = []
    reference: dict[str, Tensor] = {}
    blocks = build(pp, mesh.get_group("ep"), rank)
    engine = make(blocks, program, mesh=mesh, costs=COSTS, verify=False, timeout=30)
    for overlap in overlaps:
        engine.plan = compiled(program, engine.shapes, overlap)
        for parameter in engine.parameters():
            parameter.grad = None
        where = f"{program.name} chunks {program.placement.stages // pp} {overlap}"
        result = engine.step(inputs, target=target)
        found = models.held(engine, nn.Sequential(*blocks))
        problems += [f"{where}: {problem}" for problem in models.apart(found, expected, at[2], ep, limit)]
        reference = reference or found
        problems += [f"{where}: {label} differs from serial" for label in models.equal(found, reference)]
        every = losses[at[1] * ep + at[2]]
        ended = [
            index
            for pipe, stage in program.placement.places(at[0])
            if stage == program.placement.stages - 1
            for index in program.microbatches_of(pipe)
        ]
        for index, loss in zip(ended, result.losses, strict=True):
            torch.testing.assert_close(loss, every[index], rtol=limit, atol=0.0)
        timeline = simulate(engine.plan, COSTS)
        share = program.placement.share
        if result.peak_activations * share != timeline.peak_activations(at[0]):
            problems.append(f"{where}: {result.peak_activations} alive, simulated {timeline.peak_activations(at[0])}")
        if result.peak_held > engine.plan.held(at[0]):  # fewer, where weight gradients were taken early
            problems.append(f"{where}: {result.peak_held} held, planned {engine.plan.held(at[0])}")
        if overlap == "pairs":
            again = engine.evaluate(inputs, target=target)
            problems += [
                f"{where}: evaluate gives another loss"
                for a, b in zip(again.losses, result.losses, strict=True)
                if a != b
            ]
            mean = float(torch.stack([loss for shard in losses for loss in shard]).mean())
            if abs(engine.mean_loss(result) - mean) > 1e-5:
                problems.append(f"{where}: mean loss {engine.mean_loss(result)}, expected {mean}")
    return problems


# One schedule of each sort: chunks in a loop, folded with split backwards, in two directions. The others have more
# stages or expert ranks with eight ranks.
SORTS = ["combined_1f1b", "zb_v", "dualpipe"]
OTHERS = [name for name in SCHEDULES if name not in SORTS]
ALIKE = ["afab", "interleaved_1f1b", "zb_h2", "dualpipev"]  # one of each two that are alike


@pytest.mark.parametrize(
    ("name", "pp", "dp", "ep"),
    [
        ("combined_1f1b", 2, 1, 1),
        *wide(*((name, 2, 1, 1) for name in [*SORTS[1:], *OTHERS])),
        *wide(*((name, 2, 1, 2) for name in ALIKE), *((name, 4, 1, 1) for name in OTHERS)),
        *wide(*((name, 4, 1, 2) for name in SORTS), *((name, 2, 2, 2) for name in SORTS)),
    ],
)
@over(lambda _, pp, dp, ep: pp * dp * ep, timeout=180)
def test_every_schedule(rank: int, size: int, name: str, pp: int, dp: int, ep: int) -> None:
    """On two ranks each sort has the plans that a user's engine has."""
    with all_tries() if size == 2 and name in SORTS else nullcontext():
        problems = _compare(rank, size, name, pp, dp, ep)
    assert not problems, problems


@over(2)
def test_what_ranks_tell_each_other_is_on_the_host_under_any_default_device(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    x, y = models.batch(3)
    found = []
    for device in ("cpu", "meta"):  # the latter stands for a GPU
        model = models.build(choose=[models.top_k])
        program = build_schedule("combined_1f1b", ranks=size, microbatches=3)
        with torch.device(device):
            engine = make(model, program, mesh=mesh, costs=COSTS, timeout=20)
            loss = engine.mean_loss(engine.step(x, target=y))
            norm = engine.clip_gradients(0.1)
            engine.close()
        found.append({"loss": torch.tensor(loss), "norm": norm, **models.gradients(model)})
    problems = models.equal(*found)
    assert not problems, problems
