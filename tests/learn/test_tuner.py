"""The plans of an engine, and what its first steps learn."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b.engine import Engine
from overlap1f1b.learn.planner import Choice, Planner, worth_trying
from overlap1f1b.learn.purpose import Purpose
from overlap1f1b.learn.tuner import Tuner
from overlap1f1b.plan import NodeCosts, Plan, StageShape, compile, fastest, found_orders
from overlap1f1b.schedule import build_schedule, forwards_of
from overlap1f1b.transport.exchange import build_exchange
from tests import models
from tests.engine.test_engine import Delayed
from tests.engines import make
from tests.play.plain import engine_of
from tests.ranks import Ranks, over

PROGRAM = build_schedule("combined_1f1b", microbatches=4)
COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5)
SHAPES = make(models.build(), PROGRAM).shapes


@pytest.fixture
def all_near() -> Iterator[None]:
    """All orders are worth a try, whatever was measured."""
    with patch("overlap1f1b.learn.planner.TRIED_WITHIN", 1e9):
        yield


def plans(*predicted: float, shapes: tuple[StageShape, ...] = SHAPES) -> list[Plan]:
    """Plans of different orders with these predicted times."""
    found = fastest(PROGRAM, shapes, COSTS, 3)
    return [replace(plan, predicted=seconds) for plan, seconds in zip(found, predicted, strict=False)]


def tuner(tries: int = 3, mesh: DeviceMesh | None = None, **options: Any) -> Tuner:
    model = models.build(None if mesh is None else mesh.get_group("ep"))
    return make(model, PROGRAM, mesh=mesh, tries=tries, **options).tuner


def play(of: Tuner, *seconds: float) -> list[Plan]:
    """Let a tuner learn from steps of these times, whose nodes take none; return their plans."""
    played = []
    for makespan in seconds:
        step = of.next_step()
        result = Mock(overlap=Mock(makespan=makespan), times=Mock(launches=(), spans=tuple))
        assert step.plan is not None
        played.append(step.plan)
        of.learn(step, result, dict)
    return played


def trying(plans: list[Plan], of: Tuner) -> Tuner:
    """Let a tuner measure, and find these plans for what it has measured."""
    with patch.object(Planner, "chosen", return_value=Choice(COSTS, plans, {})):
        play(of, 1.0, 1.0)
    return of


def test_steps_are_serial_until_there_are_costs() -> None:
    of = tuner()
    assert of.next_step().purpose is Purpose.WARM
    serial = of.plan
    assert serial is of.plan  # compiled once
    assert serial.fingerprint == compile(PROGRAM, SHAPES, NodeCosts(), "serial").fingerprint
    assert of.choice == f"{PROGRAM.name} serial (to come: warm, measure)"
    of.costs = COSTS
    assert not of.settling
    assert of.plan.fingerprint == compile(PROGRAM, SHAPES, COSTS, 3).fingerprint
    of.costs = None
    assert of.next_step().purpose is Purpose.MEASURE
    assert of.plan.fingerprint == serial.fingerprint


@pytest.mark.parametrize(
    ("options", "coming"),
    [
        ({}, "warm, measure"),
        ({"memory": "1TB"}, "warm, count, measure"),
        ({"parts": "auto"}, "warm, measure, warm, measure, warm, measure"),
        ({"memory": "1TB", "recompute": "auto"}, "warm" + 4 * ", count, measure"),
    ],
)
def test_a_step_takes_an_entry_of_the_list(options: dict[str, Any], coming: str) -> None:
    engine, (inputs, target) = make(models.build(), PROGRAM, tries=0, **options), models.batch(4)
    assert engine.tuner.choice == f"{engine.plan.program.name} serial (to come: {coming})"
    for purpose in coming.split(", "):
        assert engine.tuner.next_step().purpose == purpose
        engine.step(inputs, target=target)
    assert engine.tuner.next_step().purpose is Purpose.SETTLED


@pytest.mark.parametrize(("exchange", "name"), [(1.0, "combined_1f1b"), (7.0, "combined_1f1b+1")])
def test_a_device_warms_up_by_another_forward_only_if_that_gains(exchange: float, name: str) -> None:
    costs, program = NodeCosts.uniform(attention=4.5, experts=2.4, dispatch=exchange), PROGRAM.of(16)
    planner = tuner().planner
    assert planner.ranked(program, SHAPES, costs)[0].program.name == "combined_1f1b+1"  # as it was given
    chosen = replace(planner, sparing=True).ranked(program, SHAPES, costs)
    every = [build_schedule("combined_1f1b", microbatches=16, extra_warmup=extra) for extra in (0, 1)]
    fewer, more = (fastest(program, SHAPES, costs, 3)[0].predicted for program in every)
    assert chosen[0].program.name == name
    assert chosen[0].predicted == (more if more < 0.99 * fewer else fewer)


def test_a_plan_that_is_set_stays_until_costs_are() -> None:
    mine = compile(PROGRAM, SHAPES, COSTS, "pairs")
    of = tuner(plan=mine)
    assert of.plan is mine
    assert not of.settling
    of.costs = COSTS
    assert of.plan is not mine
    other = compile(build_schedule("sequential", microbatches=4), SHAPES, COSTS, 1)
    with pytest.raises(ValueError, match="a plan of 'sequential' for other blocks"):
        of.plan = other


def test_an_evaluation_has_the_forwards_alone() -> None:
    assert {node.kind.value for node in tuner().evaluation_of(4).nodes} == {"F"}


@pytest.mark.parametrize("other", ["combined_1f1b", "sequential"])
@pytest.mark.usefixtures("all_near")
def test_an_evaluation_follows_the_program_that_is_kept(other: str) -> None:
    """Beside an order that is found, fixed schedules are tried; they may begin forwards in another order."""
    program = build_schedule(other, microbatches=4)  # type: ignore[arg-type]
    turns = [compile(PROGRAM, SHAPES, COSTS, "pairs"), compile(program, SHAPES, COSTS, "serial")]
    of = trying(turns, tuner(tries=1))
    before = of.evaluation_of(4)
    play(of, 2.0, 1.0)
    assert of.plan is turns[1]
    assert (of.evaluation_of(4) is before) == (program == PROGRAM)
    assert of.evaluation_of(4).program.name == forwards_of(program).name


def test_far_slower_plans_are_left_out() -> None:
    assert not trying(plans(1.0, 1.11), tuner()).settling  # nothing to compare
    assert [plan.predicted for plan in worth_trying(plans(1.0, 1.0, 1.05, 1.09))] == [1.0, 1.0, 1.05]


def test_plans_that_hold_more_than_there_is_are_not_tried() -> None:
    large, small, other = (
        replace(plan, peak_bytes=(size,)) for plan, size in zip(plans(1.0, 1.0, 1.05), (9.0, 4.0, 5.0), strict=True)
    )
    assert worth_trying([large, small, other], rooms=[5.0]) == [small, other]
    assert worth_trying([large, small, other], rooms=[3.0]) == [small]


def test_one_order_under_two_names_is_tried_once() -> None:
    first, second = plans(1.0, 1.05)
    assert worth_trying([first, second, replace(first, order="another")]) == [first, second]


def test_one_slow_step_does_not_decide() -> None:
    first, second = plans(1.0, 1.05)
    of = trying([first, second], tuner())
    assert play(of, 1.0, 1.1, 9.0, 1.1, 1.0, 1.1) == [first, second] * 3
    assert not of.settling
    assert [(one.plan, one.seconds) for one in of.tried] == [(first, 1.0), (second, 1.1)]


@over(2)
def test_the_slowest_rank_counts_on_all(rank: int, size: int) -> None:
    """Rank 1 alone finds the first plan slow."""
    of = tuner(1, init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)))
    _, second = turns = plans(1.0, 1.0, shapes=of.shapes)
    trying(turns, of)
    play(of, 1.0 + 2 * rank, 2.0 - rank)
    assert of.plan.fingerprint == second.fingerprint
    assert [one.seconds for one in of.tried] == [2.0, 3.0], of.tried


@over(2)
def test_times_are_shared_with_ranks_outside_of_the_mesh(rank: int, size: int) -> None:
    """Two engines that play alike: the times of the first rank count."""
    of, (first, second) = tuner(1), plans(1.0, 1.0)
    of.share_plans_with([list(range(size))])
    trying([first, second], of)
    play(of, 1.0 + 2 * rank, 2.0)
    assert of.plan is first
    assert [one.seconds for one in of.tried] == [1.0, 2.0], of.tried


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
    engine = make(model, PROGRAM, tries=2)
    steps, reference = 0, dict[str, Tensor]()
    while engine.tuner.settling:
        if steps == 2:  # measured: the plan that is predicted to be the fastest comes next
            model[1].engine, model[1].order = engine, engine.plan.order
            assert engine.tuner.choice.endswith("(tried with others in turns; the fastest stays)")
        model.zero_grad()
        engine.step(inputs, target=target)
        steps += 1
        reference = reference or models.gradients(model)
        assert not models.equal(models.gradients(model), reference)
    assert len(engine.tuner.tried) > 1
    assert steps == 2 + 2 * len(engine.tuner.tried)
    assert engine.plan is engine.tuner.tried[0].plan
    assert engine.plan.order != model[1].order
    name = f"{PROGRAM.name} {engine.plan.order}"
    assert engine.tuner.choice.startswith(f"{name} (measured step: {name}: ")


@pytest.mark.parametrize("given", ["costs", "tries"])
def test_nothing_is_tried(given: str) -> None:
    """Costs that are given are the user's word; so is ``tries=0``."""
    inputs, target = models.batch(4)
    options = {"costs": COSTS} if given == "costs" else {"tries": 0}
    engine = make(models.build(), PROGRAM, **options)  # type: ignore[arg-type]
    for _ in range(2):
        engine.step(inputs, target=target)
    assert not engine.tuner.settling
    assert engine.tuner.tried == ()
    assert "predicted step: " in engine.tuner.choice


