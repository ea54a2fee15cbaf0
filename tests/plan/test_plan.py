"""Compiled plans: what holds for every program, stage, cost and overlap."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.plan import BlockShape, NodeCosts, Op, Overlap, Plan, StageShape, compile, parse_overlap
from overlap1f1b.plan.compiler import DEFERRED
from overlap1f1b.plan.orders import pairs, serial, with_reductions
from overlap1f1b.schedule import Action, Kind, Program
from tests.plan.cases import DENSE, MOE, chains_of, costs_of, makespan, programs, shapes, table_costs, with_nodes
from tests.plan.rules import broken_rules, peak, without_gathers
from tests.plan.tries import all_tries
from tests.programs import combined_1f1b, sequential


@given(st.data())
@settings(deadline=None, max_examples=10)
def test_every_plan(data: st.DataObject) -> None:
    program, shape = data.draw(programs()), data.draw(shapes())
    costs, counts_block = data.draw(costs_of(shape)), data.draw(st.booleans())
    overlaps: tuple[Overlap, ...] = ("serial", "pairs", 1, 2, 3, 4)
    compiled: dict[Overlap, Plan] = {}
    for overlap in overlaps:
        plan = compiled[overlap] = compile(program, shape, costs, overlap, counts_block=counts_block)
        assert not list(broken_rules(plan))
        nodes = without_gathers(plan.nodes)
        assert (plan.program, plan.overlap, plan.shapes) == (program, overlap, (shape,))
        assert plan.predicted == makespan(plan.nodes, costs, counts_block=counts_block)
        if not program.forward_only:
            at = {node: position for position, node in enumerate(nodes)}
            assert plan.live(0) == peak(plan, at, Kind.I) <= program.peak_activations[0]
            assert plan.peak_held == peak(plan, at, Kind.I, Kind.W) <= program.peak_activations[0] + max(DEFERRED)
    for index, k in enumerate(overlaps[2:], start=2):  # a number is never slower than a smaller one or a fixed order
        assert compiled[k].predicted <= min(compiled[below].predicted for below in overlaps[:index])
    again = compile(program, shape, costs, 3, counts_block=counts_block)
    assert again == compiled[3]
    assert again.fingerprint == compiled[3].fingerprint


@given(programs(), shapes())
@settings(deadline=None, max_examples=10)
def test_fixed_orders_do_not_depend_on_costs(program: Program, shape: StageShape) -> None:
    chains = chains_of(shape)
    orders = {"serial": serial(program.actions(0), chains), "pairs": pairs(program.ranks[0], chains)}
    for order, nodes in orders.items():
        expected = tuple(with_reductions(nodes, chains))
        for costs in (NodeCosts(), NodeCosts.uniform(attention=1, experts=9, dispatch=2)):
            plan = compile(program, shape, costs, order)  # type: ignore[arg-type]
            assert (without_gathers(plan.nodes), plan.order) == (expected, order)


def test_fingerprint_is_that_of_the_order() -> None:
    shape = (MOE, DENSE)
    plan = compile(combined_1f1b(4, 0), shape, table_costs(1), 2)
    assert plan.fingerprint != compile(combined_1f1b(4, 0), shape, table_costs(1), "serial").fingerprint
    swapped = (plan.nodes[1], plan.nodes[0], *plan.nodes[2:])
    assert with_nodes(plan, swapped).fingerprint != plan.fingerprint
    assert replace(plan, overlap=3, predicted=1.0).fingerprint == plan.fingerprint


def test_every_process_compiles_the_same_plan() -> None:
    code = (
        "from overlap1f1b.plan import BlockShape, NodeCosts, compile\n"
        "from tests.programs import combined_1f1b\n"
        "shape = (BlockShape(0), BlockShape(1), BlockShape(2, reduced=True))\n"
        "costs = NodeCosts.uniform(attention=3, experts=4, dispatch=21 / 4)\n"
        "print(compile(combined_1f1b(5, 1), shape, costs, 3).fingerprint)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    run = [sys.executable, "-c", code]
    there = subprocess.run(run, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    with all_tries():
        here = compile(combined_1f1b(5, 1), (DENSE, MOE, BlockShape(2, reduced=True)), table_costs(1), 3).fingerprint
    assert there == f"{here}\n"


def test_reductions_can_be_left_out() -> None:
    shape = (MOE._replace(reduced=True), DENSE._replace(reduced=True))
    plan = compile(combined_1f1b(3, 0), shape, table_costs(1), 3)
    assert sum(node.op is Op.REDUCE for node in plan.nodes) == 2
    assert not list(broken_rules(plan.without_reductions()))
    assert plan.without_reductions().nodes == tuple(node for node in plan.nodes if node.op is not Op.REDUCE)
    assert not any(block.reduced for block in plan.without_reductions().shapes[0])


def test_the_best_candidate_is_kept() -> None:
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=0)
    assert compile(combined_1f1b(4, 0), (MOE,), costs, 3).order == "serial"  # nothing to hide: of equals the simplest
    assert compile(combined_1f1b(8, 1), (MOE,) * 4, table_costs(1), 2).order == "k=2"
    assert compile(combined_1f1b(8, 1), (MOE,) * 4, table_costs(1), 3).order == "k=3"


def test_plans_for_blocking_counts_launch_late() -> None:
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=3)
    plan = compile(combined_1f1b(8, 1), (MOE,) * 4, costs, 3, counts_block=True)
    unaware = compile(combined_1f1b(8, 1), (MOE,) * 4, costs, 3)
    assert plan.predicted < 0.95 * makespan(unaware.nodes, costs, counts_block=True)


def test_parse_overlap() -> None:
    assert [parse_overlap(value) for value in ("serial", "pairs", "1", 3)] == ["serial", "pairs", 1, 3]


@pytest.mark.parametrize("value", ["", "0", 0, -1, "1.5", 2.0, "Serial", True, None])
def test_parse_overlap_refuses(value: str | int) -> None:
    with pytest.raises(ValueError, match=r"overlap=.*; allowed: serial, pairs, or a number of open actions from 1"):
        parse_overlap(value)
    with pytest.raises(ValueError, match="overlap="):
        compile(sequential(1), (MOE,), NodeCosts(), value)  # type: ignore[arg-type]


STEPS = sequential(1).ranks[0]


@pytest.mark.parametrize(
    ("program", "shape", "message"),
    [
        (Program("mine", 1, (STEPS, STEPS), (1, 1)), (MOE,), "program 'mine' has 2 ranks and a placement over 1"),
        (Program("mine", 1, ((STEPS[0], Action(Kind.I, 0, 0)),), (1,)), (MOE,), "0F0 lacks its weight gradient"),
        (Program("mine", 1, ((Action(Kind.F, 1, 0),),), (1,)), (MOE,), "1F0 names stage 1 of pipe 0"),
        (Program("mine", 1, ((Action(Kind.F, 0, 0, pipe=1),),), (1,)), (MOE,), "0'F0 names stage 0 of pipe 1"),
        (sequential(1), (), "a stage of 0 blocks"),
    ],
)
def test_what_has_no_plan_is_refused(program: Program, shape: StageShape, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile(program, shape, NodeCosts(), "serial")
