"""What is simulated: programs by actions or by nodes, and plans."""

import pytest

import overlap1f1b as o1
from overlap1f1b.plan import NodeCosts
from overlap1f1b.schedule import Program, build_schedule
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


def test_what_cannot_be_simulated() -> None:
    program = build_schedule("1f1b", ranks=2, microbatches=2)
    plan = o1.compile(program, (o1.plan.BlockShape(1),), o1.NodeCosts(), "serial")
    for what, costs, options, message in [
        (program, 1.0, {}, "costs=1.0; allowed: NodeCosts or Costs$"),
        (program, o1.NodeCosts(), {"layers": 0}, "layers=0; allowed: 1 or more"),
        (program, o1.NodeCosts(), {"layers": 1.5}, "layers=1.5; allowed: a whole number, 1 or more"),
        (program, o1.NodeCosts(), {"parts": 0}, "parts=0; allowed: 1 to 8$"),
        (program, o1.NodeCosts(), {"counts_block": "no"}, "counts_block='no'; allowed: True or False$"),
        (program, Costs(), {"layers": 2}, "layers=2 with Costs, which have no sub-ops; allowed: with NodeCosts"),
        (program, Costs(), {"overlap": 3}, "overlap=3 with Costs, which have no sub-ops; allowed: with NodeCosts"),
        (program, Costs(), {"counts_block": True}, "counts_block=True with Costs, which have no sub-ops; allowed"),
        (plan, o1.NodeCosts(), {"overlap": 3}, "overlap=3 with a Plan, which sets it; allowed: with a Program"),
        (plan, Costs(), {}, r"simulate\(Plan, Costs\); allowed: a Program with Costs or NodeCosts, a Plan with NodeCo"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            simulate(what, costs, **options)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="has 1 ranks and a placement over 2"):
        simulate(Program("mine", 2, program.ranks[:1], (2,), program.placement), Costs())
