"""Costs from spans."""

from __future__ import annotations

import pytest

from overlap1f1b.engine.play.measure import measured_costs
from overlap1f1b.plan import Node, Op, Span
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.mesh import Mesh


@pytest.mark.parametrize(("kind", "sender", "receiver"), [(Kind.F, 0, 1), (Kind.I, 1, 0)])
def test_a_transfer_takes_what_its_receiver_saw(kind: Kind, sender: int, receiver: int) -> None:
    sends = [Node(Op.SEND, kind, m, block=3, stage=sender) for m in range(2)]
    receives = [Node(Op.RECEIVE, kind, m, block=0, stage=receiver) for m in range(2)]
    spans = [Span(node, 0, 9) for node in sends] + [Span(receives[0], 5, 7), Span(receives[1], 8, 12)]
    costs = measured_costs([*sends, *receives], spans, Mesh(None), shared_links=True)
    assert costs(sends[0]) == costs(sends[1]) == 3.0
    assert costs(receives[0]) == 0.0
    assert costs.shared_links


def test_a_node_takes_the_mean_over_microbatches() -> None:
    nodes = [Node(Op.EXPERTS, Kind.F, m, block=1) for m in range(3)]
    spans = [Span(node, 10 * m, 10 * m + m + 1) for m, node in enumerate(nodes)]
    assert measured_costs(nodes, spans, Mesh(None), shared_links=False)(nodes[2]) == 2.0
