"""Costs: uniform ones, those of single nodes, those of several links, and refusals."""

import math
import re
from typing import Any

import pytest

from overlap1f1b.plan import Node, NodeCosts, Op
from overlap1f1b.plan.costs import Cost, Held
from overlap1f1b.schedule import Kind


def node(op: Op, kind: Kind, block: int = 0, call: int = 0) -> Node:
    return Node(op, kind, microbatch=5, block=block, call=call)


def test_uniform() -> None:
    costs = NodeCosts.uniform(
        attention=3, experts=4, dispatch=5, combine=6, counts=0.5, aggregate=0.25, dense=7, reduce=8
    )
    for op, time in ((Op.ATTENTION, 3.0), (Op.EXPERTS, 4.0), (Op.DENSE, 7.0)):
        assert [costs(node(op, kind)) for kind in (Kind.F, Kind.I, Kind.W)] == [time] * 3
    for op, time in ((Op.DISPATCH, 5.0), (Op.COMBINE, 6.0), (Op.AGGREGATE, 0.25)):
        assert [costs(node(op, kind)) for kind in (Kind.F, Kind.I)] == [time] * 2
    recomputes = (Op.RECOMPUTE_ATTENTION, Op.RECOMPUTE_EXPERTS, Op.RECOMPUTE_DENSE)
    assert [costs(node(op, Kind.I)) for op in recomputes] == [3, 4, 7]
    assert costs(node(Op.COUNTS, Kind.F)) == 0.5
    assert costs(node(Op.REDUCE, Kind.W)) == 8
    # A combine costs what a dispatch does unless told.
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5)
    assert costs(node(Op.COMBINE, Kind.F)) == costs(node(Op.COMBINE, Kind.I)) == 5
    assert costs(node(Op.COUNTS, Kind.F)) == costs(node(Op.REDUCE, Kind.W)) == 0
    assert NodeCosts.uniform(attention=3, experts=4, dispatch=5, combine=0)(node(Op.COMBINE, Kind.F)) == 0


def test_single_nodes_come_first() -> None:
    costs = NodeCosts(
        {(Op.EXPERTS, Kind.F): 4.0}, {(Op.EXPERTS, Kind.F, 0, 1, 0, 0): 0.0, (Op.EXPERTS, Kind.F, 0, 1, 1, 0): 9.0}
    )
    assert [costs(node(Op.EXPERTS, Kind.F, *at)) for at in ((0, 0), (1, 0), (1, 1), (1, 2))] == [4, 0, 9, 4]
    assert costs(node(Op.EXPERTS, Kind.I, 1, 1)) == 0


def test_an_exchange_takes_as_long_as_its_slowest_link() -> None:
    costs = NodeCosts({(Op.COMBINE, Kind.F): 2.0}, {(Op.DISPATCH, Kind.F, 0, 0, 0, 0): (1.0, 3.0, 2.0)})
    assert costs.links(node(Op.DISPATCH, Kind.F)) == (1, 3, 2)
    assert costs(node(Op.DISPATCH, Kind.F)) == 3
    assert costs.links(node(Op.COMBINE, Kind.F)) == (2,)


def test_costs_are_shared_by_the_parts() -> None:
    whole, parts = (NodeCosts.uniform(attention=3, experts=4, dispatch=5).in_parts(count) for count in (1, 4))
    shared = {(Op.DISPATCH, Kind.F): 4, (Op.EXPERTS, Kind.I): 4, (Op.EXPERTS, Kind.W): 1, (Op.ATTENTION, Kind.F): 1}
    assert all(parts.by_op[key] == whole.by_op[key] / share for key, share in shared.items())


@pytest.mark.parametrize("cost", [-1.0, math.inf, math.nan, (1.0, -0.5), (math.nan,)])
def test_refused_costs_are_named(cost: Cost) -> None:
    with pytest.raises(ValueError, match=r"cost of dispatch\.F is .*; allowed: a finite number ≥ 0"):
        NodeCosts(by_node={(Op.DISPATCH, Kind.F, 0, 0, 0, 0): cost})
    if not isinstance(cost, tuple):
        with pytest.raises(ValueError, match=r"cost of experts\.W is"):
            NodeCosts({(Op.EXPERTS, Kind.W): cost})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"by_op": 5}, "by_op=5; allowed: Mapping"),
        ({"by_node": [1, 2]}, "by_node=[1, 2]; allowed: Mapping"),
        ({"launch": 0.1}, "launch=0.1; allowed: Mapping"),
        ({"bytes": 5}, "bytes=5; allowed: Mapping"),
        ({"bytes": {"x": Held()}}, "a cost of x; allowed: a key (Op, Kind, stage, block, call, part)"),
        ({"bytes": {(Op.DISPATCH, Kind.F, 0, 0, 0, 0): 5}}, "bytes of dispatch.F=5; allowed: Held"),
        ({"shared_links": "no"}, "shared_links='no'; allowed: True or False"),
        ({"by_op": {(Op.DISPATCH, Kind.F): "3"}}, "cost of dispatch.F is '3'; allowed: a finite number ≥ 0"),
        ({"by_op": {(Op.DISPATCH, Kind.F): True}}, "cost of dispatch.F is True; allowed: a finite number ≥ 0"),
    ],
)
def test_values_of_another_kind(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        NodeCosts(**given)
    for name, value in (("attention", "3"), ("send", None), ("launch", -1)):
        with pytest.raises(ValueError, match=f"^{name}={value!r}; allowed: a finite number, 0 or more$"):
            NodeCosts.uniform(**{"attention": 1, "experts": 1, "dispatch": 1, name: value})  # type: ignore[arg-type]


def test_exchanges_use_the_same_links() -> None:
    dispatch, combine = (Op.DISPATCH, Kind.F, 0, 0, 0, 0), (Op.COMBINE, Kind.F, 0, 0, 0, 0)
    with pytest.raises(ValueError, match=r"costs over \[2, 3\] links"):
        NodeCosts(by_node={dispatch: (1.0, 2.0), combine: (1.0, 2.0, 3.0)})
    with pytest.raises(ValueError, match=r"costs over \[0\] links"):
        NodeCosts(by_node={dispatch: ()})


def test_launch_costs() -> None:
    assert NodeCosts.uniform(attention=1, experts=1, dispatch=1).launch == {}
    launch = NodeCosts.uniform(attention=1, experts=1, dispatch=1, launch=0.5).launch
    assert {launch[op, kind] for op in Op for kind in Kind} == {0.5}
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"launch cost of dispatch\.F is .*; allowed: a finite number ≥ 0"):
            NodeCosts(launch={(Op.DISPATCH, Kind.F): wrong})
    with pytest.raises(ValueError, match="allowed: a key"):
        NodeCosts(launch={Op.DISPATCH: 1.0})  # type: ignore[dict-item]
