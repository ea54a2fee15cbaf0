"""The plans of an engine."""

from __future__ import annotations

import pytest

from overlap1f1b.engine.play.plans import Plans
from overlap1f1b.plan import BlockShape, NodeCosts, compile
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.mesh import Mesh

PROGRAM, SHAPES = build_schedule("combined_1f1b", microbatches=3), ((BlockShape(0), BlockShape(1)),)
COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5)


def plans(**options: object) -> Plans:
    given = {"counts_block": True, "rendezvous": False, "mesh": Mesh(None), "costs": None, "plan": None} | options
    return Plans(PROGRAM, SHAPES, 3, **given)  # type: ignore[arg-type]


def test_steps_are_serial_until_there_are_costs() -> None:
    of = plans()
    assert of.measuring
    serial = of.of_step
    assert serial is of.of_step  # compiled once
    assert serial.fingerprint == compile(PROGRAM, SHAPES, NodeCosts(), "serial").fingerprint
    of.costs = COSTS
    assert not of.measuring
    assert of.of_step.fingerprint == compile(PROGRAM, SHAPES, COSTS, 3).fingerprint
    of.costs = None
    assert of.measuring
    assert of.of_step is serial


def test_a_plan_that_is_set_stays_until_costs_are() -> None:
    mine = compile(PROGRAM, SHAPES, COSTS, "pairs")
    of = plans(plan=mine)
    assert of.of_step is mine
    assert not of.measuring
    of.costs = COSTS
    assert of.of_step is not mine
    other = compile(build_schedule("sequential", microbatches=3), SHAPES, COSTS, 1)
    with pytest.raises(ValueError, match="a plan of 'sequential' for other blocks"):
        of.of_step = other


def test_an_evaluation_has_the_forwards_alone() -> None:
    assert {node.kind.value for node in plans().of_evaluation.nodes} == {"F"}
