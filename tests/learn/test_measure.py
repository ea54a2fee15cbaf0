"""Costs from spans."""

from collections.abc import Sequence

import pytest

from overlap1f1b.engine import Engine
from overlap1f1b.learn.measure import measured_costs
from overlap1f1b.learn.tuner import LONE_STEPS
from overlap1f1b.plan import Node, NodeCosts, Op, Span, cost_key
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.transport.mesh import Mesh
from tests import models


def test_a_transfer_takes_what_it_took_alone() -> None:
    sends = [Node(Op.SEND, Kind.F, m, block=3, stage=0) for m in range(2)]
    receives = [Node(Op.RECEIVE, Kind.F, m, block=0, stage=1) for m in range(2)]
    spans = [Span(node, 0, 9) for node in (*sends, *receives)]
    alone = {cost_key(sends[0]): 2.5}
    costs = measured_costs([*sends, *receives], spans, Mesh(None), shared_links=True, transfers=alone)
    assert costs(sends[1]) == 2.5
    assert costs(receives[0]) == 0.0
    assert costs.shared_links


@pytest.mark.parametrize(
    ("microbatches", "took", "cost"),
    [
        ((0, 1, 2, 3, 4), (9, 2, 2, 2, 2), 2.0),  # one compilation is no cost
        ((0, 0, 0), (1, 9, 3), 3.0),  # over steps
        ((0, 1, 2), (1, 2, 3), 2.0),
    ],
)
def test_a_node_takes_the_median(microbatches: Sequence[int], took: Sequence[float], cost: float) -> None:
    nodes = [Node(Op.EXPERTS, Kind.F, m, block=1) for m in microbatches]
    spans = [Span(node, 10 * n, 10 * n + took[n]) for n, node in enumerate(nodes)]
    assert measured_costs(nodes, spans, Mesh(None), shared_links=False)(nodes[-1]) == cost


def test_a_single_microbatch_is_measured_in_several_steps() -> None:
    """The first step only warms up; with two microbatches the second one gives the costs."""
    for microbatches, steps in ((1, 1 + LONE_STEPS), (2, 2)):
        program = build_schedule("sequential", microbatches=microbatches)
        engine = Engine(models.build(None), program, loss_fn=models.loss_fn)
        x, target = models.batch(2)
        for step in range(1, steps + 1):
            engine.step(x, target=target)
            assert (engine.costs is not None) == (step == steps)


def test_steps_from_before_costs_were_set_do_not_count() -> None:
    engine = Engine(models.build(None), build_schedule("sequential", microbatches=1), loss_fn=models.loss_fn)
    x, target = models.batch(2)
    for _ in range(LONE_STEPS):  # one less than needed
        engine.step(x, target=target)
    for costs in (NodeCosts(), None):
        engine.costs = costs
    for _ in range(LONE_STEPS):
        assert engine.costs is None
        engine.step(x, target=target)
    assert engine.costs is not None


def test_a_launch_takes_the_median_over_microbatches_and_blocks() -> None:
    nodes = [Node(Op.EXPERTS, Kind.F, m, block=block) for m in range(2) for block in range(3)]
    nodes.append(Node(Op.COUNTS, Kind.F, 0, block=0))
    launches = [Span(node, 10.0, 10.0 + took) for node, took in zip(nodes, (9, 1, 2, 3, 8, 1, 0.5), strict=True)]
    costs = measured_costs(nodes, (), Mesh(None), shared_links=False, launches=launches)
    assert costs.launch == {(Op.EXPERTS, Kind.F): 2.5, (Op.COUNTS, Kind.F): 0.5}
    assert all(len(key) == 6 and key[2] >= 0 for key in costs.by_node)
    assert measured_costs(nodes, (), Mesh(None), shared_links=False).launch == {}
