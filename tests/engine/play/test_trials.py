"""Plans that are tried in steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.engine.play.plans import Plans
from overlap1f1b.engine.play.trials import Trials, worth_trying
from overlap1f1b.plan import BlockShape, NodeCosts, Plan, fastest
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.exchange import build_exchange
from overlap1f1b.transport.mesh import Mesh
from tests import models
from tests.engine.run.plain import engine_of
from tests.engine.test_engine import Delayed
from tests.engines import make
from tests.ranks import Ranks

PROGRAM = build_schedule("combined_1f1b", microbatches=4)
COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5)


@pytest.fixture
def all_near() -> Iterator[None]:
    """All orders are worth a try, whatever was measured."""
    with patch("overlap1f1b.engine.play.trials.WITHIN", 1e9):
        yield


def plans(*predicted: float) -> list[Plan]:
    """Plans of different orders with these predicted times."""
    found = fastest(PROGRAM, (BlockShape(1),), COSTS, 3)
    return [replace(plan, predicted=seconds) for plan, seconds in zip(found, predicted, strict=False)]


def test_plans_take_turns() -> None:
    first, second = plans(1.0, 1.05)
    trials = Trials([first, second], 2)
    played = []
    while trials.open:
        played.append(trials.plan)
        trials.note(1.0)
    assert played == [first, second, first, second]


def test_far_slower_plans_are_left_out() -> None:
    assert len(worth_trying(plans(1.0, 1.11))) == 1
    assert not Trials(worth_trying(plans(1.0, 1.11)), 3).open  # nothing to compare
    assert [plan.predicted for plan in worth_trying(plans(1.0, 1.0, 1.05, 1.09))] == [1.0, 1.0, 1.05]


def test_one_order_under_two_names_is_tried_once() -> None:
    first, second = plans(1.0, 1.05)
    assert worth_trying([first, replace(first, order="another"), second]) == [first, second]


def test_one_slow_step_does_not_decide() -> None:
    first, second = plans(1.0, 1.05)
    trials = Trials([first, second], 3)
    for seconds in (1.0, 1.1, 9.0, 1.1, 1.0, 1.1):
        trials.note(seconds)
    assert [(one.plan, one.seconds) for one in trials.tried(Mesh(None))] == [(first, 1.0), (second, 1.1)]


def _kept(rank: int, size: int) -> tuple[str, list[float]]:
    """Rank 1 alone finds the first plan slow."""
    mesh = Mesh(init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)))
    trials = Trials(plans(1.0, 1.0), 1)
    for seconds in (1.0 + 2 * rank, 2.0 - rank):
        trials.note(seconds)
    tried = trials.tried(mesh)
    return tried[0].plan.order, [one.seconds for one in tried]


def test_the_slowest_rank_counts_on_all(ranks2: Ranks) -> None:
    assert ranks2.run(_kept) == [(plans(1.0, 1.0)[1].order, [2.0, 3.0])] * 2


def test_times_may_be_shared_with_ranks_outside_of_the_mesh() -> None:
    first, second = plans(1.0, 1.0)
    trials = Trials([first, second], 1)
    for seconds in (1.0, 2.0):
        trials.note(seconds)
    assert trials.tried(Mesh(None), lambda mine: mine[::-1])[0].plan is second


class Sluggish(models.Block):
    """Sleeps under one order of an engine."""

    engine: Engine | None = None
    order = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.engine is not None and self.engine.plan.order == self.order:
            time.sleep(0.02)
        return super().forward(x)


@pytest.mark.usefixtures("all_near")
def test_the_engine_keeps_the_plan_that_is_the_fastest_in_fact() -> None:
    inputs, target = models.batch(4)
    model = models.build(block=Sluggish)
    engine = Engine(model, PROGRAM, loss_fn=models.loss_fn, options=EngineOptions(tries=2))
    steps, reference = 0, dict[str, Tensor]()
    while engine.settling:
        if steps == 2:  # measured: the plan that is predicted to be the fastest comes next
            model[1].engine, model[1].order = engine, engine.plan.order
        model.zero_grad()
        engine.step(inputs, target=target)
        steps += 1
        reference = reference or models.gradients(model)
        assert not models.equal(models.gradients(model), reference)
    assert len(engine.tried) > 1
    assert steps == 2 + 2 * len(engine.tried)
    assert engine.plan is engine.tried[0].plan
    assert engine.plan.order != model[1].order
    name = f"{PROGRAM.name} {engine.plan.order}"
    assert engine.choice.startswith(f"{name} (measured step: {name}: ")


@pytest.mark.parametrize("given", ["costs", "tries"])
def test_nothing_is_tried(given: str) -> None:
    """Costs that are given are the user's word; so is ``tries=0``."""
    inputs, target = models.batch(4)
    options = {"costs": COSTS} if given == "costs" else {"tries": 0}
    engine = make(models.build(), PROGRAM, loss_fn=models.loss_fn, **options)  # type: ignore[arg-type]
    for _ in range(2):
        engine.step(inputs, target=target)
    assert not engine.settling
    assert engine.tried == ()
    assert "predicted step: " in engine.choice


