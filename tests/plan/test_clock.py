"""Spans of small cases that were worked out by hand."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from overlap1f1b.plan import CostKey, Node, NodeCosts, Op, Resource, compile, play_clocks, play_ranks
from overlap1f1b.plan.clock import Clock
from overlap1f1b.plan.costs import Cost
from overlap1f1b.plan.orders import serial, with_reductions
from overlap1f1b.schedule import Kind, Placement, build_schedule
from overlap1f1b.schedule.placement import SINGLE
from tests.plan.cases import DENSE, MOE, chains_of, makespan, play
from tests.programs import forward_only, sequential

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, combine=6, counts=2, aggregate=1, dense=7)


def node(text: str) -> Node:
    """The node of ``"experts.b 1"``: its name and its microbatch."""
    name, microbatch = text.split()
    op, kind = name.split(".")
    return Node(Op(op), {"f": Kind.F, "b": Kind.I, "w": Kind.W}[kind], int(microbatch), 0)


def parsed(timed: str) -> tuple[list[Node], list[tuple[float, float]]]:
    """Each node of ``"attention.f 0: 0–3, counts.f 0: 3–5"``, and when it starts and ends."""
    parts = [part.split(": ") for part in timed.split(", ")]
    times = [times.split("–") for _, times in parts]
    return [node(text) for text, _ in parts], [(float(start), float(end)) for start, end in times]


def check(timed: str, costs: NodeCosts = COSTS, *, counts_block: bool = False) -> None:
    """Nodes of one rank start and end as it is said."""
    nodes, times = parsed(timed)
    played = play(nodes, costs, counts_block=counts_block)
    assert [span.node for span in played] == nodes
    assert [(span.start, span.end) for span in played] == times
    assert makespan(nodes, costs, counts_block=counts_block) == max(end for _, end in times)


def test_serial_step_waits_for_everything() -> None:
    timed = (
        "attention.f 0: 0–3, counts.f 0: 3–5, dispatch.f 0: 5–10, experts.f 0: 10–14, combine.f 0: 14–20, "
        "aggregate.f 0: 20–21, aggregate.b 0: 21–22, combine.b 0: 22–28, experts.b 0: 28–32, experts.w 0: 32–36, "
        "dispatch.b 0: 36–41, attention.b 0: 41–44, attention.w 0: 44–47"
    )
    assert list(serial(sequential(1).actions(0), chains_of((MOE,)))) == parsed(timed)[0]
    check(timed)


def test_what_is_recomputed_waits_for_no_gradient() -> None:
    block = MOE._replace(recompute="block")
    played = play(tuple(serial(sequential(1).actions(0), chains_of((block,)))), COSTS)
    nodes, times = parsed(
        "recompute_attention.b 0: 21–24, aggregate.b 0: 24–25, combine.b 0: 25–31, recompute_experts.b 0: 25–29, "
        "experts.b 0: 31–35"
    )  # the experts beside the combine
    assert [(span.node, (span.start, span.end)) for span in played][6:11] == list(zip(nodes, times, strict=True))
    program = build_schedule("1f1b", ranks=2, microbatches=1)
    plan = compile(program, (block,), NodeCosts.uniform(attention=3, experts=4, dispatch=5, send=1), "serial")
    first, second = play_ranks(plan.ranks, program.placement, NodeCosts.uniform(attention=3, experts=4, dispatch=5))
    again = next(span for span in first if span.node.op is Op.RECOMPUTE_ATTENTION)
    assert again.end < max(span.end for span in second)  # before the other rank has sent a gradient


def test_experts_wait_for_their_own_part() -> None:
    costs = COSTS.in_parts(3)
    plan = compile(sequential(1), (MOE._replace(parts=3),), costs, 1)
    at = {(span.node.op, span.node.kind, span.node.part): span for span in play(plan.nodes, costs)}
    for kind, exchange, order in ((Kind.F, Op.DISPATCH, (0, 1, 2)), (Kind.I, Op.COMBINE, (2, 1, 0))):
        for first, second in pairwise(order):
            assert at[exchange, kind, first].end <= at[Op.EXPERTS, kind, first].start < at[exchange, kind, second].end
    assert at[Op.AGGREGATE, Kind.F, 0].start >= at[Op.COMBINE, Kind.F, 2].end
    assert at[Op.ATTENTION, Kind.I, 0].start >= at[Op.DISPATCH, Kind.I, 0].end


def test_lanes() -> None:
    # An exchange travels while the thread computes.
    check(
        "attention.f 0: 0–3, counts.f 0: 3–5, dispatch.f 0: 5–10, attention.f 1: 3–6, attention.f 2: 6–9, "
        "experts.f 0: 10–14"
    )
    # A lane is first in, first out.
    check(
        "attention.f 0: 0–3, attention.f 1: 3–6, dispatch.f 0: 6–11, dispatch.f 1: 11–16, experts.f 1: 16–20, "
        "experts.f 0: 20–24"
    )
    # Counts and rows do not queue behind each other.
    check(
        "attention.f 0: 0–3, counts.f 0: 3–5, dispatch.f 0: 5–10, attention.f 1: 3–6, counts.f 1: 6–8, "
        "dispatch.f 1: 10–15"
    )
    # A backward begins after its forward, here as if this ended on its way.
    check("attention.f 0: 0–3, dispatch.f 0: 3–8, aggregate.b 0: 8–9, combine.b 0: 9–15, experts.b 0: 15–19")
    # Weight gradients need their input gradient alone.
    check("experts.b 0: 0–4, dispatch.b 0: 4–9, experts.w 0: 4–8, attention.b 0: 9–12, attention.w 0: 12–15")


def test_a_dispatch_that_waits_for_counts_holds_up_its_lane() -> None:
    slow = NodeCosts.uniform(attention=3, experts=4, dispatch=5, combine=6, counts=10)
    check("attention.f 0: 0–3, counts.f 0: 3–13, dispatch.f 0: 13–18, attention.f 1: 3–6, combine.b 1: 18–24", slow)


def test_the_thread_waits_for_counts_where_they_block() -> None:
    """For those of a forward's dispatch alone."""
    check("attention.f 0: 0–3, counts.f 0: 3–5, dispatch.f 0: 5–10, attention.f 1: 3–6, dispatch.b 1: 10–15")
    timed = "attention.f 0: 0–3, counts.f 0: 3–5, dispatch.f 0: 5–10, attention.f 1: 5–8, dispatch.b 1: 10–15"
    check(timed, counts_block=True)
    # A dispatch starts when the counts have come, beside the attention that was launched before.
    timed = "attention.f 0: 0–3, counts.f 0: 3–5, attention.f 1: 3–6, dispatch.f 0: 5–10, experts.f 1: 6–10, "
    check(timed + "combine.f 1: 10–16, attention.f 2: 10–13", counts_block=True)


