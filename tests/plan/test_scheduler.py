"""List scheduling: its limits, and what it reaches against the bound."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.plan import RECOMPUTES, Node, NodeCosts, Op, Plan, Recompute, Resource, compile
from overlap1f1b.plan.orders import serial
from overlap1f1b.plan.scheduler import ListScheduler, Policy
from overlap1f1b.schedule import Kind, Program, build_schedule
from tests.plan.cases import DENSE, MOE, chains_of, costs_of, makespan, play, programs, shapes, table_bound, table_costs
from tests.plan.rules import broken_rules
from tests.programs import combined_1f1b, sequential
from tests.tiers import first


def scheduled(program: Program, policy: Policy, costs: NodeCosts, layers: int = 4) -> tuple[Node, ...]:
    peak = program.peak_activations[0]
    return tuple(ListScheduler(program.actions(0), chains_of((MOE,) * layers), costs, policy, peak).run())


# Step over bound by (warm-up, open actions), with B = 2F, W half of B, experts : attention 4 : 3 in 4 layers, over
# exchange : compute and microbatches.
CELLS = ((8, 0.25), (8, 0.5), (8, 1.0), (8, 1.5), (8, 2.0), (32, 1.0))
# What compile() reaches, and the list scheduler alone without patience.
COMPILED = {
    (1, 1): (1.127, 1.254, 1.671, 1.447, 1.336, 1.668),
    (1, 2): (1.016, 1.031, 1.122, 1.059, 1.044, 1.059),
    (2, 2): (1.002, 1.004, 1.086, 1.009, 1.007, 1.039),
    (2, 3): (1.000, 1.003, 1.056, 1.009, 1.007, 1.014),
    (3, 4): (1.000, 1.000, 1.070, 1.009, 1.007, 1.018),
}
GREEDY = COMPILED | {
    (1, 2): (1.016, 1.031, 1.158, 1.059, 1.044, 1.100),
    (2, 2): (1.002, 1.004, 1.108, 1.009, 1.007, 1.080),
}


@pytest.mark.parametrize("row", COMPILED, ids="warm-up {0[0]}, k={0[1]}".format)
@pytest.mark.parametrize(("microbatches", "ratio"), first(CELLS, (8, 0.5), (8, 1.0)))
def test_step_over_bound(row: tuple[int, int], microbatches: int, ratio: float) -> None:
    (warmup, k), column = row, CELLS.index((microbatches, ratio))
    program = sequential(microbatches) if k == 1 else combined_1f1b(microbatches, warmup - 1)
    costs, bound = table_costs(ratio), table_bound(microbatches, 4, ratio)
    plan = compile(program, (MOE,) * 4, costs, k)
    assert not list(broken_rules(plan))
    assert 1.0 <= plan.predicted / bound <= COMPILED[row][column] + 0.0005
    assert makespan(scheduled(program, Policy(k), costs), costs) / bound <= GREEDY[row][column] + 0.0005


def test_the_earlier_action_goes_first_on_a_tie() -> None:
    nodes = scheduled(combined_1f1b(3, extra_warmup=2), Policy(3), NodeCosts(), layers=2)
    compute = [node for node in nodes if node.kind is Kind.F and node.resource is Resource.COMPUTE]
    assert [node.microbatch for node in compute] == [0] * 6 + [1] * 6 + [2] * 6


def issued_in_waits(patience: float, *, wait: float, weight: float) -> bool:
    """Whether the weight gradient of the first layer's experts is issued while its dispatch travels."""
    times = {(Op.EXPERTS, Kind.W): weight, (Op.DISPATCH, Kind.I): wait, (Op.ATTENTION, Kind.I): 1.0}
    nodes = [str(node) for node in scheduled(sequential(1), Policy(1, patience=patience), NodeCosts(times), layers=1)]
    return nodes.index("experts.w[0] m0") < nodes.index("attention.b[0] m0")


def test_patience() -> None:
    assert issued_in_waits(0.0, wait=0.25, weight=4.0)
    assert not issued_in_waits(0.0, wait=0.0, weight=4.0)
    assert issued_in_waits(0.5, wait=2.0, weight=4.0)
    assert not issued_in_waits(0.5, wait=1.75, weight=4.0)
    assert issued_in_waits(0.5, wait=1.75, weight=3.5)


def test_weight_gradients_make_room_for_a_forward() -> None:
    """Without waits nothing else issues them; at most one microbatch more than is alive may be waiting for them."""

    def held(policy: Policy) -> int:
        nodes = scheduled(sequential(4), policy, NodeCosts(), layers=2)
        return Plan(sequential(4), 1, "k=1", ((MOE, MOE),), (nodes,), 0.0).peak_held

    assert [held(Policy(1)), held(Policy(1, deferred=9)), held(Policy(1, deferred=0))] == [2, 4, 1]