@pytest.mark.usefixtures("all_near")
def test_plans_of_the_chosen_number_of_parts_are_tried() -> None:
    """The plans that were compiled to choose are not compiled again."""
    inputs, target = models.batch(4)
    engine, steps = make(models.build(), PROGRAM, parts="auto", tries=1), 0
    with patch.object(Planner, "ranked", autospec=True, side_effect=Planner.ranked) as compiled:
        while engine.tuner.settling:
            engine.step(inputs, target=target)
            steps += 1
    assert steps == 6 + len(engine.tuner.tried) > 7
    assert compiled.call_count == 3
    assert {block.parts for block in engine.plan.shapes[0] if block.expert_calls} == {engine.tuner.parts}
    before, engine.costs = engine.tuner.parts, None  # measured anew for the parts in use
    while engine.tuner.settling:
        engine.step(inputs, target=target)
    engine.step(inputs, target=target)
    assert engine.tuner.parts == before


@pytest.mark.usefixtures("all_near")
def test_a_plan_that_is_set_ends_the_trials() -> None:
    inputs, target = models.batch(4)
    engine = make(models.build(), PROGRAM)
    for _ in range(2):
        engine.step(inputs, target=target)
    assert engine.tuner.settling
    mine = fastest(PROGRAM, engine.shapes, COSTS, "pairs")[0]
    engine.plan = mine
    engine.step(inputs, target=target)
    assert not engine.tuner.settling
    assert engine.plan is mine
    engine.costs = None  # all is measured anew
    assert engine.tuner.settling