def clocks(texts: str, costs: NodeCosts) -> list[tuple[float, float, float]]:
    """End of the launch, start and end of each node, if the host waits for counts."""
    ((played, host),) = play_clocks([[node(text) for text in texts.split(", ")]], SINGLE, costs, counts_block=True)
    assert [span.node for span in played] == [span.node for span in host]
    return [(launch.end, span.start, span.end) for launch, span in zip(host, played, strict=True)]


LAUNCHES = replace(COSTS, launch={(op, kind): 1.0 for op in Op for kind in Kind})


def test_the_host_launches_ahead_of_the_device() -> None:
    assert clocks("attention.f 0, attention.f 1, combine.b 2, attention.f 3", LAUNCHES) == [
        (1, 1, 4),
        (2, 4, 7),
        (3, 7, 13),  # an exchange starts behind the compute that was launched ahead of it
        (4, 7, 10),
    ]


def test_a_device_waits_for_a_host_that_is_late() -> None:
    costs = NodeCosts({(Op.ATTENTION, Kind.F): 2.0}, launch={(Op.ATTENTION, Kind.F): 5.0})
    assert clocks("attention.f 0, attention.f 1, experts.f 1", costs) == [(5, 5, 7), (10, 10, 12), (10, 12, 12)]


def test_a_host_that_waits_for_counts_launches_nothing() -> None:
    alone = "attention.f 0, counts.f 0, dispatch.f 0, attention.f 1"
    # The counts come at 6 and the dispatch is launched by 7, the next node by 8: the device had nothing from 4 on.
    assert clocks(alone, LAUNCHES) == [(1, 1, 4), (2, 4, 6), (7, 7, 12), (8, 8, 11)]
    behind = "attention.f 0, counts.f 0, attention.f 1, attention.f 2, dispatch.f 0, attention.f 3"
    assert clocks(behind, LAUNCHES)[-2:] == [(7, 7, 12), (8, 10, 13)]  # the host waits while the device computes