@pytest.mark.parametrize("mode", ["experts", "attention", "block"])
@pytest.mark.parametrize("k", [1, 3])
def test_weight_gradients_go_before_what_is_recomputed_unless_the_program_places_them(mode: Recompute, k: int) -> None:
    """They hold activations, and with many of them waiting a step would take more memory than without recomputing."""

    def most_waiting(program: Program) -> int:
        """Weight gradients that wait where something is recomputed."""
        plan = compile(program, (MOE._replace(recompute=mode),) * 3, table_costs(1), k)
        assert not list(broken_rules(plan))
        waiting = most = 0
        for node in plan.nodes:
            waiting += node.kind is Kind.I and node.op in (Op.ATTENTION, Op.EXPERTS)
            waiting -= node.kind is Kind.W
            most = max(most, waiting if node.op in RECOMPUTES else 0)
        return most

    assert most_waiting(combined_1f1b(6, 1)) == 0
    split = build_schedule("zb_h1", microbatches=6)
    assert any(action.kind is Kind.W for action in split.actions(0))
    assert most_waiting(split) > 0


LATE_COUNTS = NodeCosts.uniform(attention=2, experts=2, dispatch=1, counts=3)


def test_a_blocking_dispatch_is_launched_when_its_counts_have_come() -> None:
    program = combined_1f1b(3, extra_warmup=2)
    order = [str(node) for node in scheduled(program, Policy(3, counts_block=True), LATE_COUNTS, layers=1)]
    # Counts of microbatch 0 come at 5, while attention of microbatch 2 (4 to 6) computes.
    first = ["attention.f[0] m0", "counts.f[0] m0", "attention.f[0] m1", "counts.f[0] m1", "attention.f[0] m2"]
    assert order[: len(first) + 2] == [*first, "dispatch.f[0] m0", "counts.f[0] m2"]
    at_once = [str(node) for node in scheduled(program, Policy(3), LATE_COUNTS, layers=1)]
    assert at_once[:3] == ["attention.f[0] m0", "counts.f[0] m0", "dispatch.f[0] m0"]


def launched(order: list[Node], dispatch: str) -> str:
    """The last compute node ahead of a dispatch."""
    at = next(place for place, node in enumerate(order) if str(node) == dispatch)
    return next(str(node) for node in reversed(order[:at]) if node.resource is Resource.COMPUTE)


def test_the_host_waits_for_counts_behind_another_node_if_the_exchange_is_busy() -> None:
    free = NodeCosts.uniform(attention=2, experts=2, dispatch=3)
    slow = NodeCosts.uniform(attention=2, experts=2, dispatch=3, launch=0.1)
    program, policy = combined_1f1b(3, extra_warmup=2), Policy(3, counts_block=True)
    for m, behind in (("m0", "m0"), ("m1", "m2")):  # nothing travels ahead of the first dispatch
        dispatch = f"dispatch.f[0] {m}"
        assert launched(list(scheduled(program, policy, free, layers=1)), dispatch) == f"attention.f[0] {m}"
        assert launched(list(scheduled(program, policy, slow, layers=1)), dispatch) == f"attention.f[0] {behind}"


def test_the_thread_waits_for_counts_that_come_before_the_next_rows() -> None:
    nodes = scheduled(sequential(1), Policy(1, counts_block=True), LATE_COUNTS, layers=1)
    assert [span.start for span in play(nodes[:4], LATE_COUNTS, counts_block=True)] == [0, 2, 5, 6]
    nodes = scheduled(combined_1f1b(2, extra_warmup=1), Policy(2, counts_block=True), LATE_COUNTS, layers=1)
    starts = {str(span.node): span.start for span in play(nodes, LATE_COUNTS, counts_block=True)}
    # Rows of microbatch 0 come at 6, counts of microbatch 1 at 8; then the older combine travels first.
    assert (starts["experts.f[0] m0"], starts["combine.f[0] m0"], starts["dispatch.f[0] m1"]) == (6, 8, 9)


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_at_most_k_actions_are_open(data: st.DataObject) -> None:
    program, shape = data.draw(programs()), data.draw(shapes())
    k, patience = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0.0, 0.4, 2.0]))
    policy = Policy(k, counts_block=data.draw(st.booleans()), patience=patience)
    costs, peak = data.draw(costs_of(shape)), program.peak_activations[0]
    scheduler = ListScheduler(program.actions(0), chains_of(shape), costs, policy, peak)
    nodes = [node for node in scheduler.run() if node.kind is not Kind.W]
    left = Counter((node.microbatch, node.kind) for node in nodes)
    begun: list[tuple[int, Kind]] = []
    for node in nodes:
        key = (node.microbatch, node.kind)
        if key not in begun:
            begun.append(key)
            assert sum(left[other] > 0 for other in begun) <= k
        left[key] -= 1
    if k == 1:
        everything = serial(program.actions(0), chains_of(shape))
        assert nodes == [node for node in everything if node.kind is not Kind.W]


def test_dense_stages_need_no_waits() -> None:
    costs = NodeCosts.uniform(attention=0, experts=0, dispatch=0, dense=2)
    assert compile(combined_1f1b(4, 1), (DENSE, DENSE), costs, 3).predicted == 4 * 2 * 3 * 2
