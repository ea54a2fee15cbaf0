"""Plans over several ranks as timelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import overlap1f1b as o1
from overlap1f1b.plan import NodeCosts, Op, Resource
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.simulation import Costs, simulate

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=0, send=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [("1f1b", {}), ("afab", {}), ("interleaved_1f1b", {"chunks": 2}), ("zb_h1", {}), ("zb_v", {}), ("zb_h2", {})],
)
def test_without_exchange_nodes_take_as_long_as_actions(name: str, options: dict[str, int]) -> None:
    """F 7, B 14, W 7 of a stage: what the simulation of actions says, to which the closed forms are tested."""
    program = build_schedule(name, ranks=4, microbatches=8, **options)
    chunks = program.placement.stages // 4
    nodes = simulate(program, COSTS, overlap="serial")
    actions = simulate(program, Costs(forward=7 * chunks, backward=14 * chunks, weight=7 * chunks))
    assert nodes.makespan == actions.makespan
    for rank in range(4):
        assert nodes.bubble(rank) == actions.bubble(rank)
        assert nodes.busy(rank) == actions.busy(rank)


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


def test_exposed_exchange_and_hidden_fraction() -> None:
    program = build_schedule("1f1b", ranks=2, microbatches=4)
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5)
    serial, best = (simulate(program, costs, overlap=overlap, layers=2) for overlap in ("serial", 3))  # type: ignore[arg-type]
    assert serial.hidden_fraction == 0.0
    assert [serial.exposed(rank) for rank in (0, 1)] == [4 * 2 * 4 * 5.0] * 2
    assert best.hidden_fraction > 0.1
    assert best.makespan < serial.makespan
    assert best.peak_activations(0) == 2.0


def test_trace_and_picture_of_all_ranks(tmp_path: Path) -> None:
    timeline = o1.simulate(
        build_schedule("dualpipe", ranks=2, microbatches=4),
        o1.NodeCosts.uniform(attention=3, experts=4, dispatch=5, send=1),
    )
    timeline.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", "exchange", "peer"} <= tracks
    assert sum(event["ph"] == "X" for event in events) == sum(len(rank.spans) for rank in timeline.ranks)
    lines = timeline.draw(60).splitlines()
    assert [line for line in lines if line.startswith("rank")] == ["rank 0", "rank 1"]
    assert max(map(len, lines)) <= 60 + len("exchange ") + 1
