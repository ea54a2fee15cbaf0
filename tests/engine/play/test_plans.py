"""The plans of an engine."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from overlap1f1b.engine.play.plans import Plans
from overlap1f1b.plan import BlockShape, NodeCosts, compile
from overlap1f1b.schedule import build_schedule, forwards_of
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


@pytest.mark.parametrize("other", ["combined_1f1b", "sequential"])
def test_an_evaluation_follows_the_program_that_is_kept(other: str) -> None:
    """Beside an order that is found, fixed schedules are tried; they may begin forwards in another order."""
    program = build_schedule(other, microbatches=3)  # type: ignore[arg-type]
    tried = [compile(PROGRAM, SHAPES, COSTS, "pairs"), compile(program, SHAPES, COSTS, "serial")]
    of = plans(tries=1)
    with patch.object(Plans, "_compiled_all", return_value=tried), patch("overlap1f1b.engine.play.trials.WITHIN", 1e9):
        of.costs = COSTS
        of.try_plans()
        before = of.of_evaluation
        for seconds in (2.0, 1.0):
            of.note(seconds)
    assert of.of_step is tried[1]
    assert (of.of_evaluation is before) == (program == PROGRAM)
    assert of.of_evaluation.program.name == forwards_of(program).name
