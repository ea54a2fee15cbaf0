"""``plan.check`` against the rules of :mod:`tests.plan.rules`, on plans changed at random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.plan import BlockShape, Node, NodeCosts, Op, Overlap, Plan, check, compile
from overlap1f1b.schedule import Action, Kind
from overlap1f1b.schedule.placement import SINGLE
from overlap1f1b.schedule.program import program_of
from tests.plan.cases import DENSE, MOE, costs_of, programs, shapes, split_programs, with_nodes
from tests.plan.rules import broken_rules
from tests.plan.tries import few_tries
from tests.programs import combined_1f1b, forward_only, sequential

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=1, aggregate=1, dense=3)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    shape = draw(shapes())
    overlaps: list[Overlap] = ["serial", "pairs", 2, 3]
    program = draw(st.one_of(programs(), split_programs()))
    with few_tries():
        return compile(program, shape, draw(costs_of(shape)), draw(st.sampled_from(overlaps)))


@st.composite
def mutants(draw: st.DrawFn) -> Plan:
    """A plan with a node dropped, doubled, moved, swapped or given another microbatch, or with less memory allowed."""
    plan = draw(plans())
    nodes = list(plan.nodes)
    place = st.integers(0, len(nodes) - 1)
    a, b = draw(place), draw(place)
    match draw(st.sampled_from(["drop", "double", "adjacent", "near", "swap", "turn", "foreign", "peak", "weights"])):
        case "drop":
            del nodes[a]
        case "double":
            nodes.insert(b, nodes[a])
        case "adjacent":
            nodes[a - 1], nodes[a] = nodes[a], nodes[a - 1]
        case "near":
            nodes.insert(max(0, a + draw(st.integers(-4, 4))), nodes.pop(a))
        case "swap":
            nodes[a], nodes[b] = nodes[b], nodes[a]
        case "turn":  # two microbatches change places at one node
            others = [i for i, n in enumerate(nodes) if n._replace(microbatch=nodes[a].microbatch) == nodes[a]]
            b = draw(st.sampled_from(others))
            nodes[a], nodes[b] = nodes[b], nodes[a]
        case "foreign":
            changes: dict[str, Any] = draw(
                st.sampled_from(
                    [{"microbatch": plan.program.microbatches}, {"block": 9}, {"call": 7}, {"part": 5}, {"stage": 1}]
                )
            )
            nodes[a] = nodes[a]._replace(**changes)
        case "weights" if plan.program.peak_weights:
            limit = max(0, plan.program.peak_weights[0] - draw(st.integers(0, 1)))
            plan = replace(plan, program=replace(plan.program, peak_weights=(limit,)))
        case _:
            limit = plan.program.peak_activations[0] - draw(st.integers(0, 2))
            plan = replace(plan, program=replace(plan.program, peak_activations=(limit,)))
    return with_nodes(plan, nodes)


@given(mutants())
@settings(deadline=None, max_examples=150)
def test_no_mutant_that_breaks_a_rule_is_accepted_and_no_other_refused(plan: Plan) -> None:
    broken = list(broken_rules(plan))
    if broken:
        with pytest.raises(ValueError, match="plan of '"):
            check(plan)
    else:
        check(plan)


@pytest.mark.parametrize("overlap", ["serial", "pairs", 3])
def test_every_swap_of_neighbours(overlap: Overlap) -> None:
    shape = (MOE._replace(reduced=True), BlockShape(2, split=False), DENSE)
    plan = compile(combined_1f1b(3, 0), shape, COSTS, overlap)
    refused = 0
    for i in range(1, len(plan.nodes)):
        nodes = (*plan.nodes[: i - 1], plan.nodes[i], plan.nodes[i - 1], *plan.nodes[i + 1 :])
        swapped = with_nodes(plan, nodes)
        if list(broken_rules(swapped)):
            refused += 1
            with pytest.raises(ValueError, match=r"comes before|microbatches alive"):
                check(swapped)
        else:
            check(swapped)
    assert 0.2 * len(plan.nodes) < refused < (1.0 if overlap == "serial" else 0.8) * len(plan.nodes)


def position(plan: Plan, text: str) -> int:
    return [str(node) for node in plan.nodes].index(text)


def moved(plan: Plan, text: str, before: str) -> Plan:
    """The plan with one node put before another."""
    nodes = list(plan.nodes)
    node = nodes.pop(position(plan, text))
    nodes.insert([str(node) for node in nodes].index(before), node)
    return with_nodes(plan, nodes)


PLAN = compile(sequential(2), (MOE._replace(reduced=True),), COSTS, "serial")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            moved(PLAN, "dispatch.f[0] m0", before="counts.f[0] m0"),
            r"plan of 'sequential', rank 0, position 1: dispatch.f\[0\] m0 comes before counts.f\[0\] m0",
        ),
        (
            moved(PLAN, "aggregate.b[0] m1", before="aggregate.f[0] m1"),
            r"aggregate.b\[0\] m1 comes before aggregate.f\[0\] m1",
        ),
        (
            moved(PLAN, "experts.w[0] m0", before="experts.b[0] m0"),
            r"experts.w\[0\] m0 comes before experts.b\[0\] m0",
        ),
        (
            moved(PLAN, "attention.w[0] m1", before="attention.w[0] m0"),
            r"attention.w\[0\] m1 comes before attention.b\[0\] m1",
        ),
        (
            moved(PLAN, "attention.w[0] m0", before="reduce.w[0] m1"),
            r"attention.w\[0\] m1 comes before attention.w\[0\] m0",
        ),
        (
            moved(PLAN, "reduce.w[0] m1", before="attention.w[0] m1"),
            r"reduce.w\[0\] m1 comes before attention.w\[0\] m1",
        ),
        (
            moved(PLAN, "attention.f[0] m1", before="attention.b[0] m0"),
            r"2 microbatches alive, the program declares 1$",
        ),
        (with_nodes(PLAN, PLAN.nodes[:-1]), r"reduce.w\[0\] m1 is missing"),
        (with_nodes(PLAN, (PLAN.nodes[0], *PLAN.nodes)), r"position 1: attention.f\[0\] m0 comes a second time"),
        (
            with_nodes(PLAN, (*PLAN.nodes, Node(Op.EXPERTS, Kind.F, 2, 0))),
            r"position 27: experts.f\[0\] m2 belongs to no action",
        ),
    ],
)
def test_messages_name_position_and_node(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(plan)


def test_memory_is_not_limited_where_there_is_no_backward() -> None:
    program = replace(forward_only(3), peak_activations=(1,))
    check(compile(program, (MOE, DENSE), COSTS, 3))


def test_a_reduction_behind_a_whole_backward_that_comes_before_an_earlier_weight_gradient() -> None:
    actions = [Action.parse(text) for text in ("0F0", "0F1", "0I0", "0B1", "0W0")]
    program = program_of("mine", 2, SINGLE, [actions])
    shape = (BlockShape(expert_calls=1, split=False, reduced=True),) * 2
    for overlap in ("serial", "pairs", 2, 3):
        check(compile(program, shape, NodeCosts.uniform(attention=3, experts=4, dispatch=10), overlap))
