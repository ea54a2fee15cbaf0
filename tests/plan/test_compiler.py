"""Plans over several ranks: for every schedule, at any exchange : compute."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from overlap1f1b.plan import BlockShape, Node, NodeCosts, Op, Overlap, Plan, bound, compile, play_ranks, with_rendezvous
from overlap1f1b.schedule import SCHEDULES, Action, Kind, Placement, Program, build_schedule, schedule_of
from overlap1f1b.simulation import simulate
from tests.counting import work
from tests.plan.cases import DENSE, MOE, with_nodes
from tests.plan.rules import broken_rules, finishes, meets
from tests.plan.tries import all_tries, few_tries
from tests.tiers import first

CHUNKED = [name for name in SCHEDULES if schedule_of(name).takes("chunks")]


def every_program(ranks: int, microbatches: int) -> list[Program]:
    """One of each schedule, of those with chunks also one with two; DualPipe needs two microbatches a rank."""
    sizes = {name: 2 * ranks if name.startswith("dualpipe") else microbatches for name in SCHEDULES}
    programs = [build_schedule(name, ranks=ranks, microbatches=sizes[name]) for name in SCHEDULES]
    return programs + [build_schedule(n, ranks=ranks, microbatches=microbatches, chunks=2) for n in CHUNKED]


def costs_at(ratio: float) -> NodeCosts:
    return NodeCosts.uniform(attention=3, experts=4, dispatch=ratio * 21 / 4, counts=0.25, aggregate=0.25, send=1)


@pytest.mark.parametrize(
    ("program", "ratio"),
    [
        pytest.param(program, ratio, id=f"{program.name}, {program.placement.stages} stages-{ratio}", marks=marks)
        for ranks, microbatches, ratios, marks in ((2, 3, (0.25, 1, 4), ()), (4, 6, (0.25, 4), pytest.mark.wide))
        for program, ratio in zip(every_program(ranks, microbatches), cycle(ratios), strict=False)
    ],
)
def test_more_open_actions_are_never_slower(program: Program, ratio: float) -> None:
    """With all tries at as much exchange as compute, else with few."""
    costs, shape = costs_at(ratio), (MOE._replace(reduced=True), DENSE)
    overlaps: tuple[Overlap, ...] = ("serial", "pairs", 1, 2, 3)
    with all_tries() if ratio == 1 else nullcontext():
        plans = {overlap: compile(program, shape, costs, overlap) for overlap in overlaps}
    for plan in plans.values():
        assert not list(broken_rules(plan))
        assert all(plan.live(rank) <= declared for rank, declared in enumerate(program.peak_activations))
        spans = play_ranks(plan.ranks, program.placement, costs)
        assert plan.predicted == max(span.end for rank in spans for span in rank)
    predicted = {overlap: plan.predicted for overlap, plan in plans.items()}
    assert predicted[3] <= predicted[2] <= predicted[1] <= min(predicted["serial"], predicted["pairs"])


@pytest.mark.parametrize("overlap", ["serial", "pairs", 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_in_parts_and_odd_sizes(name: str, overlap: Overlap) -> None:
    """One of two stages, and whether the host waits for counts, in turns over the schedules."""
    number, chunks = SCHEDULES.index(name), 2 if name == "interleaved_1f1b" else None
    ranks, microbatches = {"dualpipe": (2, 4), "dualpipev": (3, 6)}.get(name, (3, 5))
    program = build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    block = (BlockShape(1, parts=2), BlockShape(2, parts=3, recompute="block"))[number // 2 % 2]
    shape, costs = (DENSE._replace(reduced=True), block._replace(reduced=True)), costs_at(1).in_parts(2)
    counts_block = number % 2 == 1
    plan = compile(program, shape, costs, overlap, counts_block=counts_block)
    assert not list(broken_rules(plan))
    assert bound(program, shape, costs, overlap) <= plan.predicted * (1 + 1e-12)
    met = with_rendezvous(plan, costs, counts_block=counts_block)
    assert not list(broken_rules(met))
    assert meets(met)


def test_the_rules_notice_parts_that_mix_microbatches() -> None:
    plan = compile(build_schedule("sequential", microbatches=2), (BlockShape(1, parts=2),), costs_at(1), "serial")
    nodes = list(plan.nodes)
    last = nodes.index(Node(Op.EXPERTS, Kind.I, microbatch=0, block=0, part=0))
    behind = [node for node in nodes[last:] if node.microbatch == 0]
    # Everything of microbatch 0 from its last part on comes behind the first part of microbatch 1.
    at = nodes.index(Node(Op.EXPERTS, Kind.I, microbatch=1, block=0, part=1)) + 1
    mixed = [node for node in nodes[:at] if node not in behind] + behind + nodes[at:]
    assert any("out of the program's order" in rule for rule in broken_rules(with_nodes(plan, mixed)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_one_action_after_another(name: str) -> None:
    """A block a stage, on one rank to four, forwards alone too."""
    shape, found = (DENSE,), 0
    for ranks, microbatches, chunks in ((1, 3, None), (2, 4, None), (4, 8, None), (4, 13, None), (3, 7, 2), (2, 8, 4)):
        for forward_only in (False, True):
            sizes: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
            try:
                program = build_schedule(name, forward_only=forward_only, **sizes)
            except ValueError:
                continue
            assert not list(broken_rules(compile(program, shape, NodeCosts(), "serial")))
            found += 1
    assert found >= 4


@pytest.mark.parametrize("name", first(SCHEDULES, "combined_1f1b", "dualpipe"))
def test_work_of_compiling_and_playing_grows_linearly(name: str) -> None:
    costs = costs_at(1)

    def of_each_node(ranks: int, microbatches: int, layers: int) -> list[float]:
        program = build_schedule(name, ranks=ranks, microbatches=microbatches)
        plans: list[Plan] = []
        parts = (
            lambda: plans.append(compile(program, (MOE,) * layers, costs, 2)),
            lambda: play_ranks(plans[0].ranks, program.placement, costs),
        )
        with few_tries():
            works = [work(part) for part in parts]
        return [count / sum(map(len, plans[0].ranks)) for count in works]

    few = of_each_node(2, 4, 1)
    for sizes in ((2, 12, 1), (4, 8, 1), (2, 4, 3)):
        for more, less in zip(of_each_node(*sizes), few, strict=True):
            assert less / 2 < more < 1.15 * less, sizes


def test_stages_of_different_blocks() -> None:
    program = build_schedule("1f1b", ranks=2, microbatches=3)
    assert not list(broken_rules(compile(program, ((DENSE, MOE), (MOE, MOE, DENSE)), costs_at(1), 3)))


def test_ranks_that_wait_for_each_other_are_named() -> None:
    plan = compile(build_schedule("1f1b", ranks=2, microbatches=2), (MOE,), costs_at(1), "serial")
    first, second = plan.ranks
    stuck = (*(n for n in first if n.kind is not Kind.F), *(n for n in first if n.kind is Kind.F))
    message = r"rank 0, position 1: aggregate.b\[0\] m0 waits forever for a message of another"
    with pytest.raises(ValueError, match=message):
        play_ranks((stuck, second), plan.program.placement, NodeCosts())
    receives = [node for node in first if node.op is Op.RECEIVE]
    late = replace(plan, ranks=((*receives, *(node for node in first if node.op is not Op.RECEIVE)), second))
    assert not list(broken_rules(late))
    assert finishes(late, held=True)


@pytest.mark.parametrize("steps", ["0F0 0F1 0I0 0I1 0W1 0W0", "0F0 0F1 0I0 0B1 0W0", "0F0 0F1 0I1 0I0 0W0 0W1"])
@pytest.mark.parametrize("overlap", ["serial", "pairs", 1, 2, 3])
def test_weight_gradients_keep_the_order_of_the_program(steps: str, overlap: Overlap) -> None:
    row = tuple(Action.parse(step) for step in steps.split())
    plan = compile(Program("mine", 2, (row,), (2,)), (MOE, DENSE), costs_at(1), overlap)
    assert not list(broken_rules(plan))


def test_no_more_weight_gradients_wait_than_the_program_declares() -> None:
    """Of two stages on one rank the younger's input gradient could end first, while the older's rows travel."""
    steps = "0F0 1F0 0F1 1F1 1I0 1W0 1I1 0I0 1W1 0W0 0I1 0W1"
    row = tuple(Action.parse(step) for step in steps.split())
    program = Program("mine", 2, (row,), (4,), Placement(((0, 0),)), peak_weights=(2,))
    for dispatch in (1, 5, 20):
        costs = NodeCosts.uniform(attention=3, experts=4, dispatch=dispatch)
        free = compile(replace(program, peak_weights=()), (MOE,), costs, 4)
        plan = compile(program, (MOE,), costs, 4)
        assert not list(broken_rules(plan))
        assert plan.predicted <= free.predicted + 7 * 2  # what the limit may cost is small
    plan = compile(build_schedule("zb_h1", ranks=2, microbatches=8), (MOE,), costs_at(1), "serial")
    weights_last = [sorted(nodes, key=lambda node: node.kind is Kind.W) for nodes in plan.ranks]
    assert "too many alive" in broken_rules(replace(plan, ranks=(tuple(weights_last[0]), plan.ranks[1])))
    strict = replace(plan.program, peak_weights=(1, 1))
    assert list(broken_rules(replace(plan, program=strict))) == ["too many weight gradients wait"]
    assert not list(broken_rules(replace(plan, program=replace(strict, peak_weights=()))))


def test_no_more_actions_are_open_than_there_are() -> None:
    program = build_schedule("combined_1f1b", microbatches=2)
    assert compile(program, (MOE,), costs_at(1), 10**9).predicted <= compile(program, (MOE,), costs_at(1), 4).predicted


@pytest.mark.parametrize(
    ("moved", "before"),
    [
        ("dispatch.f[0] m0", "counts.f[0] m0"),
        ("aggregate.b[0] m1", "aggregate.f[0] m1"),
        ("experts.w[0] m0", "experts.b[0] m0"),
        ("attention.w[0] m1", "attention.w[0] m0"),
        ("attention.w[0] m0", "reduce.w[0] m1"),
        ("reduce.w[0] m1", "attention.w[0] m1"),
        ("attention.f[0] m1", "attention.b[0] m0"),
    ],
)
def test_the_rules_notice_a_node_that_is_moved(moved: str, before: str) -> None:
    plan = compile(build_schedule("sequential", microbatches=2), (MOE._replace(reduced=True),), costs_at(1), "serial")
    nodes = {str(node): node for node in plan.nodes}
    node = nodes.pop(moved)
    at = list(nodes).index(before)
    assert list(broken_rules(with_nodes(plan, [*list(nodes.values())[:at], node, *list(nodes.values())[at:]])))
    assert list(broken_rules(with_nodes(plan, nodes.values())))  # without it


@pytest.mark.parametrize(
    ("ranks", "layers", "microbatches", "k", "counts"),
    [
        (1, 2, 8, 3, 0.0),
        (2, 2, 8, 2, 0.05),
        pytest.param(1, 8, 8, 4, 0.05, marks=pytest.mark.wide),
        pytest.param(2, 4, 8, 3, 0.0, marks=pytest.mark.wide),
        pytest.param(4, 2, 8, 3, 0.05, marks=pytest.mark.wide),
    ],
)
def test_launches_cost_at_most_a_hundredth(ranks: int, layers: int, microbatches: int, k: int, counts: float) -> None:
    """Launches of 100 µs at exchange = compute, by plans that do not know them and by plans that do."""
    times = {"attention": 1.0, "experts": 4 / 3, "dispatch": 7 / 4, "counts": counts, "send": 0.2}
    free, late = (NodeCosts.uniform(launch=launch, **times) for launch in (0.0, 0.1))
    program, met = build_schedule("combined_1f1b", ranks=ranks, microbatches=microbatches), []
    for costs in (free, late):
        with all_tries():
            plan = compile(program, (MOE,) * layers, costs, k, counts_block=True)
        met.append(with_rendezvous(plan, costs, counts_block=True))
        assert not list(broken_rules(met[-1]))
        assert meets(met[-1])
    least = min(simulate(plan, free, counts_block=True).makespan for plan in met)  # list scheduling is greedy
    unaware, aware = (simulate(plan, late, counts_block=True).makespan / least - 1 for plan in met)
    assert 0 <= aware <= 0.01
    assert aware <= unaware + 0.001
    if (ranks, k, counts) == (1, 3, 0.0):
        with all_tries(searched=False):
            plan = compile(program, (MOE,) * layers, free, k, counts_block=True)
        least, unaware = (simulate(plan, costs, counts_block=True).makespan for costs in (free, late))
        assert unaware > 1.02 * least  # without a search the host waits for counts with nothing queued


def test_launch_costs_do_not_matter_to_a_host_that_waits_for_no_counts() -> None:
    program = build_schedule("combined_1f1b", microbatches=6)
    free, slow = (costs_at(1.0), replace(costs_at(1.0), launch={(op, kind): 0.1 for op in Op for kind in Kind}))
    assert compile(program, (MOE,) * 2, free, 3).fingerprint == compile(program, (MOE,) * 2, slow, 3).fingerprint


@pytest.mark.parametrize("counts_block", [False, True])
@pytest.mark.parametrize("overlap", ["serial", "pairs", 2])
def test_the_predicted_time_is_that_of_the_plan_where_launches_cost_time(overlap: Overlap, counts_block: bool) -> None:
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=1, launch=2)
    for name, chunks in (("zb_h1", 3), ("interleaved_1f1b", 2), ("dualpipev", 2)):
        program = build_schedule(name, ranks=2, microbatches=4, chunks=chunks)
        plan = compile(program, (MOE,), costs, overlap, counts_block=counts_block)
        spans = play_ranks(plan.ranks, program.placement, costs, counts_block=counts_block)
        assert plan.predicted == max(span.end for rank in spans for span in rank)