def test_a_plan_for_other_blocks_is_refused_before_the_first_step() -> None:
    engine = make(models.build(layers=1), PROGRAM)
    other = make(models.build(layers=2), PROGRAM, costs=COSTS).plan
    with pytest.raises(ValueError, match="for other blocks"):
        engine.plan = other


def _agreeing(rank: int, size: int) -> tuple[list[str], list[str], str, bool]:
    """Several microbatches over two ranks, with exchanges that take a random time and uneven routing."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    model = models.build(group=mesh.get_group("ep"))
    exchange = Delayed(build_exchange(dist.new_group(list(range(size)))), seed=rank)
    engine = engine_of(model, mesh, costs=None, program=PROGRAM, loss_fn=models.loss_fn, exchange=exchange)
    inputs, target = models.batch(PROGRAM.microbatches, seed=rank)
    problems, played, reference = list[str](), list[str](), dict[str, Tensor]()
    searched = patch("overlap1f1b.plan.fastest", wraps=fastest)
    with patch("overlap1f1b.learn.planner.TRIED_WITHIN", 1e9), searched as search:
        while engine.tuner.settling:
            played.append(engine.plan.fingerprint)
            model.zero_grad()
            engine.step(inputs, target=target)
            reference = reference or models.gradients(model)
            problems += models.equal(models.gradients(model), reference)
    return problems, played, engine.plan.fingerprint, search.called


def test_all_ranks_try_and_keep_what_the_first_has_searched(ranks2: Ranks) -> None:
    (problems, played, kept, searched), other = ranks2.run(_agreeing, timeout=60)
    assert problems == other[0] == []
    assert (played, kept) == other[1:3]
    assert (searched, other[3]) == (True, False)
    assert kept in played[2:]
    assert len(set(played[2:])) > 1


def _slowly(rank: int, size: int) -> list[str]:
    """A search that takes longer than any rank may wait for another."""

    def search(*args: Any, progress: Callable[[float], None], **options: Any) -> list[Plan]:
        for part in range(12):
            time.sleep(0.5)
            progress(part / 12)
        return found_orders(*args, progress=progress, **options)

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    program = build_schedule("auto", microbatches=4, seconds=0.1)
    engine = engine_of(
        models.build(group=mesh.get_group("ep")), mesh, costs=None, program=program, loss_fn=models.loss_fn, timeout=4
    )
    inputs, target = models.batch(4, seed=rank)
    with patch("overlap1f1b.learn.planner.found_orders", search):
        while engine.tuner.settling:
            engine.step(inputs, target=target)
    return engine.tuner.choice.split()[:1]


@pytest.mark.wide
def test_a_search_may_take_longer_than_the_limit_of_waits(ranks2: Ranks) -> None:
    one, other = ranks2.run(_slowly, timeout=100)
    assert one == other != []


class Starved(models.Block):
    """Runs out of memory where it is told to."""

    starves = False

    def forward(self, x: Tensor) -> Tensor:
        if self.starves:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(x)


def _starving(rank: int, size: int) -> tuple[str, int]:
    """What a rank says when the last one runs out of memory, and the bytes that a step before has held here."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    model = models.build(group=mesh.get_group("ep"), block=Starved)
    engine = engine_of(model, mesh, costs=None, program=PROGRAM, loss_fn=models.loss_fn, memory="1TB", tries=0)
    inputs, target = models.batch(4, seed=rank)
    while engine.tuner.settling:
        engine.step(inputs, target=target)
    model[1].starves = rank == size - 1
    with pytest.raises(RuntimeError) as caught:
        engine.step(inputs, target=target)
    assert isinstance(caught.value, torch.OutOfMemoryError) == (rank == size - 1)
    return "\n".join((str(caught.value), *caught.value.__notes__)), int(engine.tuner.counted.fits)


def test_a_step_without_memory_says_on_all_ranks_which_limit_would_do(ranks2: Ranks) -> None:
    (one, _), (other, fits) = ranks2.run(_starving, timeout=60)
    for said in (one, other):
        assert f"allowed: memory='{math.ceil(fits / 1e5) / 10:g}MB', which a step before it held, " in said, said
