"""The generators of the loop around a step: as a plain loop of the same model leaves them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b import Engine, build_schedule
from overlap1f1b.play.feed import Feed
from tests import models
from tests.engines import COSTS, make
from tests.ranks import Ranks, over
from tests.tiers import first

MICROBATCHES, STEPS = 3, 12
NAMES = {"dp": (), "pp": (2,), "ep": (2,), "pp ep": (2, 2)}


def drawn() -> tuple[Tensor, Tensor]:
    """Return a batch, drawn as loops draw it: by torch's generator, NumPy's and Python's."""
    rows = torch.randint(models.V, (MICROBATCHES * 2, 7)) + np.random.randint(2) + random.randrange(2)
    return rows.remainder(models.V), torch.randint(models.V, rows.shape)


def seed_data(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def states() -> list[Any]:
    """Return the states of all generators."""
    kind, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), *rest]


def plain_loop(model: nn.Module, group: dist.ProcessGroup | None) -> list[float]:
    """Return the losses of a plain loop, in which ranks along "ep" sum gradients of all but their experts."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()
    for _ in range(STEPS):
        mine, _ = models.plain_gradients(model, *drawn(), MICROBATCHES, 1.0 if group is None else 1 / group.size())
        for name, parameter in model.named_parameters():
            if group is not None and "experts" not in name and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(mine).mean()))
    return losses


def loop(engine: Engine) -> list[float]:
    """Return the losses of the same loop by an engine, on ranks with the last stage."""
    optimizer, losses = torch.optim.AdamW(engine.parameters(), lr=1e-2), list[float]()
    for _ in range(STEPS):
        inputs, target = drawn()
        result = engine.step(inputs, target=target)
        engine.evaluate(inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(result.loss)] if result.losses else []
    return losses


def engine_over(mesh: DeviceMesh | None, model: nn.Module, **options: Any) -> Engine:
    ranks = 1 if mesh is None or "pp" not in (mesh.mesh_dim_names or ()) else mesh["pp"].size()
    program = build_schedule("combined_1f1b", ranks=ranks, microbatches=MICROBATCHES)
    return make(model, program, mesh=mesh, **options)


def mesh_of(names: str) -> DeviceMesh | None:
    shape = NAMES[names]
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(names.split())) if shape else None


def differs(names: str, **options: Any) -> list[str]:
    """Return what differs from a plain loop in which nothing draws but the loop itself."""
    mesh, found = mesh_of(names), list[str]()
    group = mesh.get_group("ep") if mesh is not None and "ep" in names else None
    number = 0 if group is None else group.rank()  # ranks of a pipeline have the same data
    model = models.build(group)
    seed_data(number)
    expected, after = plain_loop(model, group), states()
    engine = engine_over(mesh, models.build(group), **options)
    seed_data(number)
    losses = loop(engine)
    found += ["generators"] * (states() != after)
    found += [f"losses {losses} for {expected}"] * (losses not in ([], expected))
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "measured": {},  # steps that measure, try plans and are compared with a plain loop
    "costs": {"costs": COSTS},
    "recompute": {"recompute": "block"},
    "limited": {"memory": "1GB"},
}


@pytest.mark.parametrize("options", first(OPTIONS, "measured", "recompute"))
def test_data_are_those_of_a_plain_loop(options: str) -> None:
    assert not differs("dp", **OPTIONS[options])


@pytest.mark.parametrize("names", ["pp", "ep"])
@pytest.mark.parametrize("options", first(OPTIONS, "measured"))
def test_data_are_those_of_a_plain_loop_over_ranks(ranks2: Ranks, names: str, options: str) -> None:
    assert ranks2.run(_differs, names, OPTIONS[options], timeout=120) == [[], []]


@pytest.mark.wide
def test_data_are_those_of_a_plain_loop_over_four_ranks(ranks4: Ranks) -> None:
    assert ranks4.run(_differs, "pp ep", {}, timeout=200) == [[], [], [], []]


def _differs(rank: int, size: int, names: str, options: dict[str, Any]) -> list[str]:
    return differs(names, **options)


class Noise(nn.Module):
    """Adds noise while ``on``; ``told`` has its draws."""

    def __init__(self, *, on: bool) -> None:
        super().__init__()
        self.inner, self.on, self.told = nn.Linear(models.H, models.H), on, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if not self.on:
            return x
        noise = torch.rand_like(x)
        self.told.append(float(noise.flatten()[0]))
        return x + noise


def noisy(*, on: bool = True) -> nn.Sequential:
    """A model whose first blocks alone draw: of two stages the first."""
    model = models.build()
    return nn.Sequential(model[0], Noise(on=on), *model[1:])


def after_numbers(count: int, before: Tensor) -> Tensor:
    """Return the state of a generator behind some numbers."""
    generator = torch.Generator()
    generator.set_state(before)
    for _ in range(count):
        torch.randint(2**62, (), generator=generator)
    return generator.get_state()


def moves(call: Callable[[], object]) -> int:
    """Return how many numbers a call takes from torch's generator, up to two; -1 for something else."""
    before = torch.get_rng_state()
    call()
    now = torch.get_rng_state()
    return next((count for count in range(3) if torch.equal(after_numbers(count, before), now)), -1)


