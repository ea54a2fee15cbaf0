"""The exact model against the clock, and orders that are searched for against proven optima."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from overlap1f1b.plan import (
    BlockShape,
    Budget,
    NodeCosts,
    Plan,
    StageShape,
    compile,
    fastest,
    pipeline_bound,
    play_ranks,
)
from overlap1f1b.plan.beam import Beam
from overlap1f1b.plan.compiler import NO_SLOWER
from overlap1f1b.plan.precedence import Precedence
from overlap1f1b.schedule import Placement, build_schedule
from overlap1f1b.schedule.placement import SINGLE
from tests.plan.cases import DENSE, MOE, chains_of, table_bytes, table_costs
from tests.plan.rules import broken_rules
from tests.plan.tries import all_tries
from tests.programs import combined_1f1b

pytest.importorskip("ortools")

from tests.plan.optimum import Optimum, optimum

OPTIMA = {  # layers, microbatches, exchange over compute, live ones
    (1, 1, 1, 3): 38,
    (1, 2, 1, 3): Fraction("54.5"),
    (1, 3, 1, 2): 78,
    (1, 3, 2, 3): 135,
    (2, 2, 1, 3): Fraction("103.5"),
    (4, 1, 0.25, 3): Fraction("95.8125"),
    (4, 1, 1, 3): 143,
}
"""Times of the fastest orders of experts : attention 4 : 3."""


def assert_proven(found: Optimum, placement: Placement, costs: NodeCosts) -> None:
    """The clock plays the order in the time that the solver says, and no order is faster."""
    assert found.proven
    spans = play_ranks(found.ranks, placement, costs)
    assert max(span.end for rank in spans for span in rank) == found.value


def assert_bounded(
    found: Optimum, placement: Placement, microbatches: int, shape: StageShape, costs: NodeCosts
) -> None:
    """What is said of every order holds of the fastest."""
    assert pipeline_bound(placement, microbatches, shape, costs) <= found.value


@pytest.mark.parametrize("case", OPTIMA, ids=str)
def test_the_solver_proves_an_optimum_and_agrees_with_the_clock(case: tuple[int, int, float, int]) -> None:
    layers, microbatches, ratio, live = case
    costs, shape = table_costs(ratio), (MOE,) * layers
    found = optimum(SINGLE, microbatches, shape, costs, live=[live])
    assert_proven(found, SINGLE, costs)
    assert_bounded(found, SINGLE, microbatches, shape, costs)
    assert found.value == OPTIMA[case]
    program = combined_1f1b(microbatches, live - 2)
    plan = Plan(program, 3, "", (shape,), (tuple(found.ranks[0]),), found.value)
    assert not list(broken_rules(plan))
    with all_tries():
        assert found.value <= compile(program, shape, costs, 3).predicted <= 1.01 * found.value


def test_a_search_is_never_slower_and_holds_no_more_where_it_is_as_fast() -> None:
    """Than list scheduling: over ratios of exchange and compute, on one rank and on two."""
    lighter = faster = 0
    for ranks, microbatches, ratio in product((1, 2), (3, 6), (0.25, 0.5, 1.0)):
        program, costs = build_schedule("combined_1f1b", ranks=ranks, microbatches=microbatches), table_costs(ratio)
        with all_tries():
            plan = compile(program, (MOE, DENSE), costs, 3)
        with all_tries(searched=False):
            scheduled = compile(program, (MOE, DENSE), costs, 3)
        assert not list(broken_rules(plan))
        assert plan.predicted <= scheduled.predicted
        faster += plan.predicted < scheduled.predicted
        if plan.predicted == scheduled.predicted:
            assert plan.memory() <= scheduled.memory()
            lighter += plan.memory() < scheduled.memory()
    assert faster >= 6
    assert lighter


@pytest.mark.parametrize(
    ("ranks", "layers", "microbatches", "ratio", "least"),
    [(1, 1, 3, 1, 64), (1, 1, 4, 0.5, 74), (1, 2, 2, 0.5, 124), (2, 1, 3, 0.5, 94)],
)
def test_orders_hold_the_least_bytes_of_all_that_are_as_fast(
    ranks: int, layers: int, microbatches: int, ratio: float, least: float
) -> None:
    """No order within 0.5 % of the time of the fastest holds less than ``least``, and ours holds no more."""
    extra = {"extra_warmup": 1} if ranks == 1 else {}
    program = build_schedule("combined_1f1b", ranks=ranks, microbatches=microbatches, **extra)
    shape = (MOE,) * layers
    costs = replace(table_costs(ratio), bytes=table_bytes(ranks, layers))
    with all_tries():
        plan, *others = fastest(program, shape, costs, 3)
    within = NO_SLOWER * min(other.predicted for other in (plan, *others))
    live = program.peak_activations
    found = optimum(program.placement, microbatches, shape, costs, live=live, known=plan.ranks, within=within)
    assert found.proven
    assert max(costs.peak_bytes(found.ranks)) == found.value == least
    assert plan.predicted <= within
    assert plan.memory() == max(costs.peak_bytes(plan.ranks)) == least


def test_a_beam_keeps_within_the_rooms() -> None:
    """In less room a step takes longer, and there is no step within less than a microbatch needs."""
    program, shape = combined_1f1b(4, 1), (MOE, DENSE)
    costs = replace(table_costs(1), bytes=table_bytes(1, 2))
    plan = compile(program, shape, costs, 3)
    needs = Precedence(chains_of(shape), costs, plan.ranks, program.peak_activations, 2)
    times = dict[float, float]()
    for room in (plan.memory(), 0.75 * plan.memory(), 10.0):
        times[room], starts = Beam(needs, [room]).run(20, 0.0, float("inf"), Budget())
        if times[room] < float("inf"):
            assert max(costs.peak_bytes(needs.issued(starts, counts_block=False))) <= room
    assert sorted(times.values()) == list(times.values())
    assert times[10.0] == float("inf")


@pytest.mark.parametrize(
    "shape",
    [(BlockShape(1, parts=2),), (DENSE, MOE), (BlockShape(1, recompute="experts"),), (BlockShape(1, split=False),)],
    ids=["parts", "a dense layer", "recomputation", "weight gradients not apart"],
)
def test_the_solver_agrees_with_the_clock_on_further_blocks(shape: StageShape) -> None:
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=4, counts=0.25, aggregate=0.5, dense=5).in_parts(2)
    found = optimum(SINGLE, 2, shape, costs, live=[2])
    assert_proven(found, SINGLE, costs)
    assert_bounded(found, SINGLE, 2, shape, costs)
    assert found.value <= compile(combined_1f1b(2, 0), shape, costs, 3).predicted


def test_the_solver_agrees_with_the_clock_on_several_ranks() -> None:
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5, send=1)
    program = build_schedule("1f1b", ranks=2, microbatches=2)
    found = optimum(program.placement, 2, (MOE,), costs, live=program.peak_activations)
    assert_proven(found, program.placement, costs)
    assert_bounded(found, program.placement, 2, (MOE,), costs)
    assert found.value <= compile(program, (MOE,), costs, 3).predicted
