"""Activations that leave in an order: where they are freed and fetched, and what that holds and costs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.learn.planner import lighter
from overlap1f1b.plan import BlockShape, CostKey, Held, NodeCosts, Op, Plan, fastest, offloaded
from overlap1f1b.plan.compiler import ROUNDING
from overlap1f1b.schedule import Kind, build_schedule
from tests.plan.cases import costs_of, makespan, programs, shapes
from tests.plan.rules import broken_rules

LEAVES = BlockShape(expert_calls=1, offload=True)
TIMES = NodeCosts.uniform(attention=3, experts=4, dispatch=5.25)


def costs_with(bytes_of: dict[int, float], copy: float, times: NodeCosts = TIMES) -> NodeCosts:
    """Blocks that keep so many bytes for their backward, all of which can leave, in copies that take so long.

    Half of them are the experts'.
    """
    held: dict[CostKey, Held] = {}
    for block, size in bytes_of.items():
        for op, share, number in ((Op.ATTENTION, 0.3, 0), (Op.EXPERTS, 0.5, 1), (Op.AGGREGATE, 0.2, 2)):
            held[op, Kind.F, 0, block, 0, 0] = Held(share * size, share * size)
            held[Op.FREE, Kind.F, 0, block, number, 0] = Held(-share * size)
            held[Op.FETCH, Kind.I, 0, block, number, 0] = Held(share * size, share * size)
            held[op, Kind.I, 0, block, 0, 0] = Held(-share * size)
    by_op = {**times.by_op, (Op.OFFLOAD, Kind.F): copy / 3, (Op.FETCH, Kind.I): copy / 3}
    return replace(times, by_op=by_op, bytes=held)


def plain(microbatches: int, blocks: int, costs: NodeCosts) -> Plan:
    """A plan of three open actions from which nothing leaves."""
    program = build_schedule("combined_1f1b", microbatches=microbatches, extra_warmup=1)
    return fastest(program, (LEAVES,) * blocks, costs, 3, rooms=(1e9,), every=False)[0]


def test_a_copy_that_compute_covers_costs_nothing() -> None:
    costs = costs_with(dict.fromkeys(range(4), 1.0), copy=5.0)
    plan = plain(6, 4, costs)
    (most,) = plan.peak_bytes
    assert not plan.offloads
    less = offloaded(plan, costs, (0.7 * most,))
    assert less.peak_bytes[0] <= 0.7 * most
    assert less.predicted <= 1.01 * plan.predicted
    away = sum(map(len, less.offloads.values()))
    assert 0 < away <= 24
    every = offloaded(plan, costs)
    assert sum(map(len, every.offloads.values())) > away
    assert every.predicted <= 1.1 * plan.predicted
    for one in (less, every):
        assert not list(broken_rules(one))


def test_a_slow_link_costs_its_time() -> None:
    """One microbatch's copy takes as long as its compute: a limit is kept, and the step waits."""
    costs = costs_with(dict.fromkeys(range(4), 1.0), copy=21.0)
    plan = plain(6, 4, costs)
    room = 0.3 * plan.peak_bytes[0]
    less = offloaded(plan, costs, (room,))
    assert less.peak_bytes[0] <= room
    assert less.predicted > 1.05 * plan.predicted
    assert less.predicted == makespan(less.nodes, costs)


def test_what_holds_nothing_stays() -> None:
    costs = costs_with({0: 1.0, 1: 0.0}, copy=1.0)
    plan = offloaded(plain(3, 2, costs), costs)
    assert {block for places in plan.offloads.values() for _, block in places} == {0}


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_every_order_may_leave_and_come_back(data: st.DataObject) -> None:
    """Rules, the times of the clock, and a peak that is never larger."""
    program, shape = data.draw(programs()), data.draw(shapes())
    costs, random = data.draw(costs_of(shape)), Random(data.draw(st.integers(0, 99)))
    sizes = {block: random.choice((0.0, 1.0, 3.0)) for block in range(len(shape))}
    costs = costs_with(sizes, costs.by_op[Op.OFFLOAD, Kind.F], costs)
    kept = fastest(program, shape, costs, 3, rooms=(1e9,), every=False)[0]
    room = data.draw(st.floats(0, 1)) * kept.peak_bytes[0]
    plan = offloaded(kept, costs, data.draw(st.sampled_from([(), (room,)])))
    assert not list(broken_rules(plan))
    assert plan.peak_bytes[0] <= kept.peak_bytes[0]
    assert plan.predicted >= kept.predicted
    assert plan.predicted == makespan(plan.nodes, costs)


@pytest.mark.parametrize("cases", [12, pytest.param(300, marks=pytest.mark.wide)])
def test_never_slower_than_what_keeps_everything_at_any_limit(cases: int) -> None:
    """Random sizes, times and limits: where a plan kept a limit before, one that is no slower does now."""
    random, less = Random(1), 0
    for _ in range(cases):
        attention, experts, dispatch = (random.uniform(1, 5) for _ in range(3))
        times = NodeCosts.uniform(attention=attention, experts=experts, dispatch=dispatch)
        sizes = {block: random.uniform(0, 3) for block in range(random.randint(1, 3))}
        costs, leaves = costs_with(sizes, random.uniform(0, 30), times), (LEAVES,) * len(sizes)
        program = build_schedule("combined_1f1b", microbatches=random.randint(1, 4), extra_warmup=1)
        rooms = (random.uniform(1, 3) * sum(sizes.values()),)
        before, after = (
            [
                plan.predicted
                for other in lighter(program)
                for plan in fastest(other, shape, costs, 3, rooms=rooms, every=False)[:1]
            ]
            for shape in (tuple(block._replace(offload=False) for block in leaves), leaves)
        )
        assert min(after) <= min(before) * (1 + ROUNDING)  # times are summed in another order
        less += min(after) < min(before)
    assert less >= cases // 10