def _one_number(rank: int, size: int, recompute: str) -> list[Any]:
    """Return what steps and evaluations take of the generator, and the first draws of each microbatch of each."""
    torch.manual_seed(3)
    model = noisy()
    engine = engine_over(mesh_of("pp" if size > 1 else "dp"), model, recompute=recompute, verify=False)
    inputs, target = models.batch(MICROBATCHES)
    taken = []
    for _ in range(2):
        taken.append(moves(lambda: engine.step(inputs, target=target)))
        taken.append(moves(lambda: engine.evaluate(inputs, target=target)))  # as in a plain loop, it draws
        model.eval()
        taken.append(moves(lambda: engine.evaluate(inputs, target=target)))
        model.train()
    return [taken, model[1].told]


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_draws_takes_one_number_on_all_ranks(ranks2: Ranks, ranks: int, recompute: str) -> None:
    every = [_one_number(0, 1, recompute)] if ranks == 1 else ranks2.run(_one_number, recompute, timeout=60)
    assert [taken for taken, _ in every] == [[1, 1, 1, 1, 1, 1]] * ranks, every  # noise is there in evaluation, too
    told = every[0][1]
    assert len(set(told)) == len(told) == 2 * MICROBATCHES * 3  # each microbatch of each call has numbers of its own


def _dropout(rank: int, size: int) -> list[int]:
    torch.manual_seed(3)
    model = models.build(dropout=0.3)
    engine = engine_over(mesh_of("pp"), model)
    inputs, target = models.batch(MICROBATCHES)
    taken = [moves(lambda: engine.step(inputs, target=target)) for _ in range(STEPS)]
    model.eval()
    return [*taken, moves(lambda: engine.evaluate(inputs, target=target))]


def test_dropout_in_steps_that_are_compared(ranks2: Ranks) -> None:
    assert ranks2.run(_dropout, timeout=60) == [[1] * STEPS + [0]] * 2


@over(2, timeout=60)
def test_ranks_of_a_pipeline_go_on_alike_when_one_begins_to_draw(rank: int, size: int) -> None:
    model = noisy(on=False)
    engine = engine_over(mesh_of("pp"), model, costs=COSTS)
    inputs, target = models.batch(MICROBATCHES)
    torch.manual_seed(3)
    taken = []
    for step in range(4):
        model[1].on = step > 1
        taken.append(moves(lambda: engine.step(inputs, target=target)))
    assert taken == [0, 0, 0, 1], taken  # in the first step with noise the other rank does not know of it


def test_what_a_feed_draws_is_the_loops_own() -> None:
    """Inputs that are drawn when a microbatch asks for them go on from step to step, beside a block that draws."""
    model, every = noisy(), list[Tensor]()
    engine = engine_over(None, model, verify=False)

    def arguments_of(stage: int, microbatch: int) -> dict[str, Any]:
        every.append(torch.randint(models.V, (2, 7)))
        return {"inputs": every[-1], "target": every[-1], "loss_fn": models.loss_fn, "loss_grad": 1.0}

    for _ in range(3):
        engine.play(lambda: Feed(arguments_of, dict.fromkeys(range(MICROBATCHES), 1 / MICROBATCHES), None))
    assert len({tuple(rows.flatten().tolist()) for rows in every}) == 3 * MICROBATCHES
