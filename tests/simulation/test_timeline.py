"""Timelines of known spans."""

import json
from math import isnan, nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.plan import Node, NodeCosts, Op, Overlap, Resource, Span, compile
from overlap1f1b.plan.intervals import length
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.simulation import Timeline, simulate
from tests.plan.cases import MOE, cells, costs_of, makespan, programs, shapes
from tests.programs import combined_1f1b, sequential

COMPUTE, EXCHANGE, COUNTS, REDUCE, SEND = Op.EXPERTS, Op.DISPATCH, Op.COUNTS, Op.REDUCE, Op.SEND
LANES = {
    COMPUTE: Resource.COMPUTE,
    EXCHANGE: Resource.EXCHANGE,
    COUNTS: Resource.CONTROL,
    REDUCE: Resource.EXCHANGE,
    SEND: Resource.PEER,
}


def timeline(*spans: tuple[Op, float, float]) -> Timeline:
    return Timeline(tuple(Span(Node(op, Kind.F, i, 0), start, end) for i, (op, start, end) in enumerate(spans)))


@given(st.lists(st.tuples(st.sampled_from(sorted(LANES)), st.integers(0, 20), st.integers(0, 20)), max_size=12))
@settings(deadline=None)
def test_timeline_against_cells(spans: list[tuple[Op, int, int]]) -> None:
    """Time in flight counts once, of counts too; transfers between stages hide nothing."""
    spans = [(op, min(a, b), max(a, b)) for op, a, b in spans]
    line = timeline(*spans)
    on = {lane: cells([(a, b) for op, a, b in spans if LANES[op] is lane]) for lane in Resource}
    in_flight = on[Resource.EXCHANGE] | on[Resource.CONTROL]
    assert cells(line.busy(Resource.COMPUTE)) == on[Resource.COMPUTE]
    assert cells(line.busy(*Resource)) == set().union(*on.values())
    assert line.exchange == len(in_flight)
    assert line.exposed == len(in_flight - on[Resource.COMPUTE])
    hidden = len(in_flight & on[Resource.COMPUTE]) / len(in_flight) if in_flight else nan
    assert line.hidden_fraction == pytest.approx(hidden, nan_ok=True)
    assert line.makespan == max((end for _, _, end in spans), default=0)


@given(st.data())
@settings(deadline=None, max_examples=15)
def test_simulated_timelines(data: st.DataObject) -> None:
    program, shape = data.draw(programs()), data.draw(shapes())
    costs, block = data.draw(costs_of(shape)), data.draw(st.booleans())
    overlaps: list[Overlap] = ["serial", "pairs", 2]
    plan = compile(program, shape, costs, data.draw(st.sampled_from(overlaps)), counts_block=block)
    line = simulate(plan, costs, counts_block=block).ranks[0]
    assert tuple(span.node for span in line.spans) == plan.nodes
    assert line.makespan == plan.predicted == makespan(plan.nodes, costs, counts_block=block)
    assert length(line.busy(Resource.COMPUTE)) == sum(
        costs(node) for node in plan.nodes if node.resource is Resource.COMPUTE
    )
    assert 0 <= line.exposed <= line.exchange <= line.makespan
    assert 0 <= line.hidden_fraction <= 1 if line.exchange else isnan(line.hidden_fraction)
    assert line.makespan >= length(line.busy(Resource.COMPUTE)) + line.exposed  # the rest is idleness on every lane


def test_a_timeline_in_words() -> None:
    assert str(timeline((COMPUTE, 0, 3), (EXCHANGE, 2, 4))) == "2 spans in 4: exchange 2, exposed 1, hidden 50%"


def test_a_serial_step_hides_nothing_and_an_overlapped_one_nearly_all() -> None:
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=2)
    serial = simulate(compile(sequential(4), (MOE, MOE), costs, "serial"), costs).ranks[0]
    assert serial.exposed == serial.exchange == 4 * 2 * 4 * 2
    assert serial.hidden_fraction == 0
    assert serial.makespan == 4 * 2 * 21 + serial.exposed
    overlapped = simulate(compile(combined_1f1b(4, 1), (MOE, MOE), costs, 3), costs).ranks[0]
    assert overlapped.hidden_fraction > 0.9
    assert overlapped.makespan < 1.03 * 4 * 2 * 21


def test_both_clocks(tmp_path: Path) -> None:
    costs = NodeCosts.uniform(attention=4, experts=4, dispatch=4, launch=2)
    program = build_schedule("sequential", microbatches=1, forward_only=True)
    step = simulate(program, costs, overlap="serial", counts_block=True)
    # The host launches attention until 2 and counts until 4, waits for these until 6, and has nothing to wait for then.
    assert [span.start for span in step.ranks[0].host] == [0, 2, 6, 8, 10, 12]
    assert all(span.end == span.start + 2 for span in step.ranks[0].host)
    assert [f"{span.node} {span.start}" for span in step.ranks[0].spans][-2:] == [
        "combine.f[0] m0 16.0",
        "aggregate.f[0] m0 20.0",
    ]
    assert step.ranks[0].late == 2 + 4  # until the first launch, and from 6 on until experts are launched
    step.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["cat"] == "host" for event in events) == 6
    assert simulate(program, costs, overlap="serial").makespan < step.makespan
    free = simulate(step.plan, NodeCosts.uniform(attention=4, experts=4, dispatch=4), counts_block=True)
    assert (free.ranks[0].host, free.ranks[0].late) == ((), 0)


def test_a_send_leaves_when_its_own_member_of_a_pair_is_done() -> None:
    program = build_schedule("combined_1f1b", ranks=2, microbatches=4, chunks=2)
    timeline = simulate(program, NodeCosts.uniform(attention=3, experts=4, dispatch=2, send=1), overlap="pairs")
    for rank in timeline.ranks:
        end, free = {}, 0.0
        for span in rank.spans:
            kind = Kind.I if span.node.kind is Kind.W else span.node.kind  # a B contains its weight gradients
            key = (span.node.stage, span.node.microbatch, kind)
            if span.node.op is Op.SEND:
                assert span.start == max(end[key], free)  # behind the send before it
                free = span.end
            elif span.node.resource is Resource.COMPUTE:
                end[key] = span.end