@pytest.mark.usefixtures("all_near")
def test_plans_of_the_chosen_number_of_parts_are_tried() -> None:
    """The plans that were compiled to choose are not compiled again."""
    inputs, target = models.batch(4)
    engine, steps = (
        Engine(models.build(), PROGRAM, loss_fn=models.loss_fn, options=EngineOptions(parts="auto", tries=1)),
        0,
    )
    with patch.object(Plans, "_compiled_all", autospec=True, side_effect=Plans._compiled_all) as compiled:
        while engine.settling:
            engine.step(inputs, target=target)
            steps += 1
    assert steps == 6 + len(engine.tried) > 7
    assert compiled.call_count == 3
    assert {block.parts for block in engine.plan.shapes[0] if block.seams} == {engine.parts_choice.parts}


@pytest.mark.usefixtures("all_near")
def test_a_plan_that_is_set_ends_the_trials() -> None:
    inputs, target = models.batch(4)
    engine = Engine(models.build(), PROGRAM, loss_fn=models.loss_fn)
    for _ in range(2):
        engine.step(inputs, target=target)
    assert engine.settling
    mine = fastest(PROGRAM, engine.shapes, COSTS, "pairs")[0]
    engine.plan = mine
    engine.step(inputs, target=target)
    assert not engine.settling
    assert engine.plan is mine
    engine.costs = None  # all is measured anew
    assert engine.settling


def _agreeing(rank: int, size: int) -> tuple[list[str], list[str], str]:
    """Several microbatches over two ranks, with exchanges that take a random time and uneven routing."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    model = models.build(group=mesh.get_group("ep"))
    exchange = Delayed(build_exchange(dist.new_group(list(range(size)))), seed=rank)
    engine = engine_of(model, mesh, costs=None, program=PROGRAM, loss_fn=models.loss_fn, exchange=exchange)
    inputs, target = models.batch(PROGRAM.microbatches, seed=rank)
    problems, played, reference = list[str](), list[str](), dict[str, Tensor]()
    with patch("overlap1f1b.engine.play.trials.WITHIN", 1e9):
        while engine.settling:
            played.append(engine.plan.fingerprint)
            model.zero_grad()
            engine.step(inputs, target=target)
            reference = reference or models.gradients(model)
            problems += models.equal(models.gradients(model), reference)
    return problems, played, engine.plan.fingerprint


def test_all_ranks_try_and_keep_the_same(ranks2: Ranks) -> None:
    (problems, played, kept), other = ranks2.run(_agreeing, timeout=60)
    assert problems == other[0] == []
    assert (played, kept) == other[1:]
    assert kept in played[2:]
    assert len(set(played[2:])) > 1


@pytest.mark.parametrize("tries", [-1, 1.5, True, "3"])
def test_wrong_numbers_are_refused(tries: object) -> None:
    with pytest.raises(ValueError, match=r"^tries.*allowed: "):
        Engine(models.build(), PROGRAM, loss_fn=models.loss_fn, options=EngineOptions(tries=tries))  # type: ignore[arg-type]
