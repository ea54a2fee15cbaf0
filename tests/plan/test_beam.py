"""The search for a rank's order: against proven optima, and within every limit."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.plan import BlockShape, NodeCosts, Plan, compile, fastest, play_ranks
from overlap1f1b.plan.beam import search
from overlap1f1b.plan.compiler import NO_SLOWER
from overlap1f1b.schedule import build_schedule
from overlap1f1b.schedule.placement import SINGLE
from tests.plan.cases import DENSE, MOE, chains_of, costs_of, programs, shapes, table_costs
from tests.plan.rules import broken_rules
from tests.programs import combined_1f1b


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_an_order_keeps_every_rule(data: st.DataObject) -> None:
    """Of any blocks and costs, with any number of open actions; alone the clock agrees with the search's own times."""
    program, shape = data.draw(programs()), data.draw(shapes())
    shape = tuple(block._replace(gathered=False) for block in shape)
    costs, k, blocks = data.draw(costs_of(shape)), data.draw(st.integers(1, 4)), data.draw(st.booleans())
    peak, deferred = data.draw(st.integers(1, program.peak_activations[0])), data.draw(st.integers(0, 2))
    limits: dict[str, Any] = {"peak": peak, "deferred": deferred, "counts_block": blocks}
    nodes = search(program, chains_of(shape), costs, k, data.draw(st.integers(1, 8)), **limits)
    if nodes is None:  # the next k actions are forwards that must wait, for room or for an earlier backward's
        assert peak < program.peak_activations[0] or program.name == "all_forwards_first"
        return
    plan = Plan(program, k, "", (shape,), (tuple(nodes),), 0.0).without_reductions()
    assert not list(broken_rules(plan))
    if not program.forward_only:
        assert plan.live(0) <= peak
        assert plan.held(0) <= peak + deferred


OPTIMA = {  # layers, microbatches, exchange over compute, live ones: proven by the solver
    (1, 1, 1, 3): 38,
    (1, 2, 1, 3): Fraction("54.5"),
    (1, 3, 1, 3): Fraction("75.5"),
    (1, 3, 1, 2): 78,
    (1, 4, 1, 2): 99,
    (2, 2, 1, 3): Fraction("103.5"),
    (2, 3, 1, 3): Fraction("143.75"),
    (4, 1, 1, 3): 143,
    (4, 2, 1, 3): Fraction("201.5"),
}
"""Times of the fastest orders of experts : attention 4 : 3, as :mod:`tests.plan.optimum` proves them."""


@pytest.mark.parametrize("case", OPTIMA, ids=str)
def test_a_compiled_order_is_the_fastest_there_is(case: tuple[int, int, float, int]) -> None:
    layers, microbatches, ratio, live = case
    plans = fastest(combined_1f1b(microbatches, live - 2), (MOE,) * layers, table_costs(ratio), 3)
    assert OPTIMA[case] <= min(plan.predicted for plan in plans) <= 1.01 * float(OPTIMA[case])


@pytest.mark.parametrize("case", [(1, 2, 1, 3), (1, 3, 1, 2), (2, 2, 1, 3)], ids=str)
def test_the_solver_proves_it_and_agrees_with_the_clock(case: tuple[int, int, float, int]) -> None:
    pytest.importorskip("ortools")
    from tests.plan.optimum import optimum

    layers, microbatches, ratio, live = case
    costs = table_costs(ratio)
    found = optimum(SINGLE, microbatches, (MOE,) * layers, costs, live=[live])
    assert found.proven
    assert found.time == OPTIMA[case]
    assert max(span.end for span in play_ranks(found.ranks, SINGLE, costs)[0]) == found.time


def test_the_solver_agrees_with_the_clock_on_further_blocks() -> None:
    pytest.importorskip("ortools")
    from tests.plan.optimum import optimum

    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=4, counts=0.25, dense=5).in_parts(2)
    for shape in ((BlockShape(1, parts=2),), (DENSE, MOE), (BlockShape(1, recompute="experts"),)):
        found = optimum(SINGLE, 2, shape, costs, live=[2])
        assert found.proven
        assert max(span.end for span in play_ranks(found.ranks, SINGLE, costs)[0]) == found.time
        plan = compile(combined_1f1b(2, 0), shape, costs, 3)
        assert found.time <= plan.predicted <= 1.01 * NO_SLOWER * found.time


def test_the_one_that_holds_the_least_of_those_as_fast_is_played() -> None:
    plans = fastest(build_schedule("combined_1f1b", microbatches=6), (MOE,) * 2, table_costs(0.5), 3)
    alike = [plan for plan in plans if plan.predicted <= NO_SLOWER * min(plan.predicted for plan in plans)]
    assert plans[0].memory() == min(plan.memory() for plan in alike)
    assert len({plan.memory() for plan in plans}) > 1