def test_links_are_first_in_first_out_each() -> None:
    costs = NodeCosts(
        {(Op.ATTENTION, Kind.F): 2.0, (Op.REDUCE, Kind.W): 3.0},
        {(Op.DISPATCH, Kind.F, 0, 0, 0, 0): (1.0, 4.0), (Op.COMBINE, Kind.I, 0, 0, 0, 0): (5.0, 2.0)},
    )
    # links:   dispatch 0 on 2–3 and 2–6   combine 1 on 3–8 and 6–8   dispatch 2 on 8–9 and 8–12
    check("attention.f 0: 0–2, dispatch.f 0: 2–6, combine.b 1: 3–8, experts.f 0: 6–6, dispatch.f 2: 8–12", costs)
    # a single time holds for every link: the reduction on 3–6 and 6–9, the next dispatch on 6–7 and 9–13
    check("attention.f 0: 0–2, dispatch.f 0: 2–6, reduce.w 0: 3–9, dispatch.f 1: 6–13", costs)
    # links that appear late were as busy as the busiest
    check("reduce.w 0: 0–3, dispatch.f 0: 3–7", costs)


def test_a_lane_never_overtakes_itself_on_an_idle_link() -> None:
    costs = NodeCosts(
        by_node={(Op.DISPATCH, Kind.F, 0, 0, 0, 0): (0.0, 6.0), (Op.COMBINE, Kind.F, 0, 0, 0, 0): (2.0, 0.0)}
    )
    check("dispatch.f 0: 0–6, combine.f 1: 0–6", costs)


def test_a_reduction_is_launched_where_it_stands() -> None:
    shape = (DENSE._replace(reduced=True), DENSE)
    nodes = tuple(with_reductions(serial(sequential(1).actions(0), chains_of(shape)), chains_of(shape)))
    costs = NodeCosts.uniform(attention=0, experts=0, dispatch=0, dense=7, reduce=4)
    played = {span.node.name + str(span.node.block): (span.start, span.end) for span in play(nodes, costs)}
    assert played["dense.w0"] == (35, 42)
    assert played["reduce.w0"] == (42, 46)
    assert makespan(nodes, costs) == 46


def test_nothing_takes_no_time() -> None:
    assert play((), COSTS) == []
    nodes = tuple(serial(forward_only(2).actions(0), chains_of((MOE, DENSE))))
    assert makespan(nodes, NodeCosts(), counts_block=True) == 0


def passed(timed: str, *, shared: bool, by_node: Mapping[CostKey, Cost] | None = None) -> None:
    """The same on the first of two stages, with transfers of 4 between them and exchanges of 10."""
    by_op = {(Op.DISPATCH, Kind.F): 10.0, (Op.SEND, Kind.F): 4.0, (Op.COMBINE, Kind.F): 3.0, (Op.COUNTS, Kind.F): 5.0}
    clock = Clock(NodeCosts(by_op, by_node or {}, shared_links=shared), placement=Placement.loop(2))
    nodes, times = parsed(timed)
    assert [(span.start, span.end) for span in map(clock.play, nodes)] == times


