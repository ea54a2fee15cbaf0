"""One engine for any number of microbatches."""

import random
import time
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b.engine import Engine
from overlap1f1b.learn.check import Verification
from overlap1f1b.learn.tuner import MOST_NUMBERS
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.groups import Groups
from tests import models
from tests.engines import COSTS, make, said_of
from tests.play.test_step_memory import _held
from tests.ranks import over
from tests.tiers import wide


def fresh(mesh: DeviceMesh, number: int) -> tuple[list[torch.Tensor], float]:
    """Gradients and evaluation of an engine that plays this number alone, one microbatch after another."""
    model = models.build(mesh.get_group("ep"))
    program = build_schedule("sequential", ranks=2, microbatches=number)
    with make(model, program, mesh=mesh, overlap="serial", costs=COSTS, verify=False, timeout=60) as engine:
        inputs, target = models.batch(number, seed=mesh.get_local_rank("ep"))
        engine.step(inputs, target=target)
        return [p.grad for p in engine.parameters() if p.grad is not None], mean(engine, inputs, target, number)


def mean(engine: Engine, inputs: torch.Tensor, target: torch.Tensor, number: int) -> float:
    return engine.mean_loss(engine.evaluate(inputs, target=target, microbatches=number))


@pytest.mark.parametrize(("ranks", "steps", "most"), [(2, 16, 4), *wide((4, 100, 9))])
@over(lambda ranks, *_: ranks, timeout=280)
def test_any_number_is_played_by_one_engine(rank: int, size: int, ranks: int, steps: int, most: int) -> None:
    """Numbers at random; after the measured steps none is serial, nothing is made, and nothing grows."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "ep"))
    expected = {number: fresh(mesh, number) for number in range(1, most + 1)}
    model = models.build(mesh.get_group("ep"))
    engine = make(model, build_schedule("combined_1f1b", ranks=2, microbatches=4), mesh=mesh, tries=1, timeout=60)
    draw, seen, opened, sizes = random.Random(7), set[int](), dict[int, int](), []
    with (
        patch.object(Groups, "new", side_effect=AssertionError("a new communicator")),
        patch.object(Verification, "play", autospec=True, side_effect=Verification.play) as verified,
    ):
        for step in range(steps):
            number = draw.randint(1, most)
            where = f"step {step} of {number} microbatches"
            verified.reset_mock()
            inputs, target = models.batch(number, seed=mesh.get_local_rank("ep"))
            model.zero_grad()
            engine.step(inputs, target=target, microbatches=number)
            found = [p.grad for p in engine.parameters() if p.grad is not None]
            seen.add(number)
            assert step < 1 or engine.costs is not None, f"{where} is serial"
            if verified.call_count:  # the first number's plans, and those that open more microbatches than any before
                most_open = engine.tuner.loops.verified[verified.call_args.args[1].plan.fingerprint][2]
                again = opened and number != next(iter(opened)) and most_open <= max(opened.values())
                assert not again, f"{where} is compared with a serial one"
                opened[number] = max(most_open, opened.get(number, 0))
            grads, loss = expected[number]
            assert len(found) == len(grads), where
            assert all(map(torch.equal, found, grads)), where
            assert step % 10 < 9 or mean(engine, inputs, target, number) == loss, where
            del grads, found
            if step in (steps // 2, steps - 1):
                sizes.append(min(_held() for _ in range(5) if not time.sleep(0.05)))
    (tensors, _, *early), (last, _, *late) = sizes  # bytes vary with the number
    assert len(seen) == most
    assert late <= early, sizes
    assert last <= tensors, sizes


def test_costs_hold_for_an_unseen_number() -> None:
    """Nodes are measured in two steps, whatever their numbers; then an unseen one has a plan of its own."""
    engine = make(models.build(), build_schedule("combined_1f1b", microbatches=4), tries=0)
    for number, measured in ((3, False), (5, True), (2, True)):
        engine.step(*models.batch(number), microbatches=number)
        assert (engine.costs is not None) is measured is not engine.tuner.settling
        assert engine.program.microbatches == engine.microbatches == number
    engine.microbatches = 7
    assert engine.plan.program == build_schedule("combined_1f1b", microbatches=7)
    assert engine.plan.predicted > 0  # by the costs


def test_few_plans_are_kept() -> None:
    engine = make(models.build(), build_schedule("combined_1f1b", microbatches=4), costs=COSTS)
    mine = engine.plan = engine.plan
    engine.microbatches = 1
    first = engine.plan
    for number in range(2, MOST_NUMBERS + 1):
        engine.microbatches = number
    engine.microbatches = 1
    assert engine.plan is first
    for number in range(2, MOST_NUMBERS + 2):
        engine.microbatches = number
    engine.microbatches = 1
    assert engine.plan is not first
    engine.microbatches = 4
    assert engine.plan is mine  # one that is set stays


def test_an_evaluation_of_another_number_leaves_the_next_step() -> None:
    engine = make(models.build(), build_schedule("combined_1f1b", microbatches=4), costs=COSTS)
    assert len(engine.evaluate(*models.batch(6), microbatches=6).losses) == 6
    assert engine.microbatches == 4


@pytest.mark.parametrize(("name", "number", "allowed"), [("combined_1f1b", 0, "1"), ("dualpipe", 7, "6 or 8")])
def test_impossible_numbers_are_refused(name: str, number: int, allowed: str) -> None:
    program = build_schedule(name, ranks=1 if name == "combined_1f1b" else 2, microbatches=4)
    with pytest.raises(ValueError, match=f"microbatches.*{allowed}"):
        program.of(number)


@over(2)
def test_ranks_with_other_numbers_are_told(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    program = build_schedule("combined_1f1b", microbatches=4)
    engine = make(models.build(mesh.get_group("ep")), program, mesh=mesh, timeout=20)
    inputs, target = models.batch(4)
    engine.step(inputs, target=target)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        engine.step(inputs, target=target, microbatches=2 + 2 * rank)
    assert "microbatches=2 on rank ep 0, after 4, and another number" in said_of(caught.value)