def test_transfers_have_links_of_their_own_unless_they_share() -> None:
    passed("dispatch.f 0: 0–10, send.f 1: 0–4, dispatch.f 2: 10–20", shared=False)
    # The transfer has half of the link, and so has what is on it; what is already on its way is not moved, the next is.
    passed("dispatch.f 0: 0–10, send.f 1: 0–8, dispatch.f 2: 14–24", shared=True)
    # An exchange behind a transfer shares what is left of it.
    passed("send.f 0: 0–4, dispatch.f 1: 0–10", shared=False)
    passed("send.f 0: 0–4, dispatch.f 1: 0–14", shared=True)
    passed("send.f 0: 0–4, send.f 1: 4–8, combine.f 2: 0–6", shared=True)
    # Counts are too small to share.
    passed("send.f 0: 0–4, counts.f 1: 0–5", shared=True)


def test_an_exchange_delays_a_transfer_that_travels_already() -> None:
    """Each has half of the link for 8; with another exchange at the other end the transfer has a third."""
    costs = NodeCosts.uniform(attention=1, experts=1, dispatch=10, send=4, shared_links=True)
    first = [node("send.f 0"), node("dispatch.f 1")]
    second = [node(text)._replace(stage=1) for text in ("receive.f 0", "attention.f 0", "dispatch.f 0")]
    played = [
        [(span.start, span.end) for span in spans] for spans in play_ranks([first, second], Placement.loop(2), costs)
    ]
    assert played == [[(0, 8), (0, 14)], [(0, 0), (8, 9), (9, 19)]]
    clocks: list[Clock] = []
    for _ in range(2):
        Clock(costs, placement=Placement.loop(2), clocks=clocks)
    clocks[0].play(first[0])
    for rank in range(2):
        clocks[rank].play(Node(Op.DISPATCH, Kind.F, 9, 0, stage=rank))
    assert clocks[0].arrivals[0, 1, 0, Kind.F].end == 12


def test_a_transfer_shares_no_link_that_waits() -> None:
    # The dispatch waits for its counts until 5: the first transfer is over, the second is there for another 3.
    passed("counts.f 0: 0–5, dispatch.f 0: 5–15, send.f 1: 0–4, send.f 2: 4–11, dispatch.f 3: 18–28", shared=True)


def test_each_link_shares_as_long_as_it_is_busy_itself() -> None:
    uneven: Mapping[CostKey, Cost] = {(Op.DISPATCH, Kind.F, 0, 0, 0, 0): (2.0, 10.0)}
    passed("dispatch.f 0: 0–10, send.f 1: 0–8, dispatch.f 2: 4–24", shared=True, by_node=uneven)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("first", [Kind.F, Kind.I])
def test_transfers_share_each_direction_of_a_link(ranks: int, first: Kind) -> None:
    """One each way delay an exchange once, two the same way twice, whichever is played first."""
    costs = NodeCosts.uniform(attention=1, experts=1, dispatch=100, send=10, shared_links=True)
    clocks: list[Clock] = []
    for rank in range(ranks):
        Clock(costs, placement=Placement.loop(ranks), clocks=clocks)
        clocks[rank].play(Node(Op.DISPATCH, Kind.F, 9, 0, stage=rank))
    senders = {Kind.F: 0 if ranks == 2 else 1, Kind.I: 1}  # of three ranks the one in the middle sends both
    for kind in (first, Kind.I if first is Kind.F else Kind.F):
        span = clocks[senders[kind]].play(Node(Op.SEND, kind, 0, 0, stage=senders[kind]))
        assert (span.start, span.end) == (0, 20)
    free = [clock.free[Resource.EXCHANGE] for clock in clocks]
    assert free == ([[110], [110]] if ranks == 2 else [[110], [120], [110]])
